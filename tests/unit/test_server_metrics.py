"""What API workers count: latencies by step, files that outlive workers, and Prometheus' text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import parser

from phalanx.core.errors import ConfigError
from phalanx.core.step import StepOutputs
from phalanx.server import latencies as latencies_module
from phalanx.server.housekeeping import LAG_BOUNDS_S, Histogram
from phalanx.server.latencies import Latencies
from phalanx.server.metrics import _pairs
from phalanx.server.prometheus import MetricsText
from phalanx.server.worker_metrics import CAUSES, ENDS, LATENCIES, WorkerMetrics, metrics_path, read

TTFT, ITL, E2E = range(3)


def step(tokens: dict[int, int]) -> StepOutputs:
    """stream id -> token, -1 for none."""
    ids = np.array(list(tokens), np.int64)
    values = np.array(list(tokens.values()), np.int32)
    return StepOutputs(1, ids, values, np.zeros(len(ids), np.uint8))


class Rig:
    """Latencies under a clock that tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(latencies_module.time, "monotonic", lambda: self.now_s)
        self.metrics = WorkerMetrics()
        self.latencies = Latencies(self.metrics)

    def count_and_sum(self, which: int) -> tuple[float, float]:
        self.latencies.flush()
        data = self.metrics.snapshot()
        return data["latency_buckets"][0, which].sum(), data["latency_sums"][0, which]

    def note(self, after_s: float, *steps: dict[int, int]) -> None:
        self.now_s += after_s
        self.latencies.note([step(one) for one in steps])


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_first_tokens_later_ones_and_the_whole(rig: Rig) -> None:
    rig.latencies.began([1, 2], rig.now_s - 0.25)
    rig.note(0.25, {1: 7})  # 0.5 s after the request came
    rig.note(0.1, {1: 7, 2: 7})  # 2: 0.6 s
    rig.note(0.2, {1: 7, 2: 7})
    rig.latencies.ended(1, 999.75)
    rig.latencies.ended(2, None)
    assert rig.count_and_sum(TTFT) == (2, pytest.approx(1.1))
    assert rig.count_and_sum(ITL) == (3, pytest.approx(0.1 + 2 * 0.2))
    assert rig.count_and_sum(E2E) == (1, pytest.approx(0.8))


def test_an_entry_without_a_token_is_none(rig: Rig) -> None:
    rig.latencies.began([1], rig.now_s)
    rig.note(1.0, {1: -1})  # log-probabilities of a part of the prompt
    assert rig.count_and_sum(TTFT) == (0, 0)
    rig.note(1.0, {1: 7})
    assert rig.count_and_sum(TTFT) == (1, pytest.approx(2.0))


def test_tokens_that_come_together_share_the_wait(rig: Rig) -> None:
    rig.latencies.began([1, 2], rig.now_s)
    rig.note(1.0, {1: 7})
    rig.note(0.3, {1: 7, 2: 7}, {1: 7, 2: 7}, {1: 7})
    # Stream 1: three tokens in 0.3 s. Stream 2: its first, and one more with it, which did not wait.
    assert rig.count_and_sum(ITL) == (4, pytest.approx(0.3))
    assert rig.metrics.snapshot()["latency_buckets"][0, ITL, 0] == 1
    assert rig.count_and_sum(TTFT) == (2, pytest.approx(2.3))


def test_tokens_after_the_end_and_of_strangers_do_not_count(rig: Rig) -> None:
    rig.latencies.began([1], rig.now_s)
    rig.note(0.1, {1: 7})
    rig.latencies.ended(1, None)  # a stop string: the engine's next step still holds it
    rig.note(0.1, {1: 7, 1 + (1 << 14): 7, 5: 7})
    assert rig.count_and_sum(ITL) == (0, 0) and rig.count_and_sum(TTFT) == (1, pytest.approx(0.1))


def test_streams_that_share_a_place_are_told_apart(rig: Rig) -> None:
    """One that lives on while more streams than there are places come and go."""
    places = latencies_module._FIRST_CAPACITY
    rig.latencies.began([0], rig.now_s)
    rig.note(1.0, {0: 7})
    rig.latencies.began(list(range(places, 3 * places)), rig.now_s)
    rig.latencies.flush()
    assert rig.latencies._mask + 1 > places
    rig.note(2.0, {i: 7 for i in (0, places, 2 * places)})
    assert rig.count_and_sum(ITL) == (1, pytest.approx(2.0))
    assert rig.count_and_sum(TTFT) == (3, pytest.approx(1.0 + 2 * 2.0))


def test_streams_that_begin_together_and_share_a_place(rig: Rig) -> None:
    places = latencies_module._FIRST_CAPACITY
    rig.latencies.began([3, 3 + places], rig.now_s)
    rig.note(1.0, {3: 7, 3 + places: 7})
    assert rig.count_and_sum(TTFT) == (2, pytest.approx(2.0))


def test_a_stream_that_ended_before_its_first_step_leaves_its_place(rig: Rig) -> None:
    rig.latencies.began([3], rig.now_s)
    rig.latencies.ended(3, None)
    rig.note(1.0, {3: 7})
    assert rig.count_and_sum(TTFT) == (0, 0) and (rig.latencies._owner == -1).all()


def test_arrays_do_not_grow_without_need(rig: Rig) -> None:
    for first in range(0, 200_000, 4096):
        ids = list(range(first, first + 4096))
        rig.latencies.began(ids, rig.now_s)
        rig.note(0.1, dict.fromkeys(ids, 7))
        for i in ids:
            rig.latencies.ended(i, rig.now_s)
    assert rig.latencies._mask + 1 == latencies_module._FIRST_CAPACITY
    assert rig.count_and_sum(E2E)[0] == rig.count_and_sum(TTFT)[0] == 49 * 4096


@pytest.mark.fuzz
@given(
    st.lists(
        st.tuples(st.floats(0.001, 5.0), st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=3)),
        max_size=20,
    )
)
def test_counts_equal_a_loop_over_tokens(groups: list[tuple[float, list[set[int]]]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        rig = Rig(monkeypatch)
        rig.latencies.began(list(range(10)), rig.now_s)
        last = dict.fromkeys(range(10), rig.now_s)
        firsts, gaps = [], []
        for after_s, steps in groups:
            rig.note(after_s, *({i: 7 for i in sorted(one)} for one in steps))
            for i in set().union(*steps):
                count = sum(i in one for one in steps)
                waited, is_first = rig.now_s - last[i], last[i] == 1000.0
                firsts += [waited] if is_first else []
                gaps += [0.0] * (count - 1) if is_first else [waited / count] * count
                last[i] = rig.now_s
        assert rig.count_and_sum(TTFT) == (len(firsts), pytest.approx(sum(firsts)))
        assert rig.count_and_sum(ITL) == (len(gaps), pytest.approx(sum(gaps)))


def test_a_successor_goes_on_counting(tmp_path: Path) -> None:
    path = metrics_path(tmp_path, 0)
    assert read(path) is None
    lag = Histogram(LAG_BOUNDS_S)
    for value, total in ((0.0015, 10), (7.0, 30)):
        metrics = WorkerMetrics(path)
        metrics.opened()
        metrics.closed("/generate", 200)
        metrics.opened()
        metrics.aborted("disconnect", 2)
        metrics.ended("stop")
        metrics.e2e_request_latency.add(np.array([0.5, 2000.0]))
        lag.add(value)
        lag.add(value)
        metrics.publish(num_streams=3, totals=(total, 1, 0, 0.25), lag=lag)
        lag = Histogram(LAG_BOUNDS_S)  # of the next process
        del metrics  # killed
    data = read(path)
    assert data is not None
    assert data["totals"][0].tolist() == [40, 2, 0, 0.5]
    assert data["ends"][0, ENDS.index("stop")] == 2 and data["causes"][0, CAUSES.index("disconnect")] == 4
    assert data["lag_buckets"][0].tolist() == [0, 2] + [0] * (len(LAG_BOUNDS_S) - 2) + [2]
    assert data["lag_sum"][0, 0] == pytest.approx(14.003)
    assert data["latency_buckets"][0, E2E].sum() == 4 and data["latency_buckets"][0, E2E, -1] == 2
    assert data["gauges"][0].tolist() == [3, 1]  # of the living process alone: one request is open
    assert data["responses"][0, 0].tolist() == (b"/generate", 200, 2.0)


def test_more_pairs_of_route_and_status_than_there_is_room(tmp_path: Path) -> None:
    metrics = WorkerMetrics(tmp_path / "m")
    for i in range(300):
        metrics.opened()
        metrics.closed(f"/{i}", 200)
    metrics.publish()
    data = read(tmp_path / "m")
    assert data is not None and data["responses"][0]["count"].sum() == 300
    assert data["responses"][0, 254].tolist() == (b"/254", 200, 1.0)
    assert data["responses"][0, 255].tolist() == (b"other", 0, 45.0)
    assert data["gauges"][0, 1] == 0


def test_a_file_of_something_else_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b"x")
    assert read(path) is None
    size = WorkerMetrics(path).snapshot().nbytes
    path.write_bytes(b"\x07" * size)
    assert read(path) is None
    metrics = WorkerMetrics(path)
    metrics.ended("stop")
    metrics.publish()
    data = read(path)
    assert data is not None and data["ends"][0].tolist() == [1, 0, 0, 0] and data["totals"][0].sum() == 0


def test_a_file_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the metrics to .*: No such file"):
        WorkerMetrics(tmp_path / "nowhere" / "m")


def test_text_is_what_the_client_library_reads() -> None:
    text = MetricsText({"model_name": 'a"b\\c\nd'})
    text.gauge("x:gauge", "A line\nand \\ more.", 0.25)
    text.counter("x:count_total", "Counts.", 2**40)
    text.histogram("x:time_seconds", "Times.", (0.001, 1.0), [({"w": "0"}, [1, 2, 3], 9.5)])
    families = {f.name: f for f in parser.text_string_to_metric_families(text.text())}
    assert families["x:gauge"].type == "gauge" and families["x:gauge"].documentation == "A line\nand \\ more."
    (gauge,) = families["x:gauge"].samples
    assert gauge.value == 0.25 and gauge.labels == {"model_name": 'a"b\\c\nd'}
    assert families["x:count"].samples[0].value == 2**40
    histogram = families["x:time_seconds"]
    assert histogram.type == "histogram"
    values = [(s.name.removeprefix("x:time_seconds"), s.labels.get("le"), s.value) for s in histogram.samples]
    assert values == [
        ("_bucket", "0.001", 1),
        ("_bucket", "1", 3),
        ("_bucket", "+Inf", 6),
        ("_sum", None, 9.5),
        ("_count", None, 6),
    ]
    assert all(s.labels["w"] == "0" for s in histogram.samples)


@pytest.mark.parametrize("value", [0, 1.5, -3, 1e300, 5e-324, 2**53, math.pi])
def test_numbers_lose_nothing(value: float) -> None:
    text = MetricsText({})
    text.gauge("x", "X.", value)
    assert float(text.text().splitlines()[-1].split(" ")[1]) == value


@pytest.mark.parametrize("num_bounds", [1, 3, 71, 81])
def test_every_second_bound_keeps_all_counts(num_bounds: int) -> None:
    buckets = list(range(1, num_bounds + 2))
    told = np.cumsum(_pairs(buckets))
    kept = np.cumsum(buckets)
    assert told.tolist() == [*kept[:num_bounds:2].tolist(), kept[-1]]


def test_names_are_sglangs() -> None:
    assert [f"sglang:{name}_seconds" for name in LATENCIES] == [
        "sglang:time_to_first_token_seconds",
        "sglang:inter_token_latency_seconds",
        "sglang:e2e_request_latency_seconds",
    ]
