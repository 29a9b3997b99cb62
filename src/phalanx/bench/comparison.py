"""Two sets of results side by side: the ratios B/A of each workload, and what a reader must know of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.bench.errors import BenchError
from phalanx.bench.stats import Ratio, paired_ratio, unpaired_ratio
from phalanx.bench.terminal_plot import intervals
from phalanx.bench.workload import (
    SUBJECT_OPTIONS,
    Line,
    Workload,
    group_by_workload,
    nearest_difference,
)

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides of one workload.

    Attributes:
        workload: what both were asked.
        ratios: B/A by metric; without those that a run did not measure.
        notes: what a reader must know: failures, what was left out and why, different models.
    """

    workload: Workload
    ratios: dict[str, Ratio]
    notes: list[str]


def compare_lines(a: Sequence[Line], b: Sequence[Line], say: Callable[[str], None]) -> list[Comparison]:
    """Compare each workload that both sides have; `say` what only one has, and in what it differs.

    Pairs of `measure_pairs` are compared as pairs, everything else as independent repeats.

    Raises:
        BenchError: exit code 2; they have no workload in common, or one side mixes servers.
    """
    left, right = group_by_workload(a), group_by_workload(b)
    others = {workload.key: lines for workload, lines in right}
    common = [(workload, lines, others[workload.key]) for workload, lines in left if workload.key in others]
    if not common:
        pairs = [nearest_difference(workload, [other for other, _ in right]) for workload, _ in left]
        raise BenchError(
            f"the two sides have no workload in common; the nearest differ in {min(pairs, key=len)}",
            exit_code=2,
        )
    keys = {workload.key for workload, _, _ in common}
    for name, own, theirs in (("A", left, right), ("B", right, left)):
        for workload, _ in own:
            if workload.key not in keys:
                difference = nearest_difference(workload, [other for other, _ in theirs])
                say(f"Only in {name}: {workload.describe()} (against the nearest: {difference})")
    return [_compare(*one) for one in common]


def _compare(workload: Workload, left: list[Line], right: list[Line]) -> Comparison:
    notes = _subject_notes(left, right)
    for name, lines in (("A", left), ("B", right)):
        notes += _failure_notes(name, lines)
    pairs = _pairs(left), _pairs(right)
    paired = pairs[0] is not None and pairs[0] == pairs[1]
    if paired:
        left, right = (sorted(lines, key=lambda line: line["compare"]["pair"]) for lines in (left, right))
        both = [(x, y) for x, y in zip(left, right, strict=True) if x["completed"] and y["completed"]]
        left, right = [x for x, _ in both], [y for _, y in both]
    else:
        left, right = ([line for line in lines if line["completed"]] for lines in (left, right))
    if not left or not right:
        return Comparison(workload, {}, [*notes, "nothing to compare: no successful run on each side"])
    ratios: dict[str, Ratio] = {}
    left_out: dict[str, list[str]] = {}
    for metric in METRICS:
        x, y = ([_value(line, metric) for line in lines] for lines in (left, right))
        # What a run did not measure, or is zero, has no ratio.
        if all(value is not None and value > 0 for value in [*x, *y]):
            ratios[metric] = paired_ratio(x, y) if paired else unpaired_ratio(x, y)
        else:
            lacking = [sum(not value for value in values) for values in (x, y)]
            where = f"{lacking[0]} of {len(x)} runs of A, {lacking[1]} of {len(y)} of B"
            left_out.setdefault(where, []).append(metric)
    notes += [f"not measured in {where}: {', '.join(names)}" for where, names in left_out.items()]
    return Comparison(workload, ratios, notes)


def format_comparison(comparison: Comparison) -> str:
    """Return a table (means, B/A, its interval, a star where that leaves 1 out) and the notes."""
    lines = [comparison.workload.describe()]
    if comparison.ratios:
        lines.append(f"{'metric':<26} {'A':>12} {'B':>12} {'B/A':>8}   95% interval")
    for name, r in comparison.ratios.items():
        interval = (
            "too few runs" if r.low is None else f"{r.low:.3f} - {r.high:.3f}{' *' if r.differs else ''}"
        )
        lines.append(f"{name:<26} {r.mean_a:>12.2f} {r.mean_b:>12.2f} {r.ratio:>8.3f}   {interval}")
    return "\n".join([*lines, *(f"  {note}" for note in comparison.notes)])


def plot_ratios(comparison: Comparison) -> str:
    """Return the ratios and their intervals as a small plot."""
    rows = [(name, r.ratio, r.low, r.high) for name, r in comparison.ratios.items()]
    return intervals(rows, "B/A, logarithmic")


def _subject_notes(left: list[Line], right: list[Line]) -> list[str]:
    """Each side measured one thing (`group_by_workload` sees to it), but not necessarily the same."""
    values = {name: (left[0]["config"].get(name), right[0]["config"].get(name)) for name in SUBJECT_OPTIONS}
    return [f"{name}: A {one}, B {other}" for name, (one, other) in values.items() if one != other]


def _failure_notes(name: str, lines: list[Line]) -> list[str]:
    sent, failed = (sum(line.get(field, 0) for line in lines) for field in ("sent", "failed"))
    if not failed:
        return []
    causes = Counter[str]()
    for line in lines:
        causes.update(line.get("failures", {}))
    shown = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
    notes = [f"{name}: {failed} of {sent} requests failed: {shown}"]
    if lost := sum(not line["completed"] for line in lines):
        notes.append(f"{name}: no request succeeded in {lost} of {len(lines)} runs, which are left out")
    return notes


def _pairs(lines: Sequence[Line]) -> list[int] | None:
    if any("compare" not in line for line in lines):
        return None
    pairs = [line["compare"]["pair"] for line in lines]
    return sorted(pairs) if len(set(pairs)) == len(pairs) else None


def _value(line: Line, metric: str) -> Any:
    if metric == "steady_output_throughput":
        return (line.get("steady_state") or {}).get("output_tokens_per_s")
    return line.get(metric)
