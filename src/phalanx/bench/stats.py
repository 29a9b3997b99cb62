"""Ratios of repeated measurements with Student-t confidence intervals on the log scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_GRID = 50_001


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A.

    Attributes:
        mean_a, mean_b: geometric means of the repeats.
        ratio: mean_b / mean_a.
        low, high: 95% confidence bounds of the ratio; None where there are too few repeats for any.
    """

    mean_a: float
    mean_b: float
    ratio: float
    low: float | None
    high: float | None

    @property
    def differs(self) -> bool:
        """Whether the interval leaves 1 out; False without an interval."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Ratio of measurements taken in pairs, so that a drift of the machine falls out.

    Args:
        a, b: positive values, a[i] measured beside b[i]; one pair gives no interval.
    """
    logs = np.log(b) - np.log(a)
    half = None
    if len(logs) > 1:
        half = t_quantile(0.975, len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return _ratio(a, b, half)


def unpaired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Ratio of two independent sets of repeats (Welch); each needs two values for an interval.

    Args:
        a, b: positive values.
    """
    half = None
    if len(a) > 1 and len(b) > 1:
        parts = [float(np.log(x).var(ddof=1)) / len(x) for x in (a, b)]
        error = math.sqrt(sum(parts))
        # Welch-Satterthwaite degrees of freedom.
        spread = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
        half = t_quantile(0.975, sum(parts) ** 2 / spread) * error if spread > 0 else 0.0
    return _ratio(a, b, half)


def t_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t distribution, by integrating its density.

    With t = sqrt(degrees) * tan(x) the density becomes cos(x)^(degrees - 1) on (-pi/2, pi/2): smooth,
    bounded.

    Args:
        probability: in [0.5, 1).
        degrees: degrees of freedom, 1 or more, not necessarily whole.
    """
    angles = np.linspace(0.0, math.pi / 2, _GRID)
    density = np.cos(angles) ** (max(degrees, 1.0) - 1.0)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp(2 * probability - 1, area / area[-1], angles))
    return math.sqrt(max(degrees, 1.0)) * math.tan(angle)


def _ratio(a: Sequence[float], b: Sequence[float], half: float | None) -> Ratio:
    mean_a, mean_b = (float(np.exp(np.log(x).mean())) for x in (a, b))
    ratio = mean_b / mean_a
    if half is None:
        return Ratio(mean_a, mean_b, ratio, None, None)
    return Ratio(mean_a, mean_b, ratio, ratio * math.exp(-half), ratio * math.exp(half))
