"""Charts of one or more runs as SVG text, drawn by matplotlib (the `plot` extra)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Line = dict[str, Any]

_SIZE = (9.0, 3.6)
_STYLE: Any = {
    # Text stays text: small files, and a page that can be searched.
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
# More runs than this in one chart cannot be told apart.
_MAX_CURVES = 12


def draw_all(lines: Sequence[Line], labels: Sequence[str]) -> list[tuple[str, str]]:
    """Return (title, SVG element) of every chart that the runs have data for.

    Args:
        lines: JSON lines of runs, with `series` and `quantiles_ms`.
        labels: a short name for each.
    """
    charts: list[tuple[str, Callable[[Any], None]]] = []
    if len(lines) > 1:
        charts.append(("Throughput against latency", lambda figure: _tradeoff(figure, lines)))
    charts.append(("Percentiles", lambda figure: _percentiles(figure, lines, labels)))
    charts.append(("Distribution of TTFT and ITL", lambda figure: _distributions(figure, lines, labels)))
    charts.append(
        ("Output tokens per second, and requests in flight", lambda f: _over_time(f, lines, labels))
    )
    if any(line.get("server_metrics") for line in lines):
        charts.append(
            ("Running and queued requests, as the server tells", lambda f: _queues(f, lines, labels))
        )
    return [(title, _svg(f"chart{number}", draw)) for number, (title, draw) in enumerate(charts)]


def _svg(salt: str, draw: Callable[[Any], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    # A salt per chart: ids inside the SVGs of one page must not meet.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _legend(axis: Any) -> None:
    """A legend, unless nothing was drawn (no run had a success)."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def _from_zero(axis: Any) -> None:
    """Let the vertical axis begin at 0: a cut axis makes small differences look large."""
    top = float(axis.dataLim.y1)
    axis.set_ylim(0, 1.08 * top if top > 0 else 1)


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](i / max(count - 1, 1) * 0.9) for i in range(count)]


def _tradeoff(figure: Any, lines: Sequence[Line]) -> None:
    """A curve through the medians of each point's repeats."""
    for axis, (name, title) in zip(figure.subplots(1, 2), (("ttft", "TTFT"), ("itl", "ITL")), strict=True):
        for figure_name, style in (("median", "o-"), ("p99", "s--")):
            points = tradeoff_points(lines, f"{figure_name}_{name}_ms")
            (curve,) = axis.plot(
                [np.median(p[1]) for p in points],
                [np.median(p[2]) for p in points],
                style,
                ms=4,
                label=f"{title} {figure_name}",
            )
            for value, throughputs, latencies in points:
                # The repeats of a point, around their median.
                axis.plot(throughputs, latencies, ".", ms=3, alpha=0.5, color=curve.get_color())
                if figure_name == "median":
                    place = (float(np.median(throughputs)), float(np.median(latencies)))
                    axis.annotate(f"{value:g}", place, textcoords="offset points", xytext=(4, 4), fontsize=7)
        axis.set(xlabel="output tokens/s", ylabel=f"{title} (ms)")
        _from_zero(axis)
        _legend(axis)


def tradeoff_points(lines: Sequence[Line], field: str) -> list[tuple[float, list[float], list[float]]]:
    """Return (swept value, output tokens/s of its repeats, `field` of its repeats), by rising value.

    Runs that did not measure `field` are left out.
    """
    found: dict[float, tuple[list[float], list[float]]] = {}
    for line in lines:
        if line[field] is not None:
            throughputs, latencies = found.setdefault(line["sweep"]["value"], ([], []))
            throughputs.append(line["output_throughput"])
            latencies.append(line[field])
    return [(value, *found[value]) for value in sorted(found)]


def _percentiles(figure: Any, lines: Sequence[Line], labels: Sequence[str]) -> None:
    names = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e_latency", "E2E latency"))
    for axis, (name, title) in zip(figure.subplots(1, 4), names, strict=True):
        for which, label in (("median", "P50"), ("p90", "P90"), ("p95", "P95"), ("p99", "P99")):
            values = [line[f"{which}_{name}_ms"] for line in lines]
            axis.plot(
                range(len(lines)), [float("nan") if v is None else v for v in values], "o-", ms=3, label=label
            )
        axis.set_xticks(range(len(lines)), labels, rotation=60, fontsize=7)
        axis.set_title(f"{title} (ms)", fontsize=9)
        _from_zero(axis)
    _legend(axis)


def _distributions(figure: Any, lines: Sequence[Line], labels: Sequence[str]) -> None:
    shown = list(zip(lines, labels, strict=True))[:_MAX_CURVES]
    for axis, (name, title) in zip(figure.subplots(1, 2), (("ttft", "TTFT"), ("itl", "ITL")), strict=True):
        for (line, label), color in zip(shown, _colors(len(shown)), strict=True):
            values = line["quantiles_ms"][name]
            if values:
                axis.plot(values, range(101), color=color, label=label, lw=1.2)
        axis.set(xlabel=f"{title} (ms)", ylabel="% of values at or below", ylim=(0, 101))
    _legend(axis)


def _over_time(figure: Any, lines: Sequence[Line], labels: Sequence[str]) -> None:
    shown = list(zip(lines, labels, strict=True))[:_MAX_CURVES]
    names = (("output_tokens_per_s", "output tokens/s"), ("in_flight", "requests in flight"))
    for axis, (name, title) in zip(figure.subplots(1, 2), names, strict=True):
        for (line, label), color in zip(shown, _colors(len(shown)), strict=True):
            axis.plot(line["series"]["t_s"], line["series"][name], color=color, label=label, lw=1.0)
            if len(shown) == 1 and line["steady_state"]:
                window = line["steady_state"]
                axis.axvspan(window["begin_s"], window["end_s"], alpha=0.1, label="steady state")
        axis.set(xlabel="s from the start of the run", ylabel=title)
        _from_zero(axis)
    _legend(axis)


def _queues(figure: Any, lines: Sequence[Line], labels: Sequence[str]) -> None:
    shown = [(line, label) for line, label in zip(lines, labels, strict=True) if line.get("server_metrics")]
    shown = shown[:_MAX_CURVES]
    for axis, name in zip(figure.subplots(1, 2), ("running", "queued"), strict=True):
        for (line, label), color in zip(shown, _colors(len(shown)), strict=True):
            axis.plot(
                line["server_metrics"]["t_s"], line["server_metrics"][name], ".-", color=color, label=label
            )
        axis.set(xlabel="s from the start of the run", ylabel=f"{name} requests")
        _from_zero(axis)
    _legend(axis)
