"""What an API worker does besides serving: it measures its event loop, collects garbage, stays watched."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Callable

from phalanx.runtime.collector import IdleCollector
from phalanx.runtime.watchdog import Watchdog

_EVERY_S = 0.05
LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """Counts of values up to each bound, as Prometheus has them.

    Attributes:
        bounds: upper bounds, ascending; a last bucket holds what lies beyond.
        counts: values per bucket, not cumulated, len(bounds) + 1.
        sum, max: over all values.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.max = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.max = max(self.max, value)

    @property
    def count(self) -> int:
        """All values."""
        return sum(self.counts)


class Housekeeper:
    """Runs on the worker's event loop, twenty times a second.

    Args:
        is_idle: whether no request is alive.
        watchdog_timeout_s: a loop that does not turn for so long ends the process, and the launcher starts
            another; 0 for never.
        on_tick: called each time.

    Attributes:
        loop_lag_s: how late the event loop ran what was due, in seconds.
    """

    def __init__(
        self,
        *,
        is_idle: Callable[[], bool],
        watchdog_timeout_s: float,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_idle = is_idle
        self._on_tick = on_tick
        self._watchdog = Watchdog(watchdog_timeout_s)
        self._collector = IdleCollector()
        self._timer: asyncio.TimerHandle | None = None
        self.loop_lag_s = Histogram(LAG_BOUNDS_S)

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._watchdog.alive()
        self._schedule()

    def close(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
        self._watchdog.close()

    def _schedule(self) -> None:
        self._due_s = time.monotonic() + _EVERY_S
        self._timer = self._loop.call_later(_EVERY_S, self._tick)

    def _tick(self) -> None:
        self.loop_lag_s.add(max(time.monotonic() - self._due_s, 0.0))
        self._watchdog.alive()
        if self._is_idle():
            self._collector.idle()
        else:
            self._collector.worked()
        self._on_tick()
        self._schedule()
