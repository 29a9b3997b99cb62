"""Steps that came from the engine and are not told yet; under load they are joined, by array operations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from phalanx.core.step import StepOutputs

MAX_JOINED = 65536  # rows of steps that are joined at once: some milliseconds


class Backlog:
    """Steps, oldest first."""

    def __init__(self) -> None:
        self._steps: list[StepOutputs] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, steps: list[StepOutputs]) -> None:
        """Append steps."""
        self._steps += steps

    def take(self) -> list[StepOutputs]:
        """The oldest steps, as many as are joined at once; they leave the backlog."""
        num_rows = count = 0
        for step in self._steps:
            num_rows += len(step.tokens)
            if count and num_rows > MAX_JOINED:
                break
            count += 1
        steps = self._steps[:count]
        del self._steps[:count]
        return steps


def joined(steps: list[StepOutputs]) -> Iterable[tuple[int, list[int], int]]:
    """(stream id, its new ids, its last finish flag) of several steps, oldest first, joined per stream."""
    stream_ids = np.concatenate([step.stream_ids for step in steps])
    order = np.argsort(stream_ids, kind="stable")  # within a stream the order of the steps stays
    stream_ids = stream_ids[order]
    tokens = np.concatenate([step.tokens for step in steps])[order]
    finish = np.concatenate([step.finish for step in steps])[order]
    ends = np.flatnonzero(np.diff(stream_ids, append=-1))  # no id is negative
    has_token = tokens >= 0
    ids = tokens[has_token].tolist()
    start = 0
    for stream_id, end, flag in zip(
        stream_ids[ends].tolist(), np.cumsum(has_token)[ends].tolist(), finish[ends].tolist(), strict=True
    ):
        yield stream_id, ids[start:end], flag
        start = end
