"""Summary of a set of measured values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of `count` values (latencies in ms, or rates); every figure is None when there are none."""

    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of_seconds(cls, values: np.ndarray) -> Distribution:
        """Summarise [count] float64 seconds, in ms."""
        return cls.of(np.asarray(values, np.float64) * 1e3)

    @classmethod
    def of(cls, values: np.ndarray) -> Distribution:
        """Summarise [count] numbers in their own unit."""
        if not len(values):
            return cls(0)
        values = np.asarray(values, np.float64)
        p50, p90, p95, p99 = np.percentile(values, _PERCENTILES).tolist()
        least, most = float(values.min()), float(values.max())
        return cls(len(values), float(values.mean()), float(values.std()), least, p50, p90, p95, p99, most)
