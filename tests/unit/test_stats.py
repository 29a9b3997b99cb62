"""The scheduler's own figures: totals, step and queue times, the current rate; the progress line."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from phalanx.config.groups import SchedulerConfig
from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepPlan, StepResult
from phalanx.runtime import progress
from phalanx.scheduler import Scheduler, stats
from phalanx.scheduler.stats import Rate

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 100 * SECOND

    def perf_counter_ns(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stats.time, "perf_counter_ns", made.perf_counter_ns)
    return made


def make_scheduler(rows: int = 4) -> Scheduler:
    config = SchedulerConfig(max_running_requests=rows, context_length=64)
    return Scheduler(config, num_pages=65, page_size=1)


def request(stream_id: int, prompt_len: int = 3, max_new_tokens: int = 4) -> EngineRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, sampling_seed=1)
    return EngineRequest(stream_id, np.arange(prompt_len, dtype=np.int32), sampling)


def result_of(plan: StepPlan) -> StepResult:
    count = len(plan.sample_rows)
    return StepResult(plan.step_id, np.full(count, 7, np.int32), np.zeros(count, np.uint8))


def test_a_step_lasts_from_its_plan_or_the_end_of_the_one_before(clock: Clock) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1))
    first = scheduler.plan()
    clock.ns += SECOND // 100
    second = scheduler.plan()  # run-ahead: planned while the first one runs
    clock.ns += SECOND // 100
    scheduler.apply(first, result_of(first))  # lasted 20 ms
    clock.ns += SECOND * 3 // 100
    scheduler.apply(second, result_of(second))  # 30 ms, since it began when the first one ended
    clock.ns += SECOND
    third = scheduler.plan()
    clock.ns += SECOND * 5 // 100
    scheduler.fail(third, "broken")  # 50 ms; the second before it was nobody's step
    got = scheduler.stats()["step_time"]
    assert got["count"] == 3 and got["sum_s"] == pytest.approx(0.1)
    bounds = got["bounds_s"]
    longest = max(i for i, count in enumerate(got["buckets"]) if count)
    assert bounds[longest - 1] < 0.05 <= bounds[longest]


def test_queue_time_is_from_arrival_to_a_row(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(rows=1)
    scheduler.add(request(1, max_new_tokens=1))
    clock.ns += SECOND // 2
    scheduler.add(request(2, max_new_tokens=1))
    plan = scheduler.plan()
    assert scheduler.stats()["queue_time"]["count"] == 1
    assert scheduler.stats()["queue_time"]["sum_s"] == pytest.approx(0.5)
    clock.ns += SECOND * 2
    scheduler.apply(plan, result_of(plan))
    scheduler.plan()
    got = scheduler.stats()["queue_time"]
    assert got["count"] == 2 and got["sum_s"] == pytest.approx(2.5)
    json.dumps(got)


def test_totals(clock: Clock) -> None:
    scheduler = make_scheduler()
    for stream_id in range(3):
        scheduler.add(request(stream_id, prompt_len=5, max_new_tokens=2))
    for _ in range(2):
        plan = scheduler.plan()
        assert scheduler.stats()["last_step_rows"] == 3
        scheduler.apply(plan, result_of(plan))
    got = scheduler.stats()
    assert got["prompt_tokens_total"] == 15 and got["generated_tokens_total"] == 6
    assert got["step_rows_total"] == 6 and got["requests_total"] == 3
    assert got["finished_length_total"] == 3 and got["finished_error_total"] == 0


def test_the_rate_is_of_the_last_second_of_work() -> None:
    rate, now = Rate(), 50 * SECOND
    rate.resume(now, 0)
    assert rate.per_s(now) == 0.0
    for i in range(1, 25):
        rate.update(now + i * SECOND // 10, 40 * i)
    now += 24 * SECOND // 10
    assert rate.per_s(now) == 400.0
    assert rate.per_s(now + SECOND) == 400.0
    assert rate.per_s(now + 2 * SECOND) == 0.0
    now += 60 * SECOND  # a pause is in no rate
    rate.resume(now, 960)
    for i in range(1, 11):
        rate.update(now + i * SECOND // 10, 960 + 10 * i)
    assert rate.per_s(now + SECOND) == 100.0


def test_a_step_longer_than_a_second_has_a_rate() -> None:
    rate, now = Rate(), 50 * SECOND
    rate.resume(now, 0)
    rate.update(now + 4 * SECOND, 100)
    rate.resume(now + 4 * SECOND, 100)
    assert rate.per_s(now + 4 * SECOND) == 25.0


def test_the_progress_line_tells_of_the_time_since_the_one_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    log = progress.ProgressLog()
    assert not log.due
    caplog.set_level(logging.INFO, logger=progress.__name__)
    for tokens, steps, step_s in ((1000, 10, 0.5), (1500, 20, 0.6)):
        now[0] += 10.0
        assert log.due
        step_time = {"count": steps, "sum_s": step_s}
        gauges = {"running": 3, "queued": 2, "pages_held": 5, "pages_total": 9}
        log.log({**gauges, "generated_tokens_total": tokens, "step_time": step_time})
    assert [record.getMessage() for record in caplog.records] == [
        "running 3, queued 2, 100 tok/s, 50.0 ms a step, KV pages 5 of 9",
        "running 3, queued 2, 50 tok/s, 10.0 ms a step, KV pages 5 of 9",
    ]


def test_finish_reasons_have_names_in_stats() -> None:
    names = {name for name in make_scheduler().stats() if name.startswith("finished_")}
    assert names == {f"finished_{r.name.lower()}_total" for r in Finish if r != Finish.NONE}
