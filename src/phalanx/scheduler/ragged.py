"""Small helpers for ragged (CSR) arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.core.step import Int32, Int64


def indptr_of(lens: npt.NDArray[np.integer]) -> Int32:
    """[k+1] int32 CSR offsets of segments with these lengths ([k])."""
    indptr = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=indptr[1:])
    return indptr


def expand(first: Int64, lens: npt.NDArray[np.integer]) -> Int64:
    """The numbers first[i] .. first[i]+lens[i]-1, segment after segment: [sum(lens)] int64."""
    ends = np.cumsum(lens, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Int64 = np.arange(total, dtype=np.int64)
    numbers += np.repeat(first - ends + lens, lens)
    return numbers
