"""Plans that run kernels for the first time and touch nobody's rows."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from phalanx.core.step import EnteringRows, PageGrants, PrefillChunks, StepPlan

_DTYPES = {"Int32": np.int32, "Int64": np.int64, "Float32": np.float32}


def padding_chunk(length: int) -> StepPlan:
    """A plan of one prompt of `length` tokens in padding row 0 and slot 0, which samples one token."""
    none, zeros, first = np.zeros(0, np.int32), np.zeros(length, np.int32), np.zeros(1, np.int32)
    nobody = {
        field.name: np.zeros(int(field.name.endswith("indptr")), _DTYPES[str(field.type)])
        for field in fields(EnteringRows)
    }
    return StepPlan(
        step_id=0,
        decode_rows=none,
        entering=EnteringRows(**nobody),
        prefill=PrefillChunks(first, first, first + length, np.ones(1, np.bool_), zeros, zeros),
        grants=PageGrants(none, none, none),
        sample_rows=first,
        num_generated=first,
        needs_eager=np.zeros(1, np.bool_),
    )
