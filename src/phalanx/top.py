"""Watch a server in the terminal: what runs and waits, tokens per second, step time, latencies, its workers.

Reads GET /metrics; the figures are explained in docs/metrics.md.
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from typing import TYPE_CHECKING

from phalanx.core.errors import ConfigError
from phalanx.top_figures import Figures, Quantiles, Scrape, figures

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_WINDOW_S = 10.0
_TIMEOUT_S = 8.0  # the server itself waits up to five seconds for its engine
_BAR = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phalanx top`."""
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server is")
    parser.add_argument("--api-key", help="the server's key, if it wants one (or $PHALANX_API_KEY)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two frames")
    parser.add_argument("--once", action="store_true", help="print one frame, of one interval, and exit")


def run(args: argparse.Namespace) -> int:
    """Show frames until Ctrl-C, or one.

    Raises:
        ConfigError: there is no such server, it wants a key, or it has no metrics.
    """
    if not 0.1 <= args.interval < math.inf:
        raise ConfigError(f"--interval must be 0.1 or more, got {args.interval}")
    url = args.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {args.url!r}")
    key = args.api_key or os.environ.get("PHALANX_API_KEY")
    first = scrape(url, key)
    if args.once:
        from rich.console import Console

        time.sleep(args.interval)
        Console().print(frame(url, figures(scrape(url, key), first, first), args.interval))
        return 0
    try:
        _watch(url, key, first, args.interval)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


def _watch(url: str, key: str | None, first: Scrape, interval_s: float) -> None:
    from rich.live import Live

    kept = deque([first])  # the first of them is where the window begins
    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            time.sleep(interval_s)
            before = kept[-1]
            try:
                now = scrape(url, key)
            except ConfigError as error:
                live.update(
                    f"[red]{error}[/red]\nlast answer {time.monotonic() - before.at_s:.0f} s ago",
                    refresh=True,
                )
                continue
            kept.append(now)
            while len(kept) > 2 and now.at_s - kept[1].at_s >= _WINDOW_S:
                kept.popleft()
            live.update(frame(url, figures(now, before, kept[0]), now.at_s - kept[0].at_s), refresh=True)


def scrape(url: str, key: str | None) -> Scrape:
    """Ask once.

    Raises:
        ConfigError: one line that says why there is no answer.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            text = reply.read().decode()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ConfigError(f"{url} wants a key: give --api-key or set PHALANX_API_KEY") from error
        raise ConfigError(f"{url}/metrics answered {error.code}: is this a Phalanx server?") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no server answers at {url}: {reason}") from error
    found = Scrape(text, time.monotonic())
    if found.get("phalanx:engine_up") is None and found.get("sglang:num_running_reqs") is None:
        raise ConfigError(f"{url}/metrics tells nothing that is known: is this a Phalanx server?")
    if found.get("phalanx:engine_up") == 0:
        found.is_healthy = _is_healthy(url)
    return found


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_TIMEOUT_S) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def frame(url: str, shown: Figures, window_s: float) -> RenderableType:
    """One frame. window_s: the time that the quantiles are of."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.text import Text

    title = Text(f"{shown.model}", style="bold")
    title.append(f"  {url}  ", style="dim")
    title.append(*_state(shown))
    parts: list[RenderableType] = [title, Columns([_load(shown), _steps(shown)], padding=(0, 4))]
    parts.append(Columns([_latencies(shown, window_s), _workers(shown)], padding=(0, 4)))
    troubles = [f"{cause} {count:.0f}" for cause, count in shown.causes.items()]
    line = f"aborted: {', '.join(troubles) or 'none'}    HTTP errors: {shown.errors:.0f}"
    return Group(*parts, Text(line, style="dim"))


def _state(shown: Figures) -> tuple[str, str]:
    """(what the engine is about, style)."""
    if shown.in_a_step:
        return "the engine is in a long step; its figures come after it", "yellow"
    if not shown.engine_up:
        return "the engine does not answer", "bold red"
    return ("paused", "bold red") if shown.paused else ("up", "green")


def _load(shown: Figures) -> Table:
    table = _table("load", "", "")
    table.add_row("running", _count(shown.running), _bar(shown.running, shown.max_running))
    table.add_row("queued", _count(shown.queued), "")
    table.add_row("KV tokens", _count(shown.used_tokens), _bar(shown.used_tokens, shown.max_tokens))
    table.add_row("tokens/s out", _count(shown.tokens_out), "")
    table.add_row("tokens/s in", _count(shown.tokens_in), "")
    table.add_row("requests/s", _count(shown.requests, 1), "")
    return table


def _steps(shown: Figures) -> Table:
    table = _table("steps", "mean", "P99")
    table.add_row("step time", _time(shown.step_s), _time(shown.step.p99_s))
    table.add_row("host, between steps", _time(shown.between_steps_s), _time(shown.between_steps.p99_s))
    table.add_row("steps/s", _count(shown.steps, 1), "")
    table.add_row("rows a step", _count(shown.rows_per_step, 1), "")
    idle = None if shown.idle_share is None else min(shown.idle_share, 1.0) * 100
    table.add_row("device idle, at most", "-" if idle is None else f"{idle:.1f} %", "")
    return table


def _latencies(shown: Figures, window_s: float) -> Table:
    table = _table(f"latencies, last {window_s:.0f} s", "P50", "P99", "count")
    for title, values in shown.latencies.items():
        table.add_row(title, _time(values.p50_s), _time(values.p99_s), _count(values.count))
    return table


def _workers(shown: Figures) -> Table:
    table = _table("API workers", "streams", "lag P50", "lag P99")
    for number, streams, lag in shown.workers:
        table.add_row(number, _count(streams), *_lags(lag))
    return table


def _lags(lag: Quantiles) -> tuple[str, str]:
    return _time(lag.p50_s), _time(lag.p99_s)


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column(title, style="cyan", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _bar(part: float | None, whole: float | None) -> str:
    if part is None or not whole:
        return ""
    share = min(part / whole, 1.0)
    filled = round(share * _BAR)
    return f"{'━' * filled}{'╌' * (_BAR - filled)} {share * 100:5.1f} %"


def _count(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _time(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    return f"{value_s * 1e3:.1f} ms" if value_s < 1.0 else f"{value_s:.2f} s"
