"""What is run before the first request of a user."""

from __future__ import annotations

import logging

import msgspec
import pytest

from phalanx.core.step import StepPlan
from phalanx.engine.null import NullEngine
from phalanx.runtime.trial import run_trial
from tests.unit.test_engine import settings


class Recorder:
    """Notes every plan; fails from a step on."""

    def __init__(self, chosen: object, fail_from: int = 1 << 30) -> None:
        self._engine, self._fail_from = NullEngine(chosen), fail_from
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> object:
        self.plans.append(plan)
        if len(self.plans) > self._fail_from:
            from phalanx.engine.sampled import FailedHandle

            return FailedHandle(plan.step_id, ValueError("no such kernel"))
        return self._engine.launch(plan)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_way_of_sampling_is_tried(page_size: int) -> None:
    engine = Recorder(settings(page_size))
    run_trial(engine, settings(page_size), num_pages=60)
    assert any(len(plan.decode_rows) for plan in engine.plans)
    assert all(plan.needs_eager.all() for plan in engine.plans)
    entering = [plan.entering for plan in engine.plans if plan.entering.count]
    top_k, top_p, min_p, repetition = (
        {value for each in entering for value in getattr(each, name).tolist()}
        for name in ("top_k", "top_p", "min_p", "repetition_penalty")
    )
    assert 20 in top_k and len(top_k) == 2 and min(top_p) < 1 and max(min_p) > 0 and max(repetition) > 1
    logprobs = [plan.logprobs for plan in engine.plans if plan.logprobs is not None]
    assert any(len(each.prompt_targets) for each in logprobs) and any(len(each.top_k) for each in logprobs)


def test_limits_of_a_server_do_not_stop_it() -> None:
    chosen = settings(1)
    scheduler = msgspec.structs.replace(
        chosen.scheduler, max_queued_requests=1, max_running_requests=1, chunked_prefill_size=1
    )
    engine = Recorder(chosen)
    run_trial(engine, msgspec.structs.replace(chosen, scheduler=scheduler), num_pages=5)
    assert sum(plan.entering.count for plan in engine.plans) == 3
    assert {len(plan.sample_rows) for plan in engine.plans} == {0, 1}


@pytest.mark.parametrize(("num_pages", "context"), [(1, 96), (2, 3)])
def test_nothing_is_tried_where_nothing_fits(num_pages: int, context: int) -> None:
    chosen = settings(4)
    scheduler = msgspec.structs.replace(chosen.scheduler, context_length=context)
    engine = Recorder(chosen)
    run_trial(engine, msgspec.structs.replace(chosen, scheduler=scheduler), num_pages=num_pages)
    assert engine.plans == []


def test_a_trial_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_trial(Recorder(settings(4), fail_from=1), settings(4), num_pages=60)
    assert any("was tried before the start failed" in record.message for record in caplog.records)
