"""Compare two sets of runs: ratios B/A with 95% confidence intervals over repeats.

Either two JSONL files of `bench serving` or `bench sweep` (lines of the same workload are repeats), or two
servers measured here in turn: A B, B A, A B, ... with the same prompts in both runs of a pair.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from phalanx.bench import args as serving_args
from phalanx.bench.datasets import TokenizerLike
from phalanx.bench.errors import BenchError
from phalanx.bench.report import json_line
from phalanx.bench.run import connect, measure, save, say
from phalanx.bench.settle import check_arguments
from phalanx.bench.stats import Ratio, paired_ratio, unpaired_ratio

Line = dict[str, Any]

METRICS = (
    "request_throughput",
    "output_throughput",
    "total_throughput",
    "steady_output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "mean_e2e_latency_ms",
    "median_e2e_latency_ms",
    "p99_e2e_latency_ms",
)
# Fields that make two runs repeats of one workload; the seed is none of them.
_WORKLOAD = (
    "dataset_name",
    "request_rate",
    "max_concurrency",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "sharegpt_output_len",
    "sent",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench compare`: two files, or two servers and the options of `bench serving`."""
    group = parser.add_argument_group("compare")
    group.add_argument("files", nargs="*", metavar="A.jsonl B.jsonl", help="two files of results")
    group.add_argument("--base-url-a", metavar="URL", help="server A, measured here")
    group.add_argument("--base-url-b", metavar="URL", help="server B")
    group.add_argument("--repeats", type=int, help="pairs of runs with two servers (default: 5)")
    serving_args.add_arguments(parser)


def run(
    args: argparse.Namespace, load_tokenizer: Callable[[str], TokenizerLike], settle_s: float = 1.0
) -> int:
    """Compare; a table per workload and one JSON line go to stdout.

    Returns:
        Exit code: 0, or 1 when a run had no successful request.

    Raises:
        BenchError: with the exit code of its kind.
    """
    urls = (args.base_url_a, args.base_url_b)
    if urls != (None, None):
        if None in urls or args.files or args.base_url is not None:
            raise BenchError(
                "give --base-url-a and --base-url-b and neither files nor --base-url", exit_code=2
            )
        a, b = measure_pairs(args, load_tokenizer, settle_s)
    else:
        if len(args.files) != 2 or args.repeats is not None:
            raise BenchError(
                "give two files, or --base-url-a and --base-url-b (--repeats is for servers)", exit_code=2
            )
        a, b = read_lines(args.files[0]), read_lines(args.files[1])
    groups = compare_lines(a, b)
    for key, ratios in groups:
        print(format_ratios(key, ratios))
    print("* the interval leaves 1 out; of twenty such intervals, one does by chance")
    result = [
        {"workload": key, "ratios": {n: _fields(r) for n, r in ratios.items()}} for key, ratios in groups
    ]
    print(json_line({"comparisons": result}).decode(), end="", flush=True)
    return 0 if all(line["completed"] for line in [*a, *b]) else 1


def measure_pairs(
    args: argparse.Namespace, load_tokenizer: Callable[[str], TokenizerLike], settle_s: float
) -> tuple[list[Line], list[Line]]:
    """Measure both servers in pairs that share a seed, the order turned round in every other pair.

    Raises:
        BenchError: with the exit code of its kind.
    """
    repeats = 5 if args.repeats is None else args.repeats
    if repeats < 1:
        raise BenchError("--repeats must be at least 1", exit_code=2)
    path = args.output_file or f"compare_{datetime.now():%m%d_%H%M%S}.jsonl"
    found: dict[str, list[Line]] = {"A": [], "B": []}
    tokenizer = None
    for pair in range(repeats):
        for side in ("A", "B") if pair % 2 == 0 else ("B", "A"):
            one = copy.deepcopy(args)
            one.base_url = args.base_url_a if side == "A" else args.base_url_b
            one.seed = args.seed + pair
            check_arguments(one)
            target = connect(one)
            tokenizer = tokenizer or load_tokenizer(args.tokenizer or one.model)
            say(f"Pair {pair + 1} of {repeats}: {side}, {target.url}")
            measured = measure(one, target, tokenizer, settle_s)
            measured.fields["compare"] = {"pair": pair, "side": side}
            save(one, measured, path)
            found[side].append(measured.fields)
    say(f"Results appended to {path}")
    return found["A"], found["B"]


def read_lines(path: str) -> list[Line]:
    """Read the JSON lines of a result file.

    Raises:
        BenchError: exit code 2; the file cannot be read or holds something else.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}", exit_code=2) from None
    lines = []
    for number, text in enumerate(raw.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise BenchError(f"{path} line {number}: not JSON", exit_code=2) from None
        if not isinstance(line, dict) or "request_throughput" not in line or "sent" not in line:
            raise BenchError(f"{path} line {number}: not a result of bench serving", exit_code=2)
        lines.append(line)
    if not lines:
        raise BenchError(f"{path}: no results", exit_code=2)
    return lines


def compare_lines(a: Sequence[Line], b: Sequence[Line]) -> list[tuple[dict[str, Any], dict[str, Ratio]]]:
    """Return (workload, ratios by metric) of each workload that both sides have.

    Pairs of `measure_pairs` are compared as pairs, everything else as independent repeats.

    Raises:
        BenchError: exit code 2; they have no workload in common.
    """
    sides = [_by_workload(lines) for lines in (a, b)]
    common = [key for key in sides[0] if key in sides[1]]
    for name, side in zip("AB", sides, strict=True):
        for key in side:
            if key not in common:
                say(f"Only in {name}: {_shown(dict(zip(_WORKLOAD, key, strict=True)))}")
    if not common:
        raise BenchError("the two sides have no workload in common", exit_code=2)
    found = []
    for key in common:
        left, right = sides[0][key], sides[1][key]
        paired = _pairs(left) is not None and _pairs(left) == _pairs(right)
        ratios = {}
        for metric in METRICS:
            x, y = ([_value(line, metric) for line in lines] for lines in (left, right))
            # A metric that a run lacks, or that is zero, has no ratio.
            if all(value is not None and value > 0 for value in [*x, *y]):
                ratios[metric] = paired_ratio(x, y) if paired else unpaired_ratio(x, y)
        found.append((dict(zip(_WORKLOAD, key, strict=True)), ratios))
    return found


def format_ratios(workload: dict[str, Any], ratios: dict[str, Ratio]) -> str:
    """Return a table: means of both sides, B/A, its interval, and a star where the interval leaves 1 out."""
    lines = [_shown(workload), f"{'metric':<26} {'A':>12} {'B':>12} {'B/A':>8}   95% interval"]
    for name, r in ratios.items():
        interval = (
            "too few runs" if r.low is None else f"{r.low:.3f} - {r.high:.3f}{' *' if r.differs else ''}"
        )
        lines.append(f"{name:<26} {r.mean_a:>12.2f} {r.mean_b:>12.2f} {r.ratio:>8.3f}   {interval}")
    return "\n".join(lines)


def _by_workload(lines: Sequence[Line]) -> dict[tuple[Any, ...], list[Line]]:
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(name) for name in _WORKLOAD), []).append(line)
    for group in groups.values():
        group.sort(key=lambda line: line.get("compare", {}).get("pair", 0))
    return groups


def _pairs(lines: Sequence[Line]) -> list[int] | None:
    if any("compare" not in line for line in lines):
        return None
    pairs = [line["compare"]["pair"] for line in lines]
    return pairs if len(set(pairs)) == len(pairs) else None


def _value(line: Line, metric: str) -> Any:
    if metric == "steady_output_throughput":
        return (line.get("steady_state") or {}).get("output_tokens_per_s")
    return line.get(metric)


def _shown(workload: dict[str, Any]) -> str:
    return "Workload: " + ", ".join(
        f"{name} {value}" for name, value in workload.items() if value is not None
    )


def _fields(ratio: Ratio) -> dict[str, Any]:
    return {"a": ratio.mean_a, "b": ratio.mean_b, "ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
