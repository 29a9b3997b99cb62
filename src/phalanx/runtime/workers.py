"""The API worker processes of a server: started, watched, and replaced when they die."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.runtime.heartbeat import Pulse
from phalanx.runtime.process import kill_with_stacks

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0
_LONG_LIFE_S = 30.0  # a worker that lived for longer was not killed by what killed the one before it
_MAX_SHORT_LIVES = 5

Start = Callable[[int, int], "subprocess.Popen[bytes]"]


@dataclass
class _Slot:
    """One of the places that are always to be filled.

    number: of the process that has the place, or had it last. short_lives: deaths in a row, each soon after
    the start. due_s: when the next process is to be started (monotonic), None while one runs. pulse: its own.
    """

    number: int
    process: subprocess.Popen[bytes]
    started_s: float
    short_lives: int = 0
    due_s: float | None = None
    pulse: Pulse = field(default_factory=Pulse)


class WorkerPool:
    """Keeps `count` workers alive.

    A worker's number names its requests in the engine and is never used again, so that what a dead worker
    left behind is told from what its successor does.

    Args:
        start: starts the process of a worker; takes its slot, 0 to count - 1, and its number.
        on_death: takes the number of a worker that has ended.
        beat: takes a worker's number; what it returns changes while the worker turns; None before it did.
        silence_s: a worker whose beat stands still for longer is killed; 0 for never.
    """

    def __init__(
        self,
        count: int,
        start: Start,
        on_death: Callable[[int], None],
        *,
        beat: Callable[[int], int | None],
        silence_s: float,
    ) -> None:
        self._start = start
        self._beat = beat
        self._silence_s = silence_s
        self._on_death = on_death
        self._slots = [_Slot(i, start(i, i), time.monotonic()) for i in range(count)]
        self._next_number = count

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Those that run, and dead ones not yet replaced."""
        return [slot.process for slot in self._slots]

    def check(self) -> int | None:
        """Replace what has died. Returns the exit code of a worker that keeps dying, else None."""
        for i, slot in enumerate(self._slots):
            if self._silence_s and slot.due_s is None:
                self._listen(i, slot)
            if slot.due_s is None and slot.process.poll() is not None:
                self._bury(i, slot)
                if slot.short_lives > _MAX_SHORT_LIVES:
                    logger.error("API worker %d keeps dying", i)
                    return slot.process.returncode
            if slot.due_s is not None and time.monotonic() >= slot.due_s:
                self._revive(i, slot)
        return None

    def _listen(self, i: int, slot: _Slot) -> None:
        silent_s = slot.pulse.look(self._beat(slot.number))
        if silent_s > self._silence_s and slot.process.poll() is None:
            logger.error("API worker %d has not turned for %.0f s: killing it", i, silent_s)
            slot.pulse = Pulse()
            kill_with_stacks(slot.process)

    def _bury(self, i: int, slot: _Slot) -> None:
        self._on_death(slot.number)
        lived_s = time.monotonic() - slot.started_s
        slot.short_lives = slot.short_lives + 1 if lived_s < _LONG_LIFE_S else 1
        wait_s = min(_FIRST_WAIT_S * 2 ** (slot.short_lives - 1), _LONGEST_WAIT_S)
        slot.due_s = time.monotonic() + wait_s
        code = slot.process.returncode
        if code == 0:  # somebody asked this one to end, and it has answered its requests
            logger.info("API worker %d has stopped as it was told to; the next starts in %.1f s", i, wait_s)
            return
        logger.error(
            "API worker %d ended with code %s after %.1f s; aborting its requests, the next starts in %.1f s",
            i,
            code,
            lived_s,
            wait_s,
        )

    def _revive(self, i: int, slot: _Slot) -> None:
        slot.number, slot.due_s = self._next_number, None
        slot.pulse = Pulse()
        self._next_number += 1
        slot.process, slot.started_s = self._start(i, slot.number), time.monotonic()
