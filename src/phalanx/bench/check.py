"""The last gate before a result is shown: figures that no run can produce are refused, not printed."""

from __future__ import annotations

import itertools
import math

from phalanx.bench.distribution import Distribution
from phalanx.bench.errors import BenchError
from phalanx.bench.metrics import Metrics

# Percentiles of equal values may differ by rounding in the last place; a millionth of a ms is no disorder.
_TOLERANCE_MS = 1e-6


def check_possible(metrics: Metrics) -> None:
    """Refuse figures that contradict each other.

    For every latency: min <= P50 <= P90 <= P95 <= P99 <= max, min <= mean <= max, none negative or infinite.
    No TTFT is above the longest E2E latency; where all requests have a TTFT, no percentile and no mean of it
    is above that of the E2E latency, since each request's is not. Requests add up.

    Raises:
        BenchError: naming the figures.
    """
    for name in ("e2e", "ttft", "tpot", "itl", "schedule_delay", "slot_wait", "in_flight", "output_rate"):
        _check_order(name, getattr(metrics, name))
    _check_ttft(metrics.ttft, metrics.e2e)
    if metrics.num_completed + sum(metrics.failures.values()) != metrics.num_sent:
        _refuse(
            f"{metrics.num_completed} completed and {metrics.failures} do not add up to {metrics.num_sent}"
        )


def _check_ttft(ttft: Distribution, e2e: Distribution) -> None:
    names = ["p99", "max"]
    pairs = [(name, getattr(ttft, name), e2e.max) for name in names]
    if ttft.count == e2e.count:
        pairs += [
            (n, getattr(ttft, n), getattr(e2e, n)) for n in ("min", "mean", "p50", "p90", "p95", *names)
        ]
    for name, first, whole in pairs:
        if first is not None and (whole is None or first > whole + _TOLERANCE_MS):
            _refuse(f"{name.upper()} TTFT {first} ms above the E2E latency of {whole} ms")


def _check_order(name: str, d: Distribution) -> None:
    if not d.count:
        return
    steps = [d.min, d.p50, d.p90, d.p95, d.p99, d.max]
    values = [math.nan if value is None else value for value in steps]
    mean = math.nan if d.mean is None else d.mean
    if not all(math.isfinite(value) for value in [*values, mean]):
        _refuse(f"{name}: not finite: {steps}, mean {d.mean} ms")
    if any(low > high + _TOLERANCE_MS for low, high in itertools.pairwise(values)):
        _refuse(f"{name}: min, P50, P90, P95, P99, max out of order: {steps} ms")
    if not values[0] - _TOLERANCE_MS <= mean <= values[-1] + _TOLERANCE_MS:
        _refuse(f"{name}: mean {mean} ms outside [{values[0]}, {values[-1]}]")
    if values[0] < -_TOLERANCE_MS:
        _refuse(f"{name}: a negative time, {values[0]} ms")


def _refuse(what: str) -> None:
    raise BenchError(f"refusing to print an impossible result: {what}")
