"""The loop that joins scheduler and engine: serial, and run-ahead beside it.

The serial loop is the specification: plan, launch, read, apply. The run-ahead loop launches step i+1 before
step i is read, so that planning and applying cost no engine time; tests require the same tokens from both.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from phalanx.core.errors import EngineError
from phalanx.core.request import EngineRequest
from phalanx.core.step import StepOutputs, StepPlan, StepResult
from phalanx.engine.launch_times import LaunchTimes
from phalanx.runtime.step_times import StepTimer, summary_ms
from phalanx.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Handle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step. Raises EngineError if it failed."""
        ...


class StepEngine(Protocol):
    """What the loop needs of an engine (`engine.Engine`, `engine.null.NullEngine`)."""

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step; steps run in the order launched."""
        ...


class Worker:
    """Owns one scheduler and one engine.

    Args:
        overlap: run ahead by one step.
        kv_indices_backend: who builds FlashInfer's page lists, for `stats`; None where nobody does.
        launch_times: what the engine says of its last launch; None if it says nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: StepEngine,
        *,
        overlap: bool,
        kv_indices_backend: str | None = None,
        launch_times: Callable[[], LaunchTimes] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._run_ahead = 1 if overlap else 0
        self._kv_indices_backend = kv_indices_backend
        self._launch_times = launch_times
        self._timer = StepTimer(run_ahead=overlap)
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()
        self.num_steps = 0

    @property
    def busy(self) -> bool:
        """Whether a call of `step` would do something."""
        return bool(self._in_flight) or self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it can never run."""
        self.scheduler.add(request)

    def abort(self, stream_ids: Iterable[int]) -> None:
        """End these streams; no token of theirs is emitted any more. Unknown ids are ignored."""
        self.scheduler.abort(stream_ids)

    def step(self) -> list[StepOutputs]:
        """Launch the next step if there is one, read what is due, and return what came of it.

        Call `sent` when the outputs are dealt with.
        """
        timer = self._timer
        timer.begin()
        plan = self.scheduler.plan()
        if plan is not None:
            timer.planned()
            handle = self._engine.launch(plan)
            timer.launched(len(plan.decode_rows), self._launch_times() if self._launch_times else None)
            self._in_flight.append((plan, handle))
            self.num_steps += 1
        outputs = []
        allowed = self._run_ahead if plan is not None else 0
        while len(self._in_flight) > allowed:
            outputs.append(self._read_oldest())
        timer.end(has_outputs=bool(outputs))
        return outputs

    def sent(self) -> None:
        """The outputs of the last `step` are on their way: ends the time that `stats` calls "send"."""
        self._timer.sent()

    def drain(self) -> list[StepOutputs]:
        """Read the steps in flight and launch none."""
        self._timer.pause()
        return [self._read_oldest() for _ in range(len(self._in_flight))]

    def pending_outputs(self) -> StepOutputs | None:
        """Ends of streams that were aborted since the last call, or None."""
        return self.scheduler.pending_outputs()

    def _read_oldest(self) -> StepOutputs:
        plan, handle = self._in_flight[0]
        try:
            result = handle.result()  # an interrupt here leaves the step in flight: a later call reads it
            self._timer.read()
        except EngineError as error:
            self._in_flight.popleft()
            logger.exception("step %d failed; its requests end with an error", plan.step_id)
            return self.scheduler.fail(plan, str(error))
        self._in_flight.popleft()
        outputs = self.scheduler.apply(plan, result)
        self._timer.applied()
        return outputs

    def host_times(self) -> dict[str, Any]:
        """Histograms of the host's time since the start: `step_times.StepTimes.snapshot`."""
        return self._timer.times.snapshot()

    def stats(self) -> dict[str, Any]:
        """Counters of scheduler and loop, and the host's time by phase, for `/server_info` and `/metrics`."""
        host_time = self.host_times()
        return {
            **self.scheduler.stats(),
            "num_steps": self.num_steps,
            "kv_indices_backend": self._kv_indices_backend,
            "host_time_between_steps_ms": summary_ms(host_time, "between_steps"),
            "host_time": host_time,
        }
