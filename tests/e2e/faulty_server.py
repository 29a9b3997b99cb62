"""`phalanx serve` with an engine that fails: python -m tests.e2e.faulty_server KIND TRIGGER FLAGS...

The first step that is launched when the file TRIGGER is there fails, and no other.

KIND "engine-error": the step's result cannot be had, as after a failed kernel on a CPU. "crash": the engine's
loop raises what nobody expects. "hang": the step never ends, and from then on the engine's watchdog waits for
a thirtieth of what the flag says, so that nothing else is ended when the machine stands still. "lock": the
step never ends and holds the interpreter's lock, and the launcher waits 50 s less for the engine. "hasty": no
step fails, but the launcher gives a worker that stands still a twentieth of --watchdog-timeout.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable

from phalanx.config.cli import build_parser
from phalanx.core.errors import EngineError
from phalanx.core.step import StepPlan
from phalanx.engine import null
from phalanx.runtime import engine_process, launch
from phalanx.runtime.models import settle_settings
from phalanx.runtime.run_dir import run_directory
from phalanx.runtime.watchdog import Watchdog

_KIND, _TRIGGER = "PHALANX_TEST_FAULT", "PHALANX_TEST_FAULT_TRIGGER"


class LaterHastyWatchdog(Watchdog):
    """The engine's; `ours` is the one that was made."""

    ours: LaterHastyWatchdog

    def __init__(self, timeout_s: float, on_look: Callable[[], None]) -> None:
        super().__init__(timeout_s, on_look)
        LaterHastyWatchdog.ours = self

    def hurry(self) -> None:
        """Count from now, and not for long."""
        self._timeout_s /= 30
        self.alive()


class FailingHandle:
    """A step that goes wrong when it is read."""

    def result(self) -> None:
        if os.environ[_KIND] == "hang":
            LaterHastyWatchdog.ours.hurry()
            time.sleep(1000)
        while os.environ[_KIND] == "lock":  # a signal ends the sleep
            ctypes.PyDLL(None).sleep(1000)
        raise EngineError("the test broke this step")


def break_engine() -> None:
    """Make one step of the null engine fail."""
    launch_step, trigger, has_failed = null.NullEngine.launch, os.environ[_TRIGGER], False

    def launch_or_fail(self: null.NullEngine, plan: StepPlan) -> object:
        nonlocal has_failed
        handle = launch_step(self, plan)
        if has_failed or not os.path.exists(trigger):
            return handle
        has_failed = True
        if os.environ[_KIND] == "crash":
            raise ZeroDivisionError("nobody expects this")
        return FailingHandle()

    null.NullEngine.launch = launch_or_fail  # type: ignore[method-assign, assignment]
    engine_process.Watchdog = LaterHastyWatchdog  # type: ignore[misc]


def main() -> int:
    if "--ipc-dir" in sys.argv:  # started by the launcher below
        break_engine()
        return engine_process.main()
    os.environ[_KIND], os.environ[_TRIGGER], *flags = sys.argv[1:]
    args = build_parser().parse_args(flags)
    launch.setup_logging(args.log_level, "launch")
    if os.environ[_KIND] == "hasty":
        launch._LATER, launch._LATER_S = 0.05, 0.0
    if os.environ[_KIND] == "lock":
        launch._ENGINE_LATER_S = -50.0
    listener = launch.bind(args.host, args.port)
    with run_directory() as run_dir:
        return launch.Launcher(settle_settings(args), listener, run_dir, "tests.e2e.faulty_server").run()


if __name__ == "__main__":
    sys.exit(main())
