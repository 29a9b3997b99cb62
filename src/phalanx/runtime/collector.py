"""When Python's cyclic garbage collector runs: not while tokens wait for it.

An automatic full collection walks every object of the process, which stops it for long with thousands of
requests alive (benchmarks/gc_pauses.py). Requests leave no cycles behind (tests/e2e/test_no_garbage.py); what
still does (exceptions, connections) is collected when the process has nothing to do.
"""

from __future__ import annotations

import gc
import time

_IDLE_S = 1.0
_AT_LEAST_EVERY_S = 900.0  # never idle: one pause now and then is better than growing for days


def settle_heap() -> None:
    """Call when start-up is done: what lives now lives to the end, and no collection looks at it again.

    Switches the automatic collections off; an `IdleCollector` takes their place.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


class IdleCollector:
    """Collects at idle. Call `worked` or `idle` often, from the thread whose pauses matter."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._last_work_s = self._collected_s = now
        self._is_clean = True

    def worked(self) -> None:
        """Something was done since the last call; collects only if it is long due."""
        now = time.monotonic()
        self._last_work_s, self._is_clean = now, False
        if now - self._collected_s >= _AT_LEAST_EVERY_S:
            self._collect(now)

    def idle(self) -> None:
        """Nothing is to be done; collects once per idle time, a second into it."""
        if self._is_clean:
            return
        now = time.monotonic()
        if now - self._last_work_s >= _IDLE_S:
            self._collect(now)
            self._is_clean = True

    def _collect(self, now_s: float) -> None:
        gc.collect()
        self._collected_s = now_s
