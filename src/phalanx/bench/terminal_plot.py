"""Plots of plain characters for the terminal. Charts to keep are in `report_page`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60
_HEIGHT = 4
_SCATTER_HEIGHT = 12
_MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def plot_run(series: dict[str, list[float]]) -> str:
    """Return output tokens/s and requests in flight over time, 60 columns wide."""
    if not series["t_s"]:
        return "nothing to plot"
    end = f"{series['t_s'][-1]:.1f} s"
    parts = []
    for name, title in (("output_tokens_per_s", "output tok/s"), ("in_flight", "requests in flight")):
        parts.append(area(series[name], title))
        parts.append(f"{'':>10} 0 s{end:>{_WIDTH - 3}}")
    return "\n".join(parts)


def area(values: Sequence[float], title: str) -> str:
    """Return `values`, averaged into 60 columns, as an area of 4 lines; the scale starts at 0."""
    columns = [
        part.mean() for part in np.array_split(np.asarray(values, np.float64), min(_WIDTH, len(values)))
    ]
    top = max(columns)
    filled = [0.0 if top <= 0 else column / top * _HEIGHT for column in columns]
    lines = [title]
    for row in reversed(range(_HEIGHT)):
        label = f"{top:>10.0f}" if row == _HEIGHT - 1 else f"{0:>10}" if row == 0 else " " * 10
        cells = "".join(_BLOCKS[round(min(max(level - row, 0.0), 1.0) * 8)] for level in filled)
        # Fewer values than columns: wider columns.
        wide = "".join(cell * max(1, _WIDTH // len(columns)) for cell in cells)
        lines.append(f"{label} {wide}")
    return "\n".join(lines)


def scatter(points: Sequence[tuple[float, float, str]], x_title: str, y_title: str) -> str:
    """Return points as letters, one letter per label, on axes that start at 0; where two meet, a star.

    Args:
        points: (x, y, label), none below 0.
        x_title, y_title: names of the axes with their units.
    """
    if not points:
        return f"{y_title}: nothing to plot"
    labels = list(dict.fromkeys(label for _, _, label in points))
    x_top, y_top = max(x for x, _, _ in points) or 1.0, max(y for _, y, _ in points) or 1.0
    cells = [[" "] * _WIDTH for _ in range(_SCATTER_HEIGHT)]
    for x, y, label in points:
        row = _SCATTER_HEIGHT - 1 - round(y / y_top * (_SCATTER_HEIGHT - 1))
        column = round(x / x_top * (_WIDTH - 1))
        mark = _MARKS[labels.index(label) % len(_MARKS)]
        cells[row][column] = mark if cells[row][column] in (" ", mark) else "*"
    ends = {0: f"{y_top:>10.4g}", _SCATTER_HEIGHT - 1: f"{0:>10}"}
    lines = [y_title, *(f"{ends.get(row, ''):>10} |{''.join(cell)}" for row, cell in enumerate(cells))]
    lines.append(f"{'':>10} +{'-' * _WIDTH}")
    lines.append(f"{'':>12}0{x_title:^{_WIDTH - 12}}{x_top:>11.4g}")
    legend = (f"{_MARKS[i % len(_MARKS)]} {label}" for i, label in enumerate(labels))
    lines.append(f"{'':>12}{'  '.join(legend)}")
    return "\n".join(line.rstrip() for line in lines)


def intervals(rows: Sequence[tuple[str, float, float | None, float | None]], title: str) -> str:
    """Return ratios on a logarithmic axis: `o`, its interval where it has one, and a bar at 1.

    Args:
        rows: (name, ratio, low, high), all above 0.
        title: a heading.
    """
    if not rows:
        return f"{title}: nothing to plot"
    values = [1.0, *(value for row in rows for value in row[1:] if isinstance(value, float))]
    low, high = np.log(min(values)), np.log(max(values))
    span = max(float(high - low), 1e-9)

    def column(value: float) -> int:
        return round(float(np.log(value) - low) / span * (_WIDTH - 1))

    lines = [title]
    for name, ratio, least, most in rows:
        cells = [" "] * _WIDTH
        if least is not None and most is not None:
            first, last = column(least), column(most)
            cells[first : last + 1] = "-" * (last + 1 - first)
        cells[column(1.0)] = "|"
        cells[column(ratio)] = "o"
        lines.append(f"{name:<26} {''.join(cells)}")
    ends = f"{min(values):<10.3g}{'1 = |':^{_WIDTH - 20}}{max(values):>10.3g}"
    return "\n".join(line.rstrip() for line in [*lines, f"{'':<26} {ends}"])
