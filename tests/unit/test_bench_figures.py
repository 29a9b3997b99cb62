"""Timeline, steady-state window, client verdict, arrivals and the terminal plot of the load client."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench.arrivals import Pace, draw_arrivals
from phalanx.bench.client import ProcessLoad
from phalanx.bench.client_load import judge_client
from phalanx.bench.parse import Outcome
from phalanx.bench.server_figures import ServerFigures, read_server_figures
from phalanx.bench.server_metrics import read_gauges
from phalanx.bench.steady import find_steady_window
from phalanx.bench.terminal_plot import area, intervals, plot_run, scatter
from phalanx.bench.timeline import Timeline, make_timeline


def timeline(
    spans: list[tuple[float, float]], tokens: list[tuple[float, int]] | None = None, began: float = 1000.0
) -> Timeline:
    """A run of successful requests (start, end) and output tokens (time, count), in seconds."""
    outcomes = [Outcome(i, began + start, began + end) for i, (start, end) in enumerate(spans)]
    times, counts = zip(*tokens, strict=True) if tokens else ((), ())
    duration = max((end for _, end in spans), default=0.0)
    return make_timeline(outcomes, np.asarray(times) + began, np.asarray(counts), began, duration)


# ---- timeline


def test_in_flight_and_token_bins_are_exact() -> None:
    run = timeline([(0, 2), (1, 3), (2, 4)], [(0.5, 2), (1.5, 1), (1.9, 4), (4.0, 3)])
    assert run.in_flight(np.asarray([0.0, 0.5, 1.5, 2.0, 2.5, 3.5, 4.0])).tolist() == [1, 1, 2, 2, 2, 1, 0]
    assert run.tokens_per_second().tolist() == [2, 5, 0, 3]
    assert run.tokens_between(1.5, 4.0) == 5
    assert (run.last_send, run.duration_s) == (2.0, 4.0)


def test_an_empty_run_has_an_empty_series() -> None:
    run = timeline([])
    assert run.series()["t_s"] == []
    assert len(run.sampled_in_flight()) == 0
    assert plot_run(run.series()) == "nothing to plot"


def test_no_sliver_at_the_end_makes_a_spike() -> None:
    # 4 s and a hair: the token of the end came within the last tenth, not within the hair.
    series = timeline([(0.0, 4 + 1e-12)], [(4 + 1e-12, 1)]).series()
    assert max(series["output_tokens_per_s"]) == pytest.approx(10.0)
    assert timeline([(0.0, 0.01)], [(0.01, 3)]).series()["output_tokens_per_s"] == [300.0]


@pytest.mark.fuzz
@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0.2, 20), st.integers(0, 50)), min_size=1, max_size=20))
def test_series_conserves_tokens_and_requests(rows: list[tuple[float, float, int]]) -> None:
    spans = [(start, start + length) for start, length, _ in rows]
    run = timeline(spans, [(end, count) for (_, end), (_, _, count) in zip(spans, rows, strict=True)])
    series = run.series()
    width = run.duration_s / len(series["t_s"])
    total = sum(count for _, _, count in rows)
    assert sum(series["output_tokens_per_s"]) * width == pytest.approx(total, rel=1e-3, abs=0.1)
    assert sum(series["requests_per_s"]) * width == pytest.approx(len(rows), rel=1e-3, abs=0.1)
    assert 0.1 <= width * (1 + 1e-9) and len(series["t_s"]) <= 200
    assert max(series["in_flight"]) <= len(rows)


# ---- the steady-state window


def closed_loop(num_slots: int, length: float, rounds: int, ramp: float) -> list[tuple[float, float]]:
    """`num_slots` callers that start within `ramp` seconds and send `rounds` requests one after another."""
    spans = []
    for slot in range(num_slots):
        begin = ramp * slot / num_slots
        spans += [(begin + length * r, begin + length * (r + 1)) for r in range(rounds)]
    return spans


def test_window_of_a_closed_loop_spans_ramp_to_drain() -> None:
    spans = closed_loop(20, 1.0, 10, ramp=2.0)
    tokens = [(start + (k + 1) * (end - start) / 10, 1) for start, end in spans for k in range(10)]
    window, reason = find_steady_window(timeline(spans, tokens))
    assert window is not None, reason
    assert window.rule == "in flight"
    # Slot 19 of 20 makes 95%: it starts at 1.8 s. The last request is sent at 1.9 + 9 s.
    assert window.begin_s == pytest.approx(1.8)
    assert window.end_s == pytest.approx(10.9)
    assert window.requests_per_s == pytest.approx(20.0, rel=0.03)
    assert window.output_tokens_per_s == pytest.approx(200.0, rel=0.03)
    assert window.mean_in_flight == pytest.approx(20.0, rel=0.03)
    assert window.num_finished == round(window.requests_per_s * window.length_s)


def test_window_waits_for_the_first_answer() -> None:
    window, _ = find_steady_window(timeline(closed_loop(4, 3.0, 4, ramp=0.0)))
    assert window is not None
    assert (window.begin_s, window.end_s) == (3.0, 9.0)


def test_window_of_one_burst_follows_the_output_rate() -> None:
    # Sent at once; 100 tok/s from 2 s to 8 s, a thin start and end.
    tokens = [(t / 10, 1) for t in range(1, 20)] + [(2 + t / 100, 1) for t in range(600)]
    tokens += [(8 + t / 10, 1) for t in range(20)]
    spans = [(0.0, 1.0 + 9.0 * i / 49) for i in range(50)]
    window, _ = find_steady_window(timeline(spans, tokens))
    assert window is not None
    assert window.rule == "output rate"
    assert window.begin_s == pytest.approx(2.0, abs=0.21)
    assert window.end_s == pytest.approx(8.0, abs=0.21)
    assert window.output_tokens_per_s == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize(
    ("spans", "ramped", "reason"),
    [
        ([], False, "no request succeeded"),
        ([(0, 1), (0.5, 2), (1.5, 3)], True, "the request rate rose over the whole run"),
        ([(0, 1), (0, 5), (1.01, 10)], False, "shorter than a tenth of the run (in flight)"),
        ([(0, 1), (0.5, 10), (4, 11), (5, 12)], False, "fewer than 2 requests ended in it (in flight)"),
        ([(0, 1)], False, "no plateau (output rate)"),
    ],
)
def test_no_window_tells_why(spans: list[tuple[float, float]], ramped: bool, reason: str) -> None:
    assert find_steady_window(timeline(spans), ramped_rate=ramped) == (None, reason)


@pytest.mark.fuzz
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1, max_size=30))
def test_any_window_lies_in_the_run(rows: list[tuple[float, float]]) -> None:
    run = timeline([(start, start + length) for start, length in rows], [(start, 3) for start, _ in rows])
    window, reason = find_steady_window(run)
    if window is None:
        assert reason
        return
    assert 0 <= window.begin_s < window.end_s <= run.duration_s * (1 + 1e-9)
    assert 2 <= window.num_finished <= len(rows)
    assert 0 <= window.mean_in_flight <= len(rows)


# ---- was it the client?


def process(ticks: list[tuple[float, float, float]]) -> ProcessLoad:
    return ProcessLoad(7, 1.0, np.asarray(ticks, np.float64).reshape(-1, 3), 3, 10, 1000, 0)


def test_an_idle_client_is_no_bottleneck() -> None:
    load = judge_client([process([(t / 50, 0.001, t / 500) for t in range(500)])], (0.0, 10.0))
    assert load.bottleneck is None
    assert load.worst("cpu_share") == pytest.approx(0.1)
    assert load.worst("lag_p99_ms") == pytest.approx(1.0)


def test_a_busy_or_late_process_is_named() -> None:
    calm = process([(t / 50, 0.001, t / 500) for t in range(500)])
    busy = process([(t / 50, 0.001, 0.9 * t / 50) for t in range(500)])
    late = process([(t / 50, 0.030 if t % 20 == 0 else 0.0, t / 500) for t in range(500)])
    assert judge_client([calm, busy], (0.0, 10.0)).bottleneck == "process 1 used 90% of a core"
    assert judge_client([late, calm], (0.0, 10.0)).bottleneck == "process 0: event-loop lag P99 30 ms"


def test_only_the_window_is_judged() -> None:
    # All of the first second's CPU: the burst of sends at rate inf.
    ticks = [(t / 50, 0.1 if t < 50 else 0.0, min(t / 50, 1.0)) for t in range(500)]
    assert judge_client([process(ticks)], (0.0, 1.0)).bottleneck is not None
    judged = judge_client([process(ticks)], (2.0, 10.0))
    assert judged.bottleneck is None
    assert judged.worst("cpu_share") == 0.0
    assert judged.worst("lag_max_ms") == pytest.approx(100.0)
    empty = judge_client([process([])], (0.0, 1.0))
    assert (empty.bottleneck, empty.worst("cpu_share"), empty.worst("lag_p99_ms")) == (None, None, None)


# ---- arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_asked_mean_and_spread(burstiness: float) -> None:
    gaps = np.diff(draw_arrivals(40_001, Pace(50.0, burstiness), np.random.RandomState(3)))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    # A gamma's coefficient of variation is 1 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_ramps_run_from_the_first_rate_to_the_last() -> None:
    for strategy, middle in (("linear", 55.0), ("exponential", math.sqrt(1000.0))):
        pace = Pace(math.inf, 1e9, strategy, 10.0, 100.0)
        rates = 1 / np.diff(draw_arrivals(20_001, pace, np.random.RandomState(0)))
        assert rates[0] == pytest.approx(10.0, rel=0.01)
        assert rates[10_000] == pytest.approx(middle, rel=0.01)
        assert rates[-1] == pytest.approx(100.0, rel=0.01)


# ---- small things


def test_gauges_of_sglang_and_vllm() -> None:
    ours = '# TYPE x gauge\nsglang:num_running_reqs{model="a b"} 3.0\nsglang:num_queue_reqs{model="a b"} 2\n'
    assert read_gauges(ours) == (3.0, 2.0)
    theirs = 'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 4\n'
    assert read_gauges(theirs + "vllm:num_requests_waiting 7e0\n") == (5.0, 7.0)
    assert read_gauges(theirs) is None
    assert read_gauges("") is None


def test_plot_has_the_shape_of_its_values() -> None:
    lines = area([0, 1, 2, 4], "x").splitlines()
    assert [line[11:].rstrip() for line in lines[1:]] == [" " * 45 + "█" * 15] * 2 + [
        " " * 30 + "█" * 30,
        " " * 15 + "█" * 45,
    ]
    assert lines[1].startswith("         4 ")
    assert area([0.0, 0.0], "x").count("█") == 0


def test_scatter_puts_points_where_they_are() -> None:
    lines = scatter([(0, 0, "4"), (59, 11, "8"), (59, 11, "8"), (30, 11, "4"), (30, 11, "8")], "x", "y (ms)")
    rows = lines.splitlines()
    assert rows[0] == "y (ms)"
    # 60 columns and 12 rows, both axes from 0: a letter where its label's points are, a star where two meet.
    assert rows[1] == f"{11:>10} |{' ' * 30}*{' ' * 28}b"
    assert rows[12] == f"{0:>10} |a"
    assert [row for row in rows[2:12] if row.strip(" |")] == []
    assert rows[14].split() == ["0", "x", "59"]
    assert rows[15].split() == ["a", "4", "b", "8"]
    assert scatter([], "x", "y (ms)") == "y (ms): nothing to plot"
    assert scatter([(0, 0, "1")], "x", "y").splitlines()[12].endswith("|a")


def test_intervals_lie_on_a_logarithmic_axis() -> None:
    rows = [("up", 2.0, 1.0, 4.0), ("down", 0.5, 0.25, 1.0), ("alone", 4.0, None, None)]
    plot = intervals(rows, "B/A").splitlines()
    cells = [line[27:].ljust(60) for line in plot[1:4]]
    # From 0.25 to 4 over 60 columns: 1 is in the middle, 0.5 and 2 a quarter from the ends.
    assert [cell.index("o") for cell in cells] == [44, 15, 59]
    assert cells[0] == " " * 30 + "|" + "-" * 13 + "o" + "-" * 15
    assert cells[1] == "-" * 15 + "o" + "-" * 14 + "|" + " " * 29
    assert cells[2][30] == "|"
    assert plot[4].split() == ["0.25", "1", "=", "|", "4"]
    assert intervals([], "B/A") == "B/A: nothing to plot"
    assert intervals([("same", 1.0, 1.0, 1.0)], "B/A").splitlines()[1].split() == ["same", "o"]


def test_figures_of_the_server_are_found_where_it_puts_them() -> None:
    between = {"mean": 0.21, "p99": 1.5}
    top = {"host_time_between_steps_ms": between, "kv_indices_backend": "fused", "internal_states": [{}]}
    expected = ServerFigures(None, 0.21, 1.5, "fused")
    assert read_server_figures(top) == expected
    assert read_server_figures({"internal_states": [top]}) == expected
    assert read_server_figures({"internal_states": [{"avg_spec_accept_length": 2}]}) == ServerFigures(2.0)
    assert expected.fields() == {"host_time_between_steps_ms": between, "kv_indices_backend": "fused"}
    for nothing in (
        None,
        {},
        {"internal_states": []},
        {"host_time_between_steps_ms": 3, "internal_states": 1},
    ):
        assert read_server_figures(nothing) == ServerFigures()
    assert ServerFigures().fields() == {"host_time_between_steps_ms": None, "kv_indices_backend": None}
