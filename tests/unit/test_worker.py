"""The worker loop against the null engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phalanx.config.groups import SchedulerConfig
from phalanx.core.errors import EngineError
from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepPlan, StepResult
from phalanx.runtime.worker import Worker
from phalanx.scheduler.scheduler import Scheduler


class Handle:
    def __init__(self, plan: StepPlan, errors: list[BaseException]) -> None:
        self.plan, self.errors = plan, errors

    def result(self) -> StepResult:
        if self.errors:
            raise self.errors.pop()
        n = len(self.plan.sample_rows)
        return StepResult(self.plan.step_id, np.full(n, 7, np.int32), np.zeros(n, np.uint8))


class Engine:
    """Tokens of 7; `errors` are raised by the next results."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def launch(self, plan: StepPlan) -> Handle:
        return Handle(plan, self.errors)


def make(overlap: bool) -> tuple[Worker, Engine]:
    config = SchedulerConfig(max_running_requests=4, context_length=64)
    engine = Engine()
    return Worker(Scheduler(config, num_pages=17, page_size=16), engine, overlap=overlap), engine


def submit(worker: Worker, stream_id: int, max_new_tokens: int = 5) -> None:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, sampling_seed=0)
    worker.add(
        EngineRequest(stream_id=stream_id, input_ids=np.arange(1, 4, dtype=np.int32), sampling=sampling)
    )


def drain(worker: Worker) -> dict[int, list[Any]]:
    """Tokens and, last, the finish of each stream."""
    seen: dict[int, list[Any]] = {}
    for _ in range(100):
        if not worker.busy:
            return seen
        for outputs in worker.step():
            for stream, token, finish in zip(
                outputs.stream_ids.tolist(), outputs.tokens.tolist(), outputs.finish.tolist(), strict=True
            ):
                seen.setdefault(stream, []).extend([token] if token >= 0 else [])
                if finish:
                    seen[stream].append(Finish(finish))
    raise AssertionError("the loop does not end")


@pytest.mark.parametrize("overlap", [False, True])
def test_every_stream_gets_its_tokens_and_one_end(overlap: bool) -> None:
    worker, _ = make(overlap)
    for stream in range(9):
        submit(worker, stream, max_new_tokens=1 + stream % 3)
    assert drain(worker) == {s: [7] * (1 + s % 3) + [Finish.LENGTH] for s in range(9)}
    worker.scheduler.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_wait_loses_no_step(overlap: bool) -> None:
    worker, engine = make(overlap)
    submit(worker, 1)
    worker.step()
    engine.errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        for _ in range(3):
            worker.step()
    worker.abort([1])
    drain(worker)
    submit(worker, 2)
    assert drain(worker) == {2: [7] * 5 + [Finish.LENGTH]}
    worker.scheduler.check()
    assert worker.stats()["pages_held"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_ends_its_streams_and_the_loop_goes_on(overlap: bool) -> None:
    worker, engine = make(overlap)
    submit(worker, 1)
    engine.errors.append(EngineError("out of luck"))
    assert drain(worker)[1][-1] == Finish.ERROR
    submit(worker, 2)
    assert drain(worker) == {2: [7] * 5 + [Finish.LENGTH]}
    assert worker.stats()["pages_held"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_stats_tell_the_host_time_of_every_step(overlap: bool) -> None:
    worker, _ = make(overlap)
    submit(worker, 1, max_new_tokens=6)
    while worker.busy:
        worker.step()
        worker.sent()
    stats = worker.stats()
    host_time = stats["host_time"]
    counts = {phase: host_time[phase]["count"] for phase in host_time if phase != "bounds_s"}
    num_idle = counts.pop("idle")
    assert num_idle <= 4 if overlap else num_idle == 4
    assert counts == {
        "plan": 6,
        "launch": 6,
        "kv_indices": 0,
        "wait": 7 if overlap else 6,
        "apply": 6,
        "send": 6,
        "between_steps": 4,  # between the five steps that decode
    }
    assert stats["kv_indices_backend"] is None
    assert stats["host_time_between_steps_ms"]["mean"] > 0
    assert stats["num_steps"] == 6
