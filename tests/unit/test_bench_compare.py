"""Ratios and intervals, and results compared by workload."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench import compare
from phalanx.bench.args import add_arguments
from phalanx.bench.comparison import Comparison, compare_lines
from phalanx.bench.errors import BenchError
from phalanx.bench.report import config_fields
from phalanx.bench.stats import paired_ratio, t_quantile, unpaired_ratio
from phalanx.bench.workload import OTHER_OPTIONS, SUBJECT_OPTIONS, WORKLOAD_OPTIONS
from tests.unit.test_bench_datasets import Letters
from tests.unit.test_bench_sweep import check

# ---- intervals


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 4, 2.77645), (0.975, 30, 2.04227), (0.95, 9, 1.83311)],
)
def test_t_quantiles_are_those_of_the_tables(probability: float, degrees: float, expected: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-4)


def test_paired_ratio_by_hand() -> None:
    # Log ratios 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3).
    r = paired_ratio([1.0, 2.0, 4.0], [math.exp(0.1), 2 * math.exp(0.2), 4 * math.exp(0.3)])
    half = 4.30265 * 0.1 / math.sqrt(3)
    assert r.ratio == pytest.approx(math.exp(0.2))
    assert (r.low, r.high) == (
        pytest.approx(math.exp(0.2 - half), rel=1e-4),
        pytest.approx(math.exp(0.2 + half), rel=1e-4),
    )
    assert (r.mean_a, r.differs) == (pytest.approx(2.0), False)


def test_unpaired_ratio_is_welchs() -> None:
    r = unpaired_ratio([100.0, 110.0, 105.0], [210.0, 190.0, 205.0, 200.0])
    a, b = np.log([100, 110, 105]), np.log([210, 190, 205, 200])
    va, vb = a.var(ddof=1) / 3, b.var(ddof=1) / 4
    degrees = (va + vb) ** 2 / (va**2 / 2 + vb**2 / 3)
    half = t_quantile(0.975, degrees) * math.sqrt(va + vb)
    assert r.ratio == pytest.approx(math.exp(b.mean() - a.mean()))
    assert r.high == pytest.approx(r.ratio * math.exp(half))
    assert r.differs


def test_one_repeat_has_no_interval_and_equal_repeats_no_width() -> None:
    for function in (paired_ratio, unpaired_ratio):
        alone = function([2.0], [3.0])
        assert (alone.ratio, alone.low, alone.differs) == (pytest.approx(1.5), None, False)
        same = function([2.0, 2.0], [2.0, 2.0])
        assert (same.low, same.high) == (pytest.approx(1.0), pytest.approx(1.0))


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.RandomState(0)
    covered = 0
    for _ in range(300):
        a, b = np.exp(rng.normal(0, 0.1, 4)), np.exp(rng.normal(math.log(1.3), 0.2, 5))
        r = unpaired_ratio(a.tolist(), b.tolist())
        covered += r.low <= 1.3 <= r.high  # type: ignore[operator]
    assert 0.92 <= covered / 300 <= 0.98


@pytest.mark.fuzz
@given(st.lists(st.tuples(st.floats(0.01, 1e6), st.floats(0.01, 1e6)), min_size=2, max_size=6))
def test_swapping_the_sides_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    a, b = zip(*pairs, strict=True)
    for function in (paired_ratio, unpaired_ratio):
        there, back = function(a, b), function(b, a)
        assert there.ratio == pytest.approx(1 / back.ratio)
        assert there.low == pytest.approx(1 / back.high, rel=1e-6)  # type: ignore[operator]
        assert there.low <= there.ratio * (1 + 1e-9)  # type: ignore[operator]


# ---- compare two files


def config(*argv: str) -> dict[str, Any]:
    """The configuration that a run with this command line writes into its JSON line."""
    args = check("--max-concurrency", "8", *argv)
    args.model = args.model or "m"
    return config_fields(args)


def line(*argv: str, **fields: Any) -> dict[str, Any]:
    base = {"config": config(*argv), "sent": 10, "completed": 10, "failed": 0, "failures": {}}
    return {**base, "request_throughput": 5.0, "output_throughput": 50.0, "mean_ttft_ms": None, **fields}


def compared(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> tuple[list[Comparison], list[str]]:
    """The comparisons and what was said on the way."""
    said: list[str] = []
    return compare_lines(a, b, said.append), said


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def compare_args(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    compare.add_arguments(parser)
    return parser.parse_args(list(argv))


def test_files_are_compared_by_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = [line(request_throughput=v) for v in (4.0, 4.1, 3.9)] + [line("--max-concurrency", "16")]
    b = [line("--seed", f"{v:.0f}", request_throughput=v) for v in (8.0, 8.2, 7.8)]
    b.append(line("--max-concurrency", "32"))
    args = compare_args(write(tmp_path / "a", a), write(tmp_path / "b", b), "--plot")
    assert compare.run(args, lambda name: Letters()) == 0
    captured = capsys.readouterr()
    (only,) = json.loads(captured.out.splitlines()[-1])["comparisons"]
    ratio = only["ratios"]["request_throughput"]
    assert only["workload"]["max_concurrency"] == 8
    assert ratio["ratio"] == pytest.approx(2.0, rel=1e-3)
    assert 1.8 < ratio["low"] < 2.0 < ratio["high"] < 2.2
    assert "mean_ttft_ms" not in only["ratios"]
    row = next(text for text in captured.out.splitlines() if text.startswith("request_throughput"))
    assert row.split()[3] == "2.000" and row.endswith("*")
    only_in_a = next(text for text in captured.err.splitlines() if text.startswith("Only in A: Workload: "))
    assert "sent 10, dataset_name random, random_input_len 1024" in only_in_a
    assert only_in_a.endswith("max_concurrency 16 (against the nearest: max_concurrency 16 / 8)")
    assert "Only in B" in captured.err
    assert "  not measured in 3 of 3 runs of A, 3 of 3 of B: total_throughput, " in captured.out
    drawn = [text for text in captured.out.splitlines() if text.startswith("request_throughput   ")]
    assert drawn[1][27] == "|" and "-o-" in drawn[1]


def test_pairs_are_compared_as_pairs() -> None:
    # The machine slowed down by half between the pairs; B is 10% faster in each.
    a = [line(request_throughput=v, compare={"pair": i, "side": "A"}) for i, v in enumerate((10.0, 5.0))]
    b = [line(request_throughput=v, compare={"pair": i, "side": "B"}) for i, v in enumerate((11.0, 5.5))]
    ((paired,), _) = compared(a[::-1], b)
    assert paired.ratios["request_throughput"].ratio == pytest.approx(1.1)
    assert paired.ratios["request_throughput"].differs
    loose = [{name: value for name, value in one.items() if name != "compare"} for one in a]
    ((unpaired,), _) = compared(loose, b)
    assert not unpaired.ratios["request_throughput"].differs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "not a result"),
        ('{"a": 1}', "not a result"),
        ("\n", "no results"),
        ('{"request_throughput": 1, "sent": 1, "completed": 1}', "does not tell its configuration"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(BenchError, match=message) as caught:
        compare.read_lines(str(tmp_path / "x"))
    assert caught.value.exit_code == 2
    with pytest.raises(BenchError, match="No such file"):
        compare.read_lines(str(tmp_path / "none"))


def test_nothing_in_common_is_refused_with_the_difference() -> None:
    with pytest.raises(
        BenchError, match="no workload in common; the nearest differ in sent 10 / 11"
    ) as caught:
        compared([line()], [line(sent=11), line("--top-p", "0.5", sent=12)])
    assert caught.value.exit_code == 2


def test_every_option_is_part_of_the_workload_or_known_not_to_be() -> None:
    names = [*WORKLOAD_OPTIONS, *SUBJECT_OPTIONS, *OTHER_OPTIONS]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert sorted(names) == sorted(vars(parser.parse_args([])))
    assert set(WORKLOAD_OPTIONS) <= config().keys()


RAMP = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps")
GSP = ("--dataset-name", "generated-shared-prefix")
FILE = ("--dataset-name", "custom", "--dataset-path")


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ((*RAMP, "9"), (*RAMP, "8"), "ramp_up_end_rps 9.0 / 8.0"),
        (("--vllm-random-range",), (), "vllm_random_range true / false"),
        ((), ("--disable-stream",), "disable_stream false / true"),
        ((), ("--top-k", "5"), "top_k not given / 5"),
        ((), ("--temperature", "0.7"), "temperature 0.0 / 0.7"),
        (
            ("--request-rate", "4", "--burstiness", "0.5"),
            ("--request-rate", "4"),
            "burstiness 0.5 / 1.0",
        ),
        (("--request-rate", "4"), (), "request_rate 4.0 / inf"),
        (GSP, (*GSP, "--gsp-question-len", "9"), "gsp_question_len 128 / 9"),
        (GSP, (*GSP, "--gsp-ordered"), "gsp_ordered false / true"),
        ((*FILE, "x"), (*FILE, "y"), "dataset_path x / y"),
        ((*FILE, "x"), (*FILE, "x", "--apply-chat-template"), "apply_chat_template false / true"),
        ((), ("--tokenize-prompt",), "tokenize_prompt false / true"),
        ((), ("--disable-ignore-eos",), "disable_ignore_eos false / true"),
        ((), ("--extra-request-body", '{"a": 1}'), 'extra_request_body {} / {"a":1}'),
        (("--flush-cache",), (), "flush_cache true / false"),
    ],
)
def test_runs_that_differ_in_what_is_sent_are_not_merged(
    one: tuple[str, ...], other: tuple[str, ...], difference: str
) -> None:
    with pytest.raises(BenchError, match="no workload in common") as caught:
        compared([line(*one)], [line(*other)])
    assert str(caught.value).endswith(f"the nearest differ in {difference}")
    # On one side they are two workloads, each of which finds its like.
    both = [line(*one, request_throughput=2.0), line(*other, request_throughput=8.0)]
    comparisons, said = compared(both, both)
    assert [c.ratios["request_throughput"].mean_a for c in comparisons] == pytest.approx([2.0, 8.0])
    assert said == []


def test_where_it_ran_and_what_it_wrote_is_no_workload() -> None:
    argv = ("--port", "5", "--output-file", "x", "--tag", "t", "--goodput", "ttft:5", "--plot", "--seed", "9")
    ((only,), _) = compared([line()], [line(*argv)])
    assert only.ratios["request_throughput"].ratio == pytest.approx(1.0)


def test_different_models_are_told_and_never_merged() -> None:
    one, other = line("--model", "x"), line("--model", "y", "--backend", "vllm")
    ((only,), _) = compared([one], [other])
    assert only.notes[:2] == ["backend: A sglang, B vllm", "model: A x, B y"]
    with pytest.raises(BenchError, match="different backend: sglang, vllm") as caught:
        compared([one, other], [one])
    assert caught.value.exit_code == 2
    sides = [line(compare={"pair": 0, "side": side}) for side in "AB"]
    with pytest.raises(BenchError, match="both servers' runs"):
        compared(sides, [line()])


def test_runs_that_failed_are_told_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = line(completed=0, failed=10, failures={"HTTP 500: no": 10}, request_throughput=0.0)
    some = line(completed=8, failed=2, failures={"timeout": 2}, request_throughput=4.0)
    a, b = write(tmp_path / "a", [lost, lost]), write(tmp_path / "b", [some, lost])
    assert compare.run(compare_args(a, b), lambda name: Letters()) == 1
    out = capsys.readouterr().out
    assert "A: 20 of 20 requests failed: 20 x HTTP 500: no" in out
    assert "A: no request succeeded in 2 of 2 runs, which are left out" in out
    assert "B: 12 of 20 requests failed: 10 x HTTP 500: no; 2 x timeout" in out
    assert "nothing to compare: no successful run on each side" in out
    assert "B/A" not in out and "* the interval" not in out
    assert compare.run(compare_args(b, b, "--plot"), lambda name: Letters()) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[2].split()[:4] == ["request_throughput", "4.00", "4.00", "1.000"]
    # A pair is left out whole, whichever side of it was lost.
    paired = [
        [{**one, "compare": {"pair": i, "side": side}} for i, one in enumerate(lines)]
        for side, lines in (("A", [some, lost, line()]), ("B", [line(), line(), lost]))
    ]
    ((only,), _) = compared(*paired)
    assert only.ratios["request_throughput"].mean_a == pytest.approx(4.0)
    assert only.ratios["request_throughput"].low is None


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("one",),
        ("a", "b", "c"),
        ("a", "b", "--repeats", "3"),
        ("a", "b", "--num-prompts", "5"),
        ("a", "b", "--goodput", "ttft:5"),
        ("a", "b", "--output-file", "x"),
        ("a", "b", "--base-url-a", "http://x", "--base-url-b", "http://y"),
        ("--base-url-a", "http://x"),
        ("--base-url-a", "http://x", "--base-url-b", "http://y", "--base-url", "http://z"),
        ("--base-url-a", "http://x", "--base-url-b", "http://y", "--repeats", "0"),
    ],
)
def test_unclear_comparisons_are_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(BenchError) as caught:
        compare.run(compare_args(*argv), lambda name: Letters())
    assert caught.value.exit_code == 2
