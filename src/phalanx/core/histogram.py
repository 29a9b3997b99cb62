"""Histograms of durations with exact counts and sums, in fixed, log-spaced buckets."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_PER_DECADE = 10
_FOLD_AT = 512  # values that wait: folding them takes some 20 us


def log_bounds_s(first: int, last: int) -> npt.NDArray[np.float64]:
    """[n] float64: bucket bounds from 10**first to 10**last seconds, ten a decade."""
    exponents = np.arange(first * _PER_DECADE, last * _PER_DECADE + 1) / _PER_DECADE
    bounds: npt.NDArray[np.float64] = np.round(10.0**exponents, 9)
    return bounds


BOUNDS_S = log_bounds_s(-6, 1)  # of what a step consists of
WAIT_BOUNDS_S = log_bounds_s(-4, 4)  # of what a client waits for


class Histogram:
    """Bucket i holds durations above bounds_s[i-1] and up to bounds_s[i]; the last, what is longer than all.

    Adding a value costs an append; the buckets are brought up to date in bulk.

    Args:
        bounds_s: [n] seconds, ascending.
    """

    def __init__(self, bounds_s: npt.NDArray[np.float64] = BOUNDS_S) -> None:
        self.bounds_s = bounds_s
        self._bounds_ns = np.round(bounds_s * 1e9).astype(np.int64)
        self._buckets = np.zeros(len(bounds_s) + 1, np.int64)
        self._sum_ns = 0
        self._waiting = array("q")

    def add(self, duration_ns: int) -> None:
        """Record one duration."""
        self._waiting.append(duration_ns)
        if len(self._waiting) >= _FOLD_AT:
            self._fold()

    def snapshot(self) -> dict[str, Any]:
        """{"count": n, "sum_s": seconds, "buckets": [n of each bucket]}."""
        self._fold()
        return {
            "count": int(self._buckets.sum()),
            "sum_s": self._sum_ns / 1e9,
            "buckets": self._buckets.tolist(),
        }

    def _fold(self) -> None:
        if not self._waiting:
            return
        values = np.array(self._waiting, np.int64)
        self._waiting = array("q")
        self._sum_ns += int(values.sum())
        self._buckets += np.bincount(
            np.searchsorted(self._bounds_ns, values, side="left"), minlength=len(self._buckets)
        )


def mean_s(histogram: Mapping[str, Any]) -> float | None:
    """Mean of a snapshot, seconds; None if it is empty."""
    return histogram["sum_s"] / histogram["count"] if histogram["count"] else None


def quantile_s(bounds_s: Sequence[float], histogram: Mapping[str, Any], q: float) -> float | None:
    """The q-quantile (0 < q <= 1) of a snapshot, seconds; None if it is empty.

    Right to a bucket, and interpolated on the log scale inside it: with ten buckets a decade it is off by a
    factor of 1.26 at most. Above the last bound, that bound.
    """
    rank, below = q * histogram["count"], 0
    for i, count in enumerate(histogram["buckets"]):
        if count and below + count >= rank:
            if i == len(bounds_s):
                return bounds_s[-1]
            high = bounds_s[i]
            low = bounds_s[i - 1] if i else high * 10 ** (-1 / _PER_DECADE)
            return low * math.pow(high / low, (rank - below) / count)
        below += count
    return None
