"""One self-contained HTML page of a sweep: no script, nothing fetched."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from phalanx.bench.charts import draw_all
from phalanx.bench.errors import BenchError
from phalanx.bench.knee import Knee

# Fields shown in the table of runs: (heading, JSON field, unit or "").
_COLUMNS = (
    ("Requests", "completed", ""),
    ("Failed", "failed", ""),
    ("Duration", "duration", "s"),
    ("Requests/s", "request_throughput", ""),
    ("Output tok/s", "output_throughput", ""),
    ("Peak tok/s", "max_output_tokens_per_s", ""),
    ("Concurrency", "concurrency", ""),
    ("TTFT mean", "mean_ttft_ms", "ms"),
    ("P50", "median_ttft_ms", "ms"),
    ("P99", "p99_ttft_ms", "ms"),
    ("TPOT mean", "mean_tpot_ms", "ms"),
    ("P50", "median_tpot_ms", "ms"),
    ("P99", "p99_tpot_ms", "ms"),
    ("ITL mean", "mean_itl_ms", "ms"),
    ("P50", "median_itl_ms", "ms"),
    ("P99", "p99_itl_ms", "ms"),
    ("E2E mean", "mean_e2e_latency_ms", "ms"),
    ("P50", "median_e2e_latency_ms", "ms"),
    ("P99", "p99_e2e_latency_ms", "ms"),
    ("Goodput", "request_goodput", "req/s"),
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CSS = """
body { font: 14px/1.5 sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 12px; } .wide { overflow-x: auto; }
td, th { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.knee { background: #e8f4e8; }
svg { width: 100%; max-width: 60rem; height: auto; } .warn { color: #a00; font-weight: bold; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 12px; }
"""


def require_charts() -> None:
    """Raise BenchError (exit code 2) unless the plotting library is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("the report needs matplotlib: pip install matplotlib", exit_code=2)


def write_page(path: str, lines: Sequence[dict[str, Any]], knee: Knee) -> None:
    """Write the page.

    Args:
        path: file to write.
        lines: JSON lines of the runs, each with its `sweep` point.
        knee: what `find_knee` found.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        Path(path).write_text(render_page(lines, knee), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None


def render_page(lines: Sequence[dict[str, Any]], knee: Knee) -> str:
    """Return the page's HTML; the runs' JSON lines are in it as a data block."""
    kind = lines[0]["sweep"]["kind"]
    labels = [_label(line) for line in lines]
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        # The browser itself keeps the promise that nothing is fetched.
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>Sweep over {kind}</title><style>{_CSS}</style></head><body>",
        f"<h1>Sweep over {kind}: {html.escape(str(lines[0]['config']['model']))}</h1>",
        f'<p id="knee">{html.escape(knee.describe(kind))}</p>',
    ]
    parts += [
        f'<p class="warn">{html.escape(label)}: the client was the bottleneck '
        f"({html.escape(line['client_bottleneck'])})</p>"
        for line, label in zip(lines, labels, strict=True)
        if line["client_bottleneck"]
    ]
    parts.append(_table(lines, labels, knee.value))
    for title, svg in draw_all(lines, labels):
        parts.append(f"<h2>{title}</h2>{svg}")
    parts.append(_host_times(lines, labels))
    parts.append(_failures(lines, labels))
    parts.append(_configuration(lines))
    # "<" is written as an escape, so that no text of a run can end the block.
    data = orjson.dumps(list(lines)).decode().replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="runs">{data}</script></body></html>')
    return "\n".join(parts) + "\n"


def show(value: Any) -> str:
    """Return a figure as the table shows it."""
    if value is None:
        return "n/a"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _label(line: dict[str, Any]) -> str:
    point = line["sweep"]
    return f"{point['value']:g}" + (f" #{point['repeat'] + 1}" if point["repeat"] else "")


def _table(lines: Sequence[dict[str, Any]], labels: Sequence[str], knee: float | None) -> str:
    heads = "".join(f"<th>{name}{f' ({unit})' if unit else ''}</th>" for name, _, unit in _COLUMNS)
    rows = []
    for number, (line, label) in enumerate(zip(lines, labels, strict=True)):
        cells = "".join(
            f'<td data-run="{number}" data-field="{field}">{show(line.get(field))}</td>'
            for _, field, _ in _COLUMNS
        )
        mark = ' class="knee"' if line["sweep"]["value"] == knee else ""
        rows.append(f"<tr{mark}><td>{html.escape(label)}</td>{cells}</tr>")
    kind = lines[0]["sweep"]["kind"]
    return (
        '<h2>Figures</h2><div class="wide"><table id="figures"><thead>'
        f"<tr><th>{kind}</th>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _host_times(lines: Sequence[dict[str, Any]], labels: Sequence[str]) -> str:
    """What the server said of its own steps after each run; nothing where it says nothing."""
    rows = []
    for line, label in zip(lines, labels, strict=True):
        between, backend = line.get("host_time_between_steps_ms"), line.get("kv_indices_backend")
        if between or backend:
            cells = [(between or {}).get("mean"), (between or {}).get("p99"), backend]
            shown = "".join(f"<td>{html.escape(show(cell))}</td>" for cell in cells)
            rows.append(f"<tr><td>{html.escape(label)}</td>{shown}</tr>")
    if not rows:
        return ""
    return (
        '<h2>Host time between steps, as the server tells</h2><table id="host"><thead>'
        "<tr><th>Run</th><th>Mean (ms)</th><th>P99 (ms)</th><th>KV-indices backend</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _failures(lines: Sequence[dict[str, Any]], labels: Sequence[str]) -> str:
    items = [
        f"<li>{html.escape(label)}: {count} x {html.escape(cause)}</li>"
        for line, label in zip(lines, labels, strict=True)
        for cause, count in line["failures"].items()
    ]
    return f"<h2>Failures</h2><ul>{''.join(items)}</ul>" if items else "<h2>Failures</h2><p>None.</p>"


def _configuration(lines: Sequence[dict[str, Any]]) -> str:
    """The first run's settings in full; the others differ in the swept value and the seed."""
    option = orjson.OPT_INDENT_2
    text = orjson.dumps(lines[0]["config"], option=option).decode()
    server = orjson.dumps(lines[0].get("server_info"), option=option).decode()
    return (
        f'<h2>Configuration of the first run</h2><pre id="config">{html.escape(text)}</pre>'
        f"<h2>Server</h2><pre>{html.escape(server)}</pre>"
    )
