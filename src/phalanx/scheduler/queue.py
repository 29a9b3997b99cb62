"""Requests that wait for a row: first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from phalanx.core.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Waiting:
    """A checked request and what it will take.

    Attributes:
        request: the request.
        max_new_tokens: its output bound, cut to what the context leaves.
        num_pages: pages it can hold at most.
    """

    request: EngineRequest
    max_new_tokens: int
    num_pages: int


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
        self._entries[waiting.request.stream_id] = waiting

    def head(self) -> Waiting:
        """The one that has waited longest; the queue must not be empty."""
        return next(iter(self._entries.values()))

    def pop(self) -> Waiting:
        """Take the head out."""
        return self._entries.popitem(last=False)[1]

    def remove(self, stream_id: int) -> bool:
        """Take one out, wherever it stands; False if it is not here."""
        return self._entries.pop(stream_id, None) is not None
