"""Which rows want log-probabilities, and the way of the results back to their streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from phalanx.core.request import LogprobParams
from phalanx.core.step import Bool, Int32, Int64, LogprobPlan, TokenLogprobs
from phalanx.scheduler.prefill import Chunks
from phalanx.scheduler.ragged import expand, indptr_of

_NO_INTS: Int32 = np.zeros(0, dtype=np.int32)


class _PromptSpan(NamedTuple):
    """Prompt positions from `start` on, with tokens `targets`, that chunk number `chunk` delivers."""

    chunk: int
    start: int
    targets: Int32
    params: LogprobParams


def _prompt_spans(chunks: Chunks) -> Iterator[_PromptSpan]:
    for i, request in enumerate(chunks.requests):
        params = request.logprobs
        if params is None or params.prompt_start < 0:
            continue
        start = int(chunks.starts[i])
        first = max(start + 1, params.prompt_start)
        targets = request.input_ids[first : start + int(chunks.lens[i]) + 1]
        if len(targets):
            yield _PromptSpan(i, first, targets, params)


class LogprobRows:
    """Rows whose output tokens come with log-probabilities.

    The asked-for token ids of all of them lie in one array that is rebuilt when such a row comes, so that a
    step gathers them without a loop.
    """

    def __init__(self, num_rows: int) -> None:
        self._wanted: Bool = np.zeros(num_rows, dtype=np.bool_)
        self._top_k: Int32 = np.zeros(num_rows, dtype=np.int32)
        self._ids_len: Int32 = np.zeros(num_rows, dtype=np.int32)
        self._ids_first: Int64 = np.zeros(num_rows, dtype=np.int64)
        self._ids: Int32 = _NO_INTS
        self._params: dict[int, LogprobParams] = {}

    def enter(self, row: int, params: LogprobParams) -> None:
        """This row wants them from now on."""
        self._params[row] = params
        self._wanted[row] = True
        self._top_k[row] = params.top_k
        self._ids_len[row] = len(params.token_ids)
        if params.token_ids:
            self._rebuild()

    def leave(self, rows: Int64) -> None:
        """These rows ([k], any) are gone."""
        if not self._params:
            return
        for row in rows[self._wanted[rows]].tolist():
            del self._params[row]
            self._wanted[row] = False
        self._ids_len[rows] = 0

    def plan(self, sample_rows: Int64, chunks: Chunks) -> LogprobPlan | None:
        """What this step has to compute, or None.

        Args:
            sample_rows: [s] int64, as in StepPlan.
            chunks: as in PrefillChunks.
        """
        prompts = list(_prompt_spans(chunks))
        index = np.flatnonzero(self._wanted.take(sample_rows)) if self._params else _NO_INTS
        if not len(index) and not prompts:
            return None
        rows = sample_rows[index]
        ids_len = self._ids_len[rows]
        return LogprobPlan(
            sample_index=index.astype(np.int32),
            top_k=self._top_k[rows],
            ids_indptr=indptr_of(ids_len),
            ids=self._ids[expand(self._ids_first[rows], ids_len)],
            prompt_chunk=np.array([p.chunk for p in prompts], dtype=np.int32),
            prompt_start=np.array([p.start for p in prompts], dtype=np.int32),
            prompt_top_k=np.array([p.params.top_k for p in prompts], dtype=np.int32),
            prompt_ids_indptr=indptr_of(np.array([len(p.params.token_ids) for p in prompts], dtype=np.int32)),
            prompt_ids=np.array([token for p in prompts for token in p.params.token_ids], dtype=np.int32),
            prompt_indptr=indptr_of(np.array([len(p.targets) for p in prompts], dtype=np.int32)),
            prompt_targets=np.concatenate([_NO_INTS, *(p.targets for p in prompts)]),
        )

    def _rebuild(self) -> None:
        first = 0
        parts = []
        for row, params in self._params.items():
            self._ids_first[row] = first
            first += len(params.token_ids)
            parts.append(params.token_ids)
        self._ids = np.array([token for part in parts for token in part], dtype=np.int32)


def reindex(values: TokenLogprobs | None, target: Int32) -> TokenLogprobs | None:
    """Point each position at `target[index]`, drop those whose target is negative; None if none is left."""
    if values is None:
        return None
    index = target[values.index]
    keep = np.flatnonzero(index >= 0)
    if len(keep) == len(index):
        return None if not len(index) else _with_index(values, index)
    if not len(keep):
        return None
    top_first, top_lens = _segments(values.top_indptr, keep)
    ids_first, ids_lens = _segments(values.ids_indptr, keep)
    top, ids = expand(top_first, top_lens), expand(ids_first, ids_lens)
    return TokenLogprobs(
        index=index[keep],
        token_ids=values.token_ids[keep],
        logprobs=values.logprobs[keep],
        top_indptr=indptr_of(top_lens),
        top_ids=values.top_ids[top],
        top_logprobs=values.top_logprobs[top],
        ids_indptr=indptr_of(ids_lens),
        ids=values.ids[ids],
        ids_logprobs=values.ids_logprobs[ids],
    )


def _segments(indptr: Int32, keep: Int64) -> tuple[Int64, Int32]:
    return indptr[keep].astype(np.int64), indptr[keep + 1] - indptr[keep]


def _with_index(values: TokenLogprobs, index: Int32) -> TokenLogprobs:
    return TokenLogprobs(
        index=index,
        token_ids=values.token_ids,
        logprobs=values.logprobs,
        top_indptr=values.top_indptr,
        top_ids=values.top_ids,
        top_logprobs=values.top_logprobs,
        ids_indptr=values.ids_indptr,
        ids=values.ids,
        ids_logprobs=values.ids_logprobs,
    )
