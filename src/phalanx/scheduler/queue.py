"""Requests that wait for a row: first come, first served."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.core.request import EngineRequest


@dataclass(slots=True)
class Waiting:
    """A checked request and what it will take.

    Attributes:
        request: the request.
        prompt_len: tokens of its prompt.
        num_pages: pages it can hold at most.
        packed: its record, see `records`.
        queued_ns: when it was queued (`time.perf_counter_ns`).
    """

    request: EngineRequest
    prompt_len: int
    num_pages: int
    packed: bytes
    queued_ns: int = 0


class WaitingQueue:
    """A FIFO from which any stream can also be taken out, in constant time."""

    def __init__(self) -> None:
        # Not a dict: finding the first key of one whose front was emptied takes longer and longer.
        self._entries: OrderedDict[int, Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._entries

    def push(self, waiting: Waiting) -> None:
        """Append."""
        waiting.queued_ns = time.perf_counter_ns()
        self._entries[waiting.request.stream_id] = waiting

    def in_order(self) -> Iterable[Waiting]:
        """All of them, the one that has waited longest first."""
        return self._entries.values()

    def stream_ids(self) -> Iterable[int]:
        """Their stream ids, in the same order."""
        return self._entries.keys()

    def pop(self, count: int) -> None:
        """Take the first `count` out."""
        for _ in range(count):
            self._entries.popitem(last=False)

    def remove(self, stream_id: int) -> bool:
        """Take one out, wherever it stands; False if it is not here."""
        return self._entries.pop(stream_id, None) is not None
