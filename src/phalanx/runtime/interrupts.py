"""Ctrl-C between steps, never within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_AT_ONCE = 3  # presses after which nobody is made to wait for a step that may never end


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back while the block runs: raised in the middle of a change it would leave half of it.

    Yields a function that raises KeyboardInterrupt if Ctrl-C was pressed: call it where nothing is half done.
    Where it is not called any more, the block's end raises. The third press raises at once, wherever it is.

    Python's own handler alone is replaced, in the main thread alone: a program that handles SIGINT itself
    goes on to, and in other threads Ctrl-C is never raised.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    num_presses, is_raised = 0, False

    def hold(signum: int, frame: FrameType | None) -> None:
        nonlocal num_presses
        num_presses += 1
        if num_presses >= _AT_ONCE:
            signal.default_int_handler(signum, frame)

    def check() -> None:
        nonlocal is_raised
        if num_presses and not is_raised:
            is_raised = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        check()
