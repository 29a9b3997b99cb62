"""The request table: one NumPy column per fact, one row per running request."""

from __future__ import annotations

from typing import Final

import numpy as np

from phalanx.core.step import Int32, Int64, UInt8
from phalanx.scheduler.records import Records


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

    def enter(self, records: Records) -> Int64:
        """Give each request ([k] records, at most num_free) a row: [k] int64, in state PREFILL."""
        rest = self.num_free - len(records)
        rows = self._free[rest : self.num_free][::-1].copy()
        self.num_free = rest
        self.state[rows] = RowState.PREFILL
        self.stream_ids[rows] = records["stream_id"]
        self.prompt_lens[rows] = records["prompt_len"]
        self.max_new_tokens[rows] = records["max_new_tokens"]
        self.eager_until[rows] = records["eager_until"]
        self.launched[rows] = 0
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
