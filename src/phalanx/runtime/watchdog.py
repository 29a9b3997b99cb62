"""Ends a process whose loop has stopped turning."""

from __future__ import annotations

import faulthandler
import time

_REARMS = 20  # per timeout: arming starts a thread, so it is not done at every turn


class Watchdog:
    """Unless `alive` is called in time, every thread's stack goes to stderr and the process exits with 1.

    The clock is a C thread of `faulthandler`: it fires even if the interpreter's lock is never released.

    Args:
        timeout_s: seconds without `alive`; it may fire a twentieth early. 0: never.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._due_s = 0.0

    def alive(self) -> None:
        """The loop turns."""
        now = time.monotonic()
        if self._timeout_s and now >= self._due_s:
            self._due_s = now + self._timeout_s / _REARMS
            faulthandler.dump_traceback_later(self._timeout_s, exit=True)

    def close(self) -> None:
        """Stop watching."""
        if self._timeout_s:
            faulthandler.cancel_dump_traceback_later()
