"""Compare two sets of runs: ratios B/A with 95% confidence intervals over repeats.

Either two JSONL files of `bench serving` or `bench sweep` (lines of the same workload are repeats), or two
servers measured here in turn: A B, B A, A B, ... with the same prompts in both runs of a pair.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from phalanx.bench import args as serving_args
from phalanx.bench.comparison import compare_lines, format_comparison, plot_ratios
from phalanx.bench.datasets import TokenizerLike
from phalanx.bench.errors import BenchError
from phalanx.bench.report import json_line, require_writable
from phalanx.bench.run import connect, measure, save, say
from phalanx.bench.settle import check_arguments
from phalanx.bench.stats import Ratio
from phalanx.bench.workload import Line


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
        _refuse_load_options(args)
        a, b = read_lines(args.files[0]), read_lines(args.files[1])
    comparisons = compare_lines(a, b, say)
    for one in comparisons:
        print(format_comparison(one))
        if args.plot:
            print(plot_ratios(one))
    if any(ratio.low is not None for one in comparisons for ratio in one.ratios.values()):
        print("* the interval leaves 1 out; of twenty such intervals, one does by chance")
    result = [
        {
            "workload": one.workload.fields,
            "ratios": {name: _fields(ratio) for name, ratio in one.ratios.items()},
            "notes": one.notes,
        }
        for one in comparisons
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
    if repeats < 1 or args.seed + repeats > 2**32:
        raise BenchError("--repeats must be at least 1, --seed + --repeats at most 2**32", exit_code=2)
    path = args.output_file or f"compare_{datetime.now():%m%d_%H%M%S}.jsonl"
    require_writable(path, "--output-file")
    found: dict[str, list[Line]] = {"A": [], "B": []}
    asked, targets = {}, {}
    for side, url in (("A", args.base_url_a), ("B", args.base_url_b)):
        asked[side] = copy.deepcopy(args)
        asked[side].base_url = url
        check_arguments(asked[side])
        targets[side] = connect(asked[side])
    tokenizer = load_tokenizer(args.tokenizer or asked["A"].model)
    for pair in range(repeats):
        for side in ("A", "B") if pair % 2 == 0 else ("B", "A"):
            one = copy.deepcopy(asked[side])
            one.seed = args.seed + pair
            say(f"Pair {pair + 1} of {repeats}: {side}, {targets[side].url}")
            measured = measure(one, targets[side], tokenizer, settle_s)
            measured.fields["compare"] = {"pair": pair, "side": side}
            found[side].append(measured.fields)
            save(one, measured, path)
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
        if not isinstance(line, dict) or not {"request_throughput", "sent", "completed"} <= line.keys():
            raise BenchError(f"{path} line {number}: not a result of bench serving", exit_code=2)
        if not isinstance(line.get("config"), dict):
            raise BenchError(f"{path} line {number}: does not tell its configuration", exit_code=2)
        lines.append(line)
    if not lines:
        raise BenchError(f"{path}: no results", exit_code=2)
    return lines


def _refuse_load_options(args: argparse.Namespace) -> None:
    """Options of a load mean nothing to results that are there already."""
    plain = argparse.ArgumentParser()
    serving_args.add_arguments(plain)
    for name, default in vars(plain.parse_args([])).items():
        if name != "plot" and getattr(args, name) != default:
            raise BenchError(f"--{name.replace('_', '-')} has no meaning with two files", exit_code=2)


def _fields(ratio: Ratio) -> dict[str, Any]:
    return {"a": ratio.mean_a, "b": ratio.mean_b, "ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
