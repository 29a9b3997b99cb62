"""One step's outputs, cut by API worker with array operations only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.core.request import WORKER_SHIFT
from phalanx.core.step import Bool, Int32, Int64, StepOutputs, TokenLogprobs

Array = npt.NDArray[Any]


def split_outputs(outputs: StepOutputs, workers: Collection[int]) -> list[tuple[int, StepOutputs]]:
    """(worker, its part) for each of `workers` that has a row or an error in this step.

    Rows keep their order. Rows of other workers are left out.
    """
    owners = outputs.stream_ids >> WORKER_SHIFT
    parts = []
    for worker in workers:
        errors = tuple(error for error in outputs.errors if error[0] >> WORKER_SHIFT == worker)
        mask = owners == worker
        if len(mask) and mask.all() and len(errors) == len(outputs.errors):
            return [(worker, outputs)]
        if mask.any() or errors:
            parts.append((worker, replace(select_outputs(outputs, mask), errors=errors)))
    return parts


def select_outputs(outputs: StepOutputs, mask: Bool) -> StepOutputs:
    """The rows where `mask: [n] bool` is set, with their log-probabilities; errors stay as they are."""
    return replace(
        outputs,
        stream_ids=outputs.stream_ids[mask],
        tokens=outputs.tokens[mask],
        finish=outputs.finish[mask],
        logprobs=_select_logprobs(outputs.logprobs, mask),
        prompt_logprobs=_select_logprobs(outputs.prompt_logprobs, mask),
    )


def _select_logprobs(logprobs: TokenLogprobs | None, mask: Bool) -> TokenLogprobs | None:
    if logprobs is None:
        return None
    keep = np.flatnonzero(mask[logprobs.index])
    if not len(keep):
        return None
    new_index = np.cumsum(mask, dtype=np.int32) - 1
    top_indptr, top = _select_csr(logprobs.top_indptr, keep)
    ids_indptr, ids = _select_csr(logprobs.ids_indptr, keep)
    return TokenLogprobs(
        index=new_index[logprobs.index[keep]].astype(np.int32),
        token_ids=logprobs.token_ids[keep],
        logprobs=logprobs.logprobs[keep],
        top_indptr=top_indptr,
        top_ids=logprobs.top_ids[top],
        top_logprobs=logprobs.top_logprobs[top],
        ids_indptr=ids_indptr,
        ids=logprobs.ids[ids],
        ids_logprobs=logprobs.ids_logprobs[ids],
    )


def _select_csr(indptr: Int32, keep: Int64) -> tuple[Int32, Int64]:
    """The row pointer of the kept rows, and where their values lie in the old value arrays."""
    starts, lens = indptr[keep].astype(np.int64), np.diff(indptr)[keep]
    new_indptr = np.zeros(len(keep) + 1, np.int32)
    np.cumsum(lens, out=new_indptr[1:])
    # Value j of kept row i lies at starts[i] + j; counting through all values, j = position - new_indptr[i].
    values = np.repeat(starts - new_indptr[:-1], lens) + np.arange(new_indptr[-1])
    return new_indptr, values
