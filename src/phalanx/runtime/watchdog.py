"""Ends a process whose loop has stopped turning."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable

from phalanx.runtime.heartbeat import Pulse

_LOOKS, _LONGEST_WAIT_S = 20, 0.5  # looks per timeout, and the time between two of them at most


class Watchdog:
    """Unless `alive` is called in time, every thread's stack goes to stderr and the process exits with 1.

    A thread looks whether the loop turns. A process that was stopped as a whole (SIGSTOP, a frozen container)
    is not ended when it goes on: between two looks the thread counts no more than twice the time that it
    meant to wait. While the interpreter's lock is held it cannot look; `on_look` then tells others so.

    Args:
        timeout_s: seconds without `alive`; 0: never.
        on_look: called at the first `alive`, when the watch begins, and at each look, in the thread.
    """

    def __init__(self, timeout_s: float, on_look: Callable[[], None] = lambda: None) -> None:
        self._timeout_s = timeout_s
        self._on_look = on_look
        self._num_turns = 0
        self._wait_s = min(timeout_s / _LOOKS, _LONGEST_WAIT_S)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def alive(self) -> None:
        """The loop turns."""
        self._num_turns += 1
        if self._thread is None and self._timeout_s:
            self._on_look()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        pulse = Pulse(2 * self._wait_s)
        while not self._closed.wait(self._wait_s):
            self._on_look()
            if pulse.look(self._num_turns) >= self._timeout_s:
                self._end()

    def _end(self) -> None:
        print(f"the loop has not turned for {self._timeout_s:g} s; all threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr.fileno(), all_threads=True)
        os._exit(1)
