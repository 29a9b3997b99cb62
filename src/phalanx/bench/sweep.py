"""Run a list of rates or concurrencies, find the knee, write one page with charts.

Every point and repeat has prompts of its own (--seed, --seed + 1, ...), so that none finds another's in the
prefix cache.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.bench import args as serving_args
from phalanx.bench.datasets import TokenizerLike
from phalanx.bench.errors import BenchError
from phalanx.bench.knee import Knee, find_knee
from phalanx.bench.report import json_line, require_writable
from phalanx.bench.report_page import require_charts, write_page
from phalanx.bench.run import connect, measure, save, say
from phalanx.bench.settle import check_arguments
from phalanx.bench.terminal_plot import scatter

_ATTAINMENT = 0.99
_COLUMNS = (
    ("req/s", "request_throughput", 1.0),
    ("out tok/s", "output_throughput", 1.0),
    ("TTFT P50", "median_ttft_ms", 1.0),
    ("TTFT P99", "p99_ttft_ms", 1.0),
    ("TPOT P50", "median_tpot_ms", 1.0),
    ("ITL P99", "p99_itl_ms", 1.0),
    ("E2E P50", "median_e2e_latency_ms", 1.0),
    ("goodput %", "slo_attainment", 100.0),
    ("failed", "failed", 1.0),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench sweep`: those of `bench serving` and its own."""
    group = parser.add_argument_group("sweep")
    points = group.add_mutually_exclusive_group(required=True)
    points.add_argument("--rates", nargs="+", type=float, metavar="R", help="request rates, requests/s")
    points.add_argument(
        "--concurrencies", nargs="+", type=int, metavar="N", help="values of --max-concurrency"
    )
    group.add_argument("--repeats", type=int, default=1, help="runs of each point (default: 1)")
    group.add_argument("--report", default="report.html", help="page to write (default: %(default)s)")
    group.add_argument(
        "--knee-attainment",
        type=float,
        help=f"share of requests that must meet --goodput (default: {_ATTAINMENT})",
    )
    serving_args.add_arguments(parser)


def run(
    args: argparse.Namespace, load_tokenizer: Callable[[str], TokenizerLike], settle_s: float = 1.0
) -> int:
    """Run the sweep. A summary and one JSON line go to stdout, each run's JSON line to --output-file.

    Returns:
        Exit code: 0, or 1 when a run had no successful request.

    Raises:
        BenchError: with the exit code of its kind.
    """
    kind, runs = plan_runs(args)
    require_charts()
    path = args.output_file or f"sweep_{args.backend}_{datetime.now():%m%d_%H%M%S}.jsonl"
    require_writable(path, "--output-file")
    require_writable(args.report, "--report")
    target = connect(runs[0])
    tokenizer = load_tokenizer(args.tokenizer or runs[0].model)
    lines: list[dict[str, Any]] = []
    try:
        for one in runs:
            one.model = runs[0].model
            say(f"{kind} {one.sweep['value']:g}, repeat {one.sweep['repeat'] + 1} of {args.repeats}")
            measured = measure(one, target, tokenizer, settle_s)
            measured.fields["sweep"] = one.sweep
            lines.append(measured.fields)
            save(one, measured, path)
    except BenchError:
        # A server that breaks at one rate: what was measured below it is still worth showing.
        if lines:
            say(f"The sweep ended early, after {len(lines)} of {len(runs)} runs")
            _show(args, kind, lines, path)
        raise
    _show(args, kind, lines, path)
    return 0 if all(line["completed"] for line in lines) else 1


def _show(args: argparse.Namespace, kind: str, lines: list[dict[str, Any]], path: str) -> None:
    """Print the summary, the plot and the JSON line, and write the page."""
    knee = find_knee(lines, _attainment(args))
    print(format_summary(lines, knee))
    if args.plot:
        print(plot_tradeoff(lines))
    summary = {
        "sweep": kind,
        "knee": knee.value,
        "knee_first_bad": knee.first_bad,
        "report": args.report,
        "points": [_point(line) for line in lines],
    }
    print(json_line(summary).decode(), end="", flush=True)
    write_page(args.report, lines, knee)
    say(f"Results appended to {path}, charts written to {args.report}")


def plan_runs(args: argparse.Namespace) -> tuple[str, list[argparse.Namespace]]:
    """Return "rate" or "concurrency", and the checked command line of every run in order.

    Raises:
        BenchError: exit code 2.
    """
    if args.rates is not None:
        kind, dest, values = "rate", "request_rate", args.rates
        if args.request_rate is not None or args.ramp_up_strategy is not None:
            raise BenchError("--rates takes the place of --request-rate and --ramp-up-strategy", exit_code=2)
    else:
        kind, dest, values = "concurrency", "max_concurrency", args.concurrencies
        if args.max_concurrency is not None:
            raise BenchError("--concurrencies takes the place of --max-concurrency", exit_code=2)
    if args.repeats < 1 or not 0.0 < _attainment(args) <= 1.0:
        raise BenchError("--repeats must be at least 1, --knee-attainment in (0, 1]", exit_code=2)
    if args.knee_attainment is not None and not args.goodput:
        raise BenchError("--knee-attainment needs --goodput", exit_code=2)
    if args.output_file and Path(args.output_file).resolve() == Path(args.report).resolve():
        raise BenchError(f"--output-file and --report are both {args.report}", exit_code=2)
    if len(set(values)) < len(values):
        raise BenchError(f"a value is given twice: {values}", exit_code=2)
    runs: list[argparse.Namespace] = []
    for value in sorted(values):
        for repeat in range(args.repeats):
            one = copy.deepcopy(args)
            setattr(one, dest, value)
            one.seed = args.seed + len(runs)
            check_arguments(one)
            one.sweep = {"kind": kind, "value": value, "repeat": repeat}
            runs.append(one)
    return kind, runs


def _attainment(args: argparse.Namespace) -> float:
    return _ATTAINMENT if args.knee_attainment is None else float(args.knee_attainment)


def format_summary(lines: Sequence[dict[str, Any]], knee: Knee) -> str:
    """Return a line per run, in ms unless said otherwise, and the knee."""
    kind = lines[0]["sweep"]["kind"]
    rows = [[kind, *(title for title, _, _ in _COLUMNS), ""]]
    for line in lines:
        cells = [f"{line['sweep']['value']:g}"]
        for _, name, scale in _COLUMNS:
            value = line.get(name)
            cells.append("n/a" if value is None else f"{value * scale:.2f}".removesuffix(".00"))
        rows.append([*cells, "client was the bottleneck" if line["client_bottleneck"] else ""])
    text = ["  ".join(f"{cell:>11}" for cell in row[:-1]) + "  " + row[-1] for row in rows]
    text.append(knee.describe(kind))
    return "\n".join(part.rstrip() for part in text)


def plot_tradeoff(lines: Sequence[dict[str, Any]]) -> str:
    """Return two small plots of throughput against latency, a letter for each point of the sweep."""
    plots = []
    for field, title in (("median_ttft_ms", "median TTFT (ms)"), ("median_itl_ms", "median ITL (ms)")):
        points = [
            (line["output_throughput"], line[field], f"{line['sweep']['value']:g}")
            for line in lines
            if line[field] is not None
        ]
        plots.append(scatter(points, "output tok/s", title))
    return "\n".join(plots)


def _point(line: dict[str, Any]) -> dict[str, Any]:
    return {**line["sweep"], **{name: line.get(name) for _, name, _ in _COLUMNS}}
