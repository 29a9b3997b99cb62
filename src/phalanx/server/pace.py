"""Long work on the event loop in slices, so that the other clients of this process are served in between."""

from __future__ import annotations

import asyncio
import time

_SLICE_S = 0.005


class Pace:
    """Counts the time since the loop last ran. Make one where the work begins."""

    __slots__ = ("_end_s",)

    def __init__(self) -> None:
        self._end_s = time.monotonic() + _SLICE_S

    async def breathe(self) -> None:
        """Let the event loop run once if this slice is over; call it after each small piece of work."""
        if time.monotonic() >= self._end_s:
            await asyncio.sleep(0)
            self._end_s = time.monotonic() + _SLICE_S
