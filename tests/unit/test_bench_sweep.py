"""Sweeps planned and judged, and the options checked before a run."""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import pytest

from phalanx.bench import sweep
from phalanx.bench.args import add_arguments
from phalanx.bench.charts import tradeoff_points
from phalanx.bench.datasets import draw_lengths_vllm, load_requests
from phalanx.bench.errors import BenchError
from phalanx.bench.knee import find_knee
from phalanx.bench.report_page import show
from phalanx.bench.settle import check_arguments
from tests.unit.test_bench_datasets import Letters

# ---- sweeps


def sweep_args(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    sweep.add_arguments(parser)
    return parser.parse_args(["--dataset-name", "random", *argv])


def test_a_sweep_plans_every_point_with_prompts_of_its_own() -> None:
    kind, runs = sweep.plan_runs(sweep_args("--rates", "8", "2", "--repeats", "2", "--seed", "7"))
    assert kind == "rate"
    assert [(one.request_rate, one.sweep["repeat"], one.seed) for one in runs] == [
        (2.0, 0, 7),
        (2.0, 1, 8),
        (8.0, 0, 9),
        (8.0, 1, 10),
    ]
    kind, runs = sweep.plan_runs(sweep_args("--concurrencies", "4", "16"))
    assert [(one.max_concurrency, one.request_rate) for one in runs] == [(4, math.inf), (16, math.inf)]


@pytest.mark.parametrize(
    "argv",
    [
        ("--rates", "1", "--request-rate", "5"),
        ("--rates", "1", "1"),
        ("--rates", "0"),
        ("--concurrencies", "0"),
        ("--concurrencies", "4", "--max-concurrency", "5"),
        ("--rates", "1", "--repeats", "0"),
        ("--rates", "1", "--knee-attainment", "1.5"),
        ("--rates", "1", "--knee-attainment", "0.9"),
        ("--rates", "1", "--knee-attainment", "0", "--goodput", "ttft:5"),
        ("--rates", "1", "--report", "x", "--output-file", "./x"),
    ],
)
def test_unclear_sweeps_are_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(BenchError) as caught:
        sweep.plan_runs(sweep_args(*argv))
    assert caught.value.exit_code == 2


SLOS = {"ttft": 500.0, "tpot": 50.0}


def points(*shares: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"sweep": {"value": value}, "slo_attainment": share, "goodput_slos_ms": SLOS}
        for value, share in shares
    ]


TARGETS = "(ttft <= 500 ms, tpot <= 50 ms)"


@pytest.mark.parametrize(
    ("lines", "value", "first_bad", "text"),
    [
        (points((1, 1.0), (2, 0.99), (4, 0.5)), 2, 4, f"rate 2 meets the targets {TARGETS}, 4 misses them"),
        # One repeat of the lowest point failed.
        (
            points((1, 1.0), (1, 0.9), (2, 1.0)),
            None,
            1,
            f"none, rate 1, the lowest tried, misses the targets {TARGETS}",
        ),
        # A lucky point above a failed one is no knee.
        (points((1, 1.0), (2, 0.5), (4, 1.0)), 1, 2, f"rate 1 meets the targets {TARGETS}, 2 misses them"),
        (
            points((1, 1.0), (2, 1.0)),
            2,
            None,
            "rate 2 or above: it is the last one tried and meets the targets "
            f"{TARGETS}, so no upper bound was found",
        ),
        ([{"sweep": {"value": 1}}], None, None, "not looked for, there is no --goodput"),
    ],
)
def test_the_knee_is_the_highest_point_below_which_all_are_good(
    lines: list, value: float | None, first_bad: float | None, text: str
) -> None:
    knee = find_knee(lines, 0.99)
    assert (knee.value, knee.first_bad) == (value, first_bad)
    assert knee.describe("rate") == f"Knee: {text}"


def test_a_chart_of_throughput_against_latency_joins_the_repeats_of_a_point() -> None:
    runs = [(2, 10.0, 5.0), (1, 4.0, 1.0), (2, 12.0, 7.0), (1, 6.0, None)]
    lines = [{"sweep": {"value": v}, "output_throughput": t, "median_ttft_ms": ms} for v, t, ms in runs]
    expected = [(1, [4.0], [1.0]), (2, [10.0, 12.0], [5.0, 7.0])]
    assert tradeoff_points(lines, "median_ttft_ms") == expected


def test_a_figure_is_shown_as_measured() -> None:
    assert [show(None), show(3), show(2.0), show(1.239)] == ["n/a", "3", "2.00", "1.24"]


# ---- options


def check(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    args = parser.parse_args(["--dataset-name", "random", *argv])
    check_arguments(args)
    return args


@pytest.mark.parametrize(
    "argv",
    [
        ("--burstiness", "0.5"),  # all at once
        ("--burstiness", "0", "--request-rate", "5"),
        ("--ramp-up-start-rps", "1"),
        ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1"),
        ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "9"),
        (
            "--ramp-up-strategy",
            "linear",
            "--ramp-up-start-rps",
            "1",
            "--ramp-up-end-rps",
            "9",
            "--request-rate",
            "1",
        ),
        ("--backend", "openai", "--top-k", "5"),
        ("--backend", "openai", "--profile"),
        ("--backend", "vllm", "--profile", "--profile-num-steps", "5"),
        ("--backend", "vllm", "--return-logprob"),
        ("--top-logprobs-num", "3"),
        ("--profile-prefix", "x"),
        ("--profile", "--profile-num-steps", "0"),
        ("--top-k", "0"),
        ("--min-p", "1.5"),
        ("--frequency-penalty", "3"),
        ("--repetition-penalty", "0"),
        ("--vllm-random-range", "--random-range-ratio", "1.0"),
    ],
)
def test_options_that_would_be_ignored_or_wrong_are_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(BenchError) as caught:
        check(*argv)
    assert caught.value.exit_code == 2


def test_vllms_range_is_around_the_length() -> None:
    drawn = draw_lengths_vllm(np.random.RandomState(0), 10, 0.25, 3000)
    assert (drawn.min(), drawn.max()) == (7, 13)
    assert draw_lengths_vllm(np.random.RandomState(0), 10, 0.0, 5).tolist() == [10] * 5
    args = check(
        "--random-input-len",
        "20",
        "--random-output-len",
        "8",
        "--random-range-ratio",
        "0.5",
        "--vllm-random-range",
        "--tokenize-prompt",
        "--num-prompts",
        "400",
    )
    requests = load_requests(args, Letters())
    assert {r.prompt_len for r in requests} == set(range(10, 31))
    assert {r.output_len for r in requests} == set(range(4, 13))
