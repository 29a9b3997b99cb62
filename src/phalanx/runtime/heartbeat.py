"""Whether a process still turns, seen from another.

One that was stopped, or whose interpreter's lock is held, cannot end itself as its watchdog would.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

_LONGEST_TURN_S = 1.0  # of silence counted between two looks: who was stopped itself blames nobody
ENGINE_BEAT = "engine"
"""The engine's name among the heartbeats."""


class Pulse:
    """How long something that should change has stood still.

    Args:
        longest_turn_s: what is counted at most between two looks.
    """

    def __init__(self, longest_turn_s: float = _LONGEST_TURN_S) -> None:
        self._longest_turn_s = longest_turn_s
        self._looked_s = time.monotonic()
        self._beat: int | None = None
        self._silent_s = 0.0

    def look(self, beat: int | None) -> float:
        """Seconds that `beat` has been the same; 0 while it is None."""
        now = time.monotonic()
        passed_s, self._looked_s = min(now - self._looked_s, self._longest_turn_s), now
        if beat is None or beat != self._beat:
            self._beat, self._silent_s = beat, 0.0
        else:
            self._silent_s += passed_s
        return self._silent_s


class Heartbeat:
    """A file that a process touches and the launcher looks at.

    Args:
        run_dir: the server's; name: an API worker's number, never used before, or ENGINE_BEAT.
    """

    def __init__(self, run_dir: Path, name: int | str) -> None:
        self._path = run_dir / f"alive-{name}"

    def beat(self) -> None:
        """The process turns."""
        with contextlib.suppress(OSError):  # the directory goes before the last worker does
            self._path.touch()

    def last(self) -> int | None:
        """A number that changes with each beat; None before the first."""
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None

    def remove(self) -> None:
        """The process has ended."""
        with contextlib.suppress(OSError):
            self._path.unlink()


class SilentWorkers:
    """Which workers the engine has not heard of for long; living ones send a ping every second.

    Args:
        silence_s: how long is long.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._silent_s: dict[int, float] = {}  # by worker
        self._looked_s = time.monotonic()

    def heard(self, workers: Iterable[int]) -> None:
        """These have sent something."""
        for worker in workers:
            self._silent_s[worker] = 0.0

    def ended(self, worker: int) -> None:
        """This one is no more."""
        self._silent_s.pop(worker, None)

    def look(self) -> list[int]:
        """Those that have just become silent. Call it after all that has come was taken."""
        now = time.monotonic()
        passed_s = now - self._looked_s
        if passed_s < _LONGEST_TURN_S / 2:
            return []
        self._looked_s = now
        counted_s = min(passed_s, _LONGEST_TURN_S)
        found = []
        for worker, silent_s in self._silent_s.items():
            self._silent_s[worker] = silent_s + counted_s
            if silent_s <= self._silence_s < silent_s + counted_s:
                found.append(worker)
        return found
