"""The loop that joins scheduler and engine: serial, and run-ahead beside it.

The serial loop is the specification: plan, launch, read, apply. The run-ahead loop launches step i+1 before
step i is read, so that planning and applying cost no engine time; tests require the same tokens from both.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from phalanx.core.errors import EngineError
from phalanx.core.request import EngineRequest
from phalanx.core.step import StepOutputs, StepPlan, StepResult
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
    """

    def __init__(self, scheduler: Scheduler, engine: StepEngine, *, overlap: bool) -> None:
        self.scheduler = scheduler
        self._engine = engine
        self._run_ahead = 1 if overlap else 0
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
        """Launch the next step if there is one, read what is due, and return what came of it."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append((plan, self._engine.launch(plan)))
            self.num_steps += 1
        outputs = []
        allowed = self._run_ahead if plan is not None else 0
        while len(self._in_flight) > allowed:
            outputs.append(self._read_oldest())
        return outputs

    def pending_outputs(self) -> StepOutputs | None:
        """Ends of streams that were aborted since the last call, or None."""
        return self.scheduler.pending_outputs()

    def _read_oldest(self) -> StepOutputs:
        plan, handle = self._in_flight[0]
        try:
            result = handle.result()  # an interrupt here leaves the step in flight: a later call reads it
        except EngineError as error:
            self._in_flight.popleft()
            logger.exception("step %d failed; its requests end with an error", plan.step_id)
            return self.scheduler.fail(plan, str(error))
        self._in_flight.popleft()
        return self.scheduler.apply(plan, result)

    def stats(self) -> dict[str, int]:
        """Counters of scheduler and loop, for `/server_info` and `/metrics`."""
        return {**self.scheduler.stats(), "num_steps": self.num_steps}
