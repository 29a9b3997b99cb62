"""The progress line of a run."""

from __future__ import annotations

import time
from typing import TextIO


class Progress:
    """A line on a terminal, redrawn at each call; plain, since a live display would stall the event loop."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._began = time.perf_counter()

    def __call__(self, num_finished: int, num_failed: int) -> None:
        """Draw `num_finished` of the total, and the failures among them."""
        elapsed = time.perf_counter() - self._began
        filled = 30 * num_finished // max(self._total, 1)
        failed = f", {num_failed} failed" if num_failed else ""
        self._out.write(
            f"\r[{'#' * filled}{'.' * (30 - filled)}] {num_finished}/{self._total}{failed}, {elapsed:.1f} s "
        )
        self._out.flush()

    def close(self) -> None:
        """Leave the line."""
        self._out.write("\n")
        self._out.flush()
