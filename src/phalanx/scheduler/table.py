"""The request table: one NumPy column per fact, one row per running request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import EnteringRows, Int32, Int64, UInt8
from phalanx.scheduler.ragged import indptr_of

ALWAYS_EAGER = np.iinfo(np.int32).max


class RowState:
    """Life of a row: FREE -> PREFILL -> DECODE -> LAST -> FREE, with ZOMBIE on the way if it ends early.

    Plain integers: NumPy compares a uint8 column with an IntEnum ten times more slowly.
    """

    FREE: Final = 0
    PREFILL: Final = 1  # part of its prompt is still to be launched
    DECODE: Final = 2  # takes a token in every step
    LAST: Final = 3  # its last token is launched, the result not read yet
    ZOMBIE: Final = 4  # ended, but a step in flight may still write to its pages


class RequestTable:
    """Columns over rows 0 .. max_running_requests; row 0 is padding and always FREE.

    Attributes:
        state: [num_rows] uint8, RowState.
        stream_ids: [num_rows] int64.
        prompt_lens: [num_rows] int32.
        max_new_tokens: [num_rows] int32, cut to the context.
        launched: [num_rows] int32, output tokens whose steps were planned.
        eager_until: [num_rows] int32, the row needs the eager sampler while it has fewer output tokens.
    """

    def __init__(self, max_running_requests: int) -> None:
        self.num_rows = max_running_requests + 1
        self.state: UInt8 = np.zeros(self.num_rows, dtype=np.uint8)
        self.stream_ids: Int64 = np.zeros(self.num_rows, dtype=np.int64)
        self.prompt_lens: Int32 = np.zeros(self.num_rows, dtype=np.int32)
        self.max_new_tokens: Int32 = np.zeros(self.num_rows, dtype=np.int32)
        self.launched: Int32 = np.zeros(self.num_rows, dtype=np.int32)
        self.eager_until: Int32 = np.zeros(self.num_rows, dtype=np.int32)
        self._free: Int64 = np.arange(max_running_requests, 0, -1, dtype=np.int64)  # a stack, low rows first
        self.num_free = max_running_requests

    @property
    def num_used(self) -> int:
        """Rows that are not free (zombies included)."""
        return self.num_rows - 1 - self.num_free

    def enter(self, requests: Sequence[EngineRequest], max_new_tokens: Sequence[int]) -> Int64:
        """Give each request ([k], at most num_free) a row: [k] int64, in state PREFILL."""
        rest = self.num_free - len(requests)
        rows = self._free[rest : self.num_free][::-1].copy()
        self.num_free = rest
        self.state[rows] = RowState.PREFILL
        self.stream_ids[rows] = [r.stream_id for r in requests]
        self.prompt_lens[rows] = [len(r.input_ids) for r in requests]
        self.max_new_tokens[rows] = max_new_tokens
        self.launched[rows] = 0
        self.eager_until[rows] = [_eager_until(r) for r in requests]
        return rows

    def release(self, rows: Int64) -> None:
        """Free these rows ([k], each named once)."""
        self.state[rows] = RowState.FREE
        self._free[self.num_free : self.num_free + len(rows)] = rows[::-1]
        self.num_free += len(rows)

    def used_rows(self) -> Int64:
        """[k] int64: rows that are not free, ascending."""
        return np.flatnonzero(self.state)

    def check(self) -> None:
        """Raise AssertionError unless every row is either on the free stack, once, or in use."""
        num_used = int(np.count_nonzero(self.state))
        assert self.state[0] == RowState.FREE, "row 0 (padding) is in use"
        assert num_used == self.num_used, (
            f"{num_used} rows in use, {self.num_free} free of {self.num_rows - 1}"
        )
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a row is on the free stack twice"
        assert not self.state[free].any() and not (free == 0).any(), "a row on the free stack is in use"


def _needs_eager(s: SamplingParams) -> bool:
    if s.frequency_penalty or s.presence_penalty or s.repetition_penalty != 1.0 or s.logit_bias:
        return True
    return not s.is_greedy and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)


def _eager_until(request: EngineRequest) -> int:
    if request.max_new_tokens == 0:  # its sampled token is dropped
        return 0
    if request.logprobs is not None or _needs_eager(request.sampling):
        return int(ALWAYS_EAGER)
    return request.sampling.min_new_tokens


def device_columns(rows: Int64, requests: Sequence[EngineRequest]) -> EnteringRows:
    """What the device has to know about these requests, in the order of `rows` ([k])."""
    samplings = [r.sampling for r in requests]
    numbers = np.array(
        [
            (
                0.0 if s.is_greedy else s.temperature,
                s.top_p,
                s.min_p,
                s.frequency_penalty,
                s.presence_penalty,
                s.repetition_penalty,
            )
            for s in samplings
        ],
        dtype=np.float32,
    ).reshape(len(requests), 6)
    temperature, top_p, min_p, frequency, presence, repetition = np.ascontiguousarray(numbers.T)
    stop_lens = np.array([len(r.stop_ids) for r in requests], dtype=np.int32)
    bias_lens = np.array([len(s.logit_bias) for s in samplings], dtype=np.int32)
    return EnteringRows(
        rows=rows.astype(np.int32),
        temperature=temperature,
        top_p=top_p,
        top_k=np.array([s.top_k for s in samplings], dtype=np.int32),
        min_p=min_p,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_new_tokens=np.array([s.min_new_tokens for s in samplings], dtype=np.int32),
        seed=np.array([s.sampling_seed for s in samplings], dtype=np.int64),
        prompt_lens=np.array([len(r.input_ids) for r in requests], dtype=np.int32),
        stop_indptr=indptr_of(stop_lens),
        stop_ids=np.array([token for r in requests for token in r.stop_ids], dtype=np.int32),
        bias_indptr=indptr_of(bias_lens),
        bias_ids=np.array([token for s in samplings for token in s.logit_bias], dtype=np.int32),
        bias_values=np.array([bias for s in samplings for bias in s.logit_bias.values()], dtype=np.float32),
    )


NO_ENTERING = device_columns(np.zeros(0, dtype=np.int64), ())
