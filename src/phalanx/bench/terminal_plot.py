"""A run as a few rows of block characters. Charts to keep are in `report_page`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60
_HEIGHT = 4


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
