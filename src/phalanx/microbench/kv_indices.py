"""The KV-index backends beside a memcpy of the same bytes.

Device time is taken inside a CUDA graph of many calls over several input sets, so that neither launch gaps
nor what the last call left in the L2 cache count; host time is what one call takes until it returns. The loop
and the torch backend read lengths on the host and cannot be captured: their device column is events around
single calls and carries a *. Every result is compared with the loop's before anything is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from phalanx.core.errors import ConfigError
from phalanx.microbench.kv_problems import (
    NUM_SETS,
    SHORT,
    contenders,
    events_us,
    graph_us,
    host_us,
    make_problem,
    verify,
)

LENS = ("full", "uniform", "short")
UNCAPTURABLE = ("naive", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phalanx bench kv-indices`."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    parser.add_argument("--batch", type=int, nargs="+", default=[4096], help="running requests")
    parser.add_argument("--context", type=int, nargs="+", default=[4096], help="columns of the table")
    parser.add_argument(
        "--lens",
        choices=LENS,
        nargs="+",
        default=list(LENS),
        help=f"row lengths; short is {SHORT[0]}-{SHORT[1]} tokens",
    )
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20, help="timed repeats; the median is reported")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of torch; more than the idle cores mislead"
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="also draw the times (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print a table and one JSON line. Raises ConfigError for what cannot be measured."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _check(args, device)
    torch.set_num_threads(args.threads)
    results = [
        measure(batch, context, lens, args.page_size, device, repeats=args.repeats, seed=args.seed)
        for batch in args.batch
        for context in args.context
        for lens in args.lens
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {args.threads} threads"
    _print_table(results, name)
    if args.plot:
        draw(results, name, args.plot)
    print(json.dumps({"benchmark": "kv-indices", "device": name, "results": results}))
    return 0


def measure(
    batch: int, context: int, lens: str, page_size: int, device: torch.device, *, repeats: int, seed: int
) -> dict[str, Any]:
    """Check and time every contender on one shape.

    Returns:
        {batch, context, lens, page_size, entries, backends: {name: {device_us, host_us}}}; device_us is None
        on a CPU. Raises RuntimeError if a backend's result is wrong.
    """
    cuda = device.type == "cuda"
    problems = [
        make_problem(batch, context, lens, page_size, device, seed + index)
        for index in range(NUM_SETS if cuda else 1)
    ]
    backends = {}
    for name, call in contenders(device).items():
        for problem in problems:
            verify(name, call, problem)
        clock = events_us if name in UNCAPTURABLE else graph_us
        backends[name] = {
            "device_us": round(clock(call, problems, repeats), 2) if cuda else None,
            "host_us": round(host_us(call, problems, repeats), 1),
        }
    return {
        "batch": batch,
        "context": context,
        "lens": lens,
        "page_size": page_size,
        "entries": problems[0].entries,
        "backends": backends,
    }


def draw(results: list[dict[str, Any]], device_name: str, path: Path) -> None:
    """Grouped bars on a log scale: device time on a GPU, host time on a CPU."""
    import matplotlib.pyplot as plt

    names = list(results[0]["backends"])
    figure, axes = plt.subplots(figsize=(2 + 2.5 * len(results), 4.5), layout="constrained")
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [_time(result["backends"][name]) for result in results]
        places = [group + (index - (len(names) - 1) / 2) * width for group in range(len(results))]
        bars = axes.bar(places, heights, width, label=name)
        axes.bar_label(bars, fmt="{:.3g}", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("microseconds per call")
    axes.set_xticks(range(len(results)), [f"{r['batch']} x {r['context']}\n{r['lens']}" for r in results])
    axes.set_title(f"kv_indices on {device_name}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _time(entry: dict[str, Any]) -> float:
    return float(entry["host_us"] if entry["device_us"] is None else entry["device_us"])


def _print_table(results: list[dict[str, Any]], device_name: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"kv_indices on {device_name}")
    for heading in ("batch", "context", "lens", "entries", "backend"):
        table.add_column(heading)
    for heading in ("device us", "x memcpy", "host us per call"):
        table.add_column(heading, justify="right")
    for result in results:
        shape = [f"{result[key]:,}" for key in ("batch", "context")] + [result["lens"]]
        copied = _time(result["backends"]["memcpy"])
        for name, entry in result["backends"].items():
            star = "*" if name in UNCAPTURABLE else ""
            device = "" if entry["device_us"] is None else f"{entry['device_us']:,.2f}{star}"
            ratio = f"{_time(entry) / copied:,.2f}"
            table.add_row(*shape, f"{result['entries']:,}", name, device, ratio, f"{entry['host_us']:,.1f}")
        table.add_section()
    Console(width=110).print(table)


def _check(args: argparse.Namespace, device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no CUDA device")
    for flag, values in (("--batch", args.batch), ("--context", args.context)):
        if min(values) < 1:
            raise ConfigError(f"{flag} must be at least 1, got {min(values)}")
    for flag, value in (("--page-size", args.page_size), ("--repeats", args.repeats)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    if args.plot and not args.plot.absolute().parent.is_dir():
        raise ConfigError(f"--plot: {args.plot.absolute().parent} is not a folder")
