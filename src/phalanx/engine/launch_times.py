"""Where the host's time inside one `launch` goes."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Of one step.

    Attributes:
        wait_ns: blocked until the device had finished what was queued before, 0 where nothing waits.
        indices_ns: building kv_indices outside the step's graph, on the host or by a launch of its own; None
            where the step builds none there.
        prepared_at_ns: `time.perf_counter_ns` when all inputs of the model were queued.
    """

    wait_ns: int
    indices_ns: int | None
    prepared_at_ns: int


class LaunchClock:
    """Collects the times of the launch in progress; belongs to one thread."""

    def __init__(self) -> None:
        self._wait_ns = 0
        self._indices_ns: int | None = None
        self._prepared_at_ns = 0

    def prepared(self) -> None:
        """The model's inputs are queued; the last call before `take` counts."""
        self._prepared_at_ns = time.perf_counter_ns()

    def built_indices(self, wait_ns: int, indices_ns: int) -> None:
        """kv_indices took this long, after waiting that long for the device."""
        self._wait_ns += wait_ns
        self._indices_ns = (self._indices_ns or 0) + indices_ns

    def take(self) -> LaunchTimes:
        """The times since the last call."""
        times = LaunchTimes(self._wait_ns, self._indices_ns, self._prepared_at_ns or time.perf_counter_ns())
        self._wait_ns, self._indices_ns, self._prepared_at_ns = 0, None, 0
        return times
