"""Was it the client? CPU share and event-loop lag of each client process, and a measured verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.bench.client import ProcessLoad

# A process that is busy for more of a core than this has no room left for bursts.
MAX_CPU_SHARE = 0.8
# A time stamp of every hundredth tick is late by this or more: as long as a decode step of a small model.
MAX_LAG_P99_MS = 25.0


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """One client process.

    Attributes:
        num_requests, num_connections, num_pieces, num_bytes: what it sent and received.
        num_resent: requests sent again on a new connection.
        cpu_s: CPU seconds in the run.
        cpu_share: CPU seconds per second in the window that was judged; None when it had no ticks there.
        lag_p50_ms, lag_p99_ms, lag_max_ms: event-loop lag in the whole run, None without ticks.
        window_lag_p99_ms: the same in the window that was judged.
    """

    num_requests: int
    num_connections: int
    num_pieces: int
    num_bytes: int
    num_resent: int
    cpu_s: float
    cpu_share: float | None
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    lag_max_ms: float | None
    window_lag_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """All client processes of a run.

    Attributes:
        processes: one entry each.
        bottleneck: what shows that the client limited the run, or None.
    """

    processes: list[ProcessFigures]
    bottleneck: str | None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes."""
        return sum(process.cpu_s for process in self.processes)

    @property
    def num_connections(self) -> int:
        """Connections opened by all processes."""
        return sum(process.num_connections for process in self.processes)

    @property
    def num_resent(self) -> int:
        """Requests that all processes sent again, since the server had closed the kept-alive connection."""
        return sum(process.num_resent for process in self.processes)

    def worst(self, name: str) -> float | None:
        """Return the largest value of a field over the processes, None where none has it."""
        values = [getattr(process, name) for process in self.processes]
        return max((value for value in values if value is not None), default=None)


def judge_client(processes: Sequence[ProcessLoad], window: tuple[float, float]) -> ClientLoad:
    """Compute each process's figures and say whether one of them was the bottleneck.

    The rule: in the window (the steady state where there is one, else the whole run), a process used more
    than 80% of a core, or the 99th percentile of its event loop's lag reached 25 ms.

    Args:
        processes: what each spent.
        window: `time.perf_counter` seconds, begin and end.
    """
    figures = [_figures(process, window) for process in processes]
    causes = []
    for number, process in enumerate(figures):
        if process.cpu_share is not None and process.cpu_share > MAX_CPU_SHARE:
            causes.append(f"process {number} used {100 * process.cpu_share:.0f}% of a core")
        if process.window_lag_p99_ms is not None and process.window_lag_p99_ms >= MAX_LAG_P99_MS:
            causes.append(f"process {number}: event-loop lag P99 {process.window_lag_p99_ms:.0f} ms")
    return ClientLoad(figures, "; ".join(causes) or None)


def _figures(process: ProcessLoad, window: tuple[float, float]) -> ProcessFigures:
    times, lags, cpu = process.ticks.T
    inside = (times >= window[0]) & (times <= window[1])
    share = None
    if np.count_nonzero(inside) >= 2:
        span = np.ptp(times[inside])
        share = float(np.ptp(cpu[inside]) / span) if span > 0 else None
    return ProcessFigures(
        process.num_requests,
        process.num_connections,
        process.num_pieces,
        process.num_bytes,
        process.num_resent,
        process.cpu_s,
        share,
        _percentile_ms(lags, 50),
        _percentile_ms(lags, 99),
        _percentile_ms(lags, 100),
        _percentile_ms(lags[inside], 99),
    )


def _percentile_ms(seconds: np.ndarray, percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if len(seconds) else None
