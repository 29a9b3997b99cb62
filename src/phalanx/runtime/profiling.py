"""Steps of a running engine under torch.profiler, for /start_profile and /stop_profile."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from phalanx.core.errors import RequestError

logger = logging.getLogger(__name__)

# A step is some hundred events of about a kilobyte; who forgets to stop must not fill the memory.
MAX_STEPS = 2000
_DIR_VARIABLE = "SGLANG_TORCH_PROFILER_DIR"
_ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}


class StepProfiler:
    """One profile at a time: started, then counting steps, then written as a chrome trace.

    Call it with no step in flight, but for `is_due`: what a step does must be seen whole.

    Args:
        device: "cpu", "cuda" or "null".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._profile: profile | None = None
        self._path = Path()
        self._is_recording = False
        self._begins_at = 0
        self._ends_at = 0
        self._ended_by_itself = False
        self._has_traced_gpu = False

    def is_due(self, num_steps: int) -> bool:
        """Whether a profile begins or ends after so many steps of the engine: call `proceed`."""
        if self._profile is None:
            return False
        return num_steps >= (self._ends_at if self._is_recording else self._begins_at)

    def start(self, args: dict[str, Any], num_steps: int) -> None:
        """Begin to record, or to wait for `start_step`.

        Args:
            args: of SGLang's /start_profile: output_dir, num_steps, start_step, activities, with_stack,
                record_shapes, profile_prefix; None where one is not given.
            num_steps: steps that the engine has run so far.

        Raises:
            RequestError: a profile is running, or an argument cannot be honoured.
        """
        if self._profile is not None:
            raise RequestError("a profile is being taken already: stop it first", code="busy")
        steps = args.get("num_steps")
        if steps is not None and not 1 <= steps <= MAX_STEPS:
            raise _bad("num_steps", f"must be in [1, {MAX_STEPS}], got {steps}")
        names = args.get("activities") or list(_ACTIVITIES)
        for name in names:
            if name not in _ACTIVITIES:
                raise _bad("activities", f"{name!r} is not supported, only {' and '.join(_ACTIVITIES)}")
        if self._device != "cuda":
            names = [name for name in names if name != "GPU"]  # there is none that could do anything
            if not names:
                raise _bad("activities", f"GPU alone leaves nothing to record on device {self._device}")
        self._path = _new_path(args.get("output_dir"), args.get("profile_prefix"))
        self._profile = profile(
            activities=[_ACTIVITIES[name] for name in names],
            with_stack=bool(args.get("with_stack")),
            record_shapes=bool(args.get("record_shapes")),
            acc_events=True,
            # A CPU engine runs steps on a thread of its own, which a profiler does not see unless asked to.
            experimental_config=_ExperimentalConfig(profile_all_threads=self._device != "cuda"),
        )
        self._ended_by_itself = False
        self._begins_at = max(args.get("start_step") or 0, num_steps)
        self._ends_at = self._begins_at + (MAX_STEPS if steps is None else steps)
        self._has_traced_gpu |= "GPU" in names
        self._is_recording = False
        logger.info("profiling %s, steps %d to %d", " and ".join(names), self._begins_at, self._ends_at)
        if self.is_due(num_steps):
            self.proceed()

    def proceed(self) -> None:
        """Begin to record, or end with the last step; the next `stop` is no error then.

        Raises:
            RequestError: the trace cannot be written.
        """
        if self._profile is None:
            return
        if self._is_recording:
            self.stop()
            self._ended_by_itself = True
        else:
            self._is_recording = True
            self._profile.start()

    def stop(self) -> None:
        """End the profile and write its trace; takes seconds for a long one.

        Raises:
            RequestError: no profile is running, it has not begun, or the trace cannot be written.
        """
        running, self._profile = self._profile, None
        if running is None:
            if not self._ended_by_itself:
                raise RequestError("no profile is being taken", code="not_running")
            self._ended_by_itself = False
            return
        if not self._is_recording:
            raise RequestError(f"step {self._begins_at} was not reached: nothing was recorded")
        running.stop()
        try:
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            logger.error("the trace was not written: %s", error)
            raise RequestError("the trace could not be written", status=500) from None
        logger.info("trace written: %s", self._path)

    def close(self) -> None:
        """End what is running, unwritten. Ends the process, with exit code 0, if a GPU was ever traced.

        Such a process may abort at its end otherwise: CUDA's exit handler has CUPTI hand its last buffers to
        the profiler, whose own state has been destroyed by then.
        """
        if self._profile is not None and self._is_recording:
            self._profile.stop()
        self._profile = None
        if self._has_traced_gpu:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _new_path(output_dir: str | None, prefix: str | None) -> Path:
    """A file that does not exist yet, in a folder that can be written to."""
    folder = Path(output_dir or os.environ.get(_DIR_VARIABLE) or tempfile.gettempdir())
    if prefix and (os.sep in prefix or "\0" in prefix or prefix.startswith(".")):
        raise _bad("profile_prefix", "must be the beginning of a file's name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{prefix}-" if prefix else ""
        path = folder / f"{name}{time.time():.6f}-{os.getpid()}-TP-0.trace.json.gz"
        path.touch(exist_ok=False)
        path.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a folder's name"
        raise _bad("output_dir", f"cannot be written to: {reason}") from None
    return path


def _bad(name: str, what: str) -> RequestError:
    return RequestError(f"{name} {what}", param=name, code="invalid_value")
