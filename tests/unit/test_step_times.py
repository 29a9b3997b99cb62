"""Histograms of the host's time: exact counts and sums, quantiles right to a bucket, phases by a clock."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.histogram import BOUNDS_S, Histogram, mean_s, quantile_s
from phalanx.engine.launch_times import LaunchClock, LaunchTimes
from phalanx.runtime import step_times
from phalanx.runtime.step_times import PHASES, StepTimer, StepTimes, difference, summary_ms

MS = 1_000_000


def test_bounds_are_ten_a_decade_from_a_microsecond_to_ten_seconds() -> None:
    assert len(BOUNDS_S) == 71
    assert BOUNDS_S[0] == 1e-6 and BOUNDS_S[10] == 1e-5 and BOUNDS_S[-1] == 10.0
    assert np.allclose(BOUNDS_S[1:] / BOUNDS_S[:-1], 10**0.1, rtol=1e-3)


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram()
    for value in (0, 999, 1000, 1001, 10_000_000_000, 10_000_000_001):
        histogram.add(value)
    buckets = histogram.snapshot()["buckets"]
    assert buckets[0] == 3 and buckets[1] == 1 and buckets[70] == 1 and buckets[71] == 1
    assert sum(buckets) == 6


@pytest.mark.fuzz
@given(st.lists(st.integers(0, 20_000_000_000), max_size=600), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_counts_and_sums_are_exact_and_quantiles_right_to_a_bucket(values: list[int], q: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    got = histogram.snapshot()
    assert got["count"] == len(values) and got["sum_s"] == sum(values) / 1e9
    quantile = quantile_s(BOUNDS_S.tolist(), got, q)
    if not values:
        assert quantile is None and mean_s(got) is None
        return
    assert mean_s(got) == got["sum_s"] / len(values)
    exact = sorted(values)[max(0, int(np.ceil(q * len(values))) - 1)] / 1e9
    assert quantile is not None
    if 1e-6 < exact <= 10.0:
        assert 1 / 1.27 <= quantile / exact <= 1.27
    else:  # below the first bound or above the last
        assert quantile <= 1e-6 if exact <= 1e-6 else quantile == 10.0


def test_a_difference_is_what_was_added_in_between() -> None:
    times = StepTimes()
    times.plan.add(5 * MS)
    before = times.snapshot()
    times.plan.add(7 * MS)
    times.wait.add(2 * MS)
    got = difference(times.snapshot(), before)
    assert got["plan"]["count"] == 1 and got["plan"]["sum_s"] == pytest.approx(0.007)
    assert sum(got["plan"]["buckets"]) == 1 and got["wait"]["count"] == 1 and got["apply"]["count"] == 0
    assert set(got) == {"bounds_s", *PHASES} and got["bounds_s"] == BOUNDS_S.tolist()
    json.dumps(got)


def test_a_summary_is_in_ms_and_none_where_nothing_was_recorded() -> None:
    times = StepTimes()
    assert summary_ms(times.snapshot(), "between_steps") == {"mean": None, "p99": None}
    for _ in range(98):
        times.between_steps.add(1 * MS)
    for _ in range(2):
        times.between_steps.add(50 * MS)
    got = summary_ms(times.snapshot(), "between_steps")
    assert got["mean"] == pytest.approx(1.98)
    assert got["p99"] == pytest.approx(50, rel=0.26)


class Clock:
    """Time that moves only when told, in ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1_000 * MS
        monkeypatch.setattr(step_times.time, "perf_counter_ns", lambda: self.ns)

    def tick(self, ms: float) -> None:
        self.ns += int(ms * MS)


def turn(
    clock: Clock, timer: StepTimer, *, num_decode: int, wait: float, inside: LaunchTimes | None = None
) -> None:
    """Plan 1 ms, launch 4, wait as said, apply 2, send 3, and 5 of something else."""
    timer.begin()
    clock.tick(1)
    timer.planned()
    clock.tick(4)
    timer.launched(num_decode, inside)
    clock.tick(wait)
    timer.read()
    clock.tick(2)
    timer.applied()
    timer.end(has_outputs=True)
    clock.tick(3)
    timer.sent()
    clock.tick(5)


def seconds(timer: StepTimer) -> dict[str, tuple[int, float]]:
    got = timer.times.snapshot()
    return {phase: (got[phase]["count"], round(got[phase]["sum_s"] * 1e3, 6)) for phase in PHASES}


def test_the_phases_of_the_run_ahead_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timer = Clock(monkeypatch), StepTimer(run_ahead=True)
    for _ in range(3):
        turn(clock, timer, num_decode=7, wait=100)
    assert seconds(timer) == {
        "plan": (3, 3),
        "launch": (3, 12),
        "kv_indices": (0, 0),
        "wait": (3, 300),
        "apply": (3, 6),
        "send": (3, 9),
        "between_steps": (2, 30),  # 115 ms a turn, of which 100 are waits
        "idle": (0, 0),
    }


def test_the_device_is_idle_where_its_result_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is a counter: it never falls, whatever share of the turns waits."""
    clock, timer = Clock(monkeypatch), StepTimer(run_ahead=True)
    told = []
    for wait in (100, 0, 0.05, 0.06, 100, 0, 100, 100):
        turn(clock, timer, num_decode=7, wait=wait)
        told.append(seconds(timer)["idle"])
    assert told == [(n, 15 * n) for n in (0, 0, 1, 2, 2, 2, 3, 3)]
    clock, timer = Clock(monkeypatch), StepTimer(run_ahead=False)
    for _ in range(3):
        turn(clock, timer, num_decode=7, wait=100)
    assert seconds(timer)["idle"] == seconds(timer)["between_steps"] == (2, 30)


def test_the_serial_loop_counts_from_a_result_to_the_next_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timer = Clock(monkeypatch), StepTimer(run_ahead=False)
    for _ in range(2):
        turn(clock, timer, num_decode=7, wait=100)
    assert seconds(timer)["between_steps"] == (1, 15)  # apply, send, the rest, plan and launch
    # The engine says when the inputs were queued: what it did afterwards is the device's time too.
    inside = LaunchTimes(wait_ns=1 * MS, indices_ns=2 * MS, prepared_at_ns=clock.ns + 3 * MS)
    turn(clock, timer, num_decode=7, wait=100, inside=inside)
    got = seconds(timer)
    assert got["between_steps"] == (2, 15 + 13)
    assert got["kv_indices"] == (1, 2) and got["launch"] == (3, 11) and got["wait"] == (3, 301)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_only_steps_that_decode_one_after_the_other_count(
    monkeypatch: pytest.MonkeyPatch, run_ahead: bool
) -> None:
    clock, timer = Clock(monkeypatch), StepTimer(run_ahead=run_ahead)
    for num_decode in (0, 3, 0, 3, 3):
        turn(clock, timer, num_decode=num_decode, wait=1)
    assert seconds(timer)["between_steps"][0] == 1


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_pause_is_between_no_steps(monkeypatch: pytest.MonkeyPatch, run_ahead: bool) -> None:
    clock, timer = Clock(monkeypatch), StepTimer(run_ahead=run_ahead)
    turn(clock, timer, num_decode=7, wait=100)
    timer.pause()
    clock.tick(60_000)
    turn(clock, timer, num_decode=7, wait=100)
    turn(clock, timer, num_decode=7, wait=100)
    assert seconds(timer)["between_steps"] == (1, 15)


def test_a_turn_without_a_step_or_outputs_records_its_wait_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timer = Clock(monkeypatch), StepTimer(run_ahead=True)
    timer.begin()
    timer.end(has_outputs=False)
    clock.tick(9)
    timer.sent()
    assert {phase: n for phase, (n, _) in seconds(timer).items() if n} == {"wait": 1}


def test_the_launch_clock_starts_anew_after_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LaunchClock()
    clock.built_indices(5, 7)
    clock.prepared()
    first = clock.take()
    assert (first.wait_ns, first.indices_ns) == (5, 7) and first.prepared_at_ns > 0
    second = clock.take()
    assert (second.wait_ns, second.indices_ns) == (0, None)
    assert second.prepared_at_ns >= first.prepared_at_ns
