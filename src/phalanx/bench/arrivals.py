"""When requests are due: gaps between arrivals at a steady or a rising rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Pace:
    """The asked arrival process.

    Attributes:
        request_rate: requests/s; inf sends all at once. Unused with a ramp.
        burstiness: shape of the gamma distribution of gaps: 1 is Poisson, below 1 comes in bursts, above 1 is
            more even.
        ramp: None, "linear" or "exponential": the rate goes from `start_rps` for the first request to
            `end_rps` for the last.
        start_rps, end_rps: requests/s.
    """

    request_rate: float
    burstiness: float = 1.0
    ramp: str | None = None
    start_rps: float = 0.0
    end_rps: float = 0.0


def draw_arrivals(num_requests: int, pace: Pace, rng: np.random.RandomState) -> np.ndarray:
    """Return [num_requests] float64 seconds from the start at which requests are due, ascending.

    The first is due at 0. With burstiness 1 and no ramp the gaps are drawn as SGLang's client draws them. At
    rate inf all are due at 0 and `rng` is not touched. Times are absolute: a late send does not push back the
    ones after it.
    """
    arrivals = np.zeros(num_requests)
    if num_requests < 2:
        return arrivals
    rates = _rates(num_requests - 1, pace)
    if not np.all(np.isfinite(rates)):
        return arrivals
    if pace.burstiness == 1.0:
        gaps = rng.exponential(1.0 / rates, size=num_requests - 1)
    else:
        gaps = rng.gamma(pace.burstiness, 1.0 / (rates * pace.burstiness), size=num_requests - 1)
    arrivals[1:] = np.cumsum(gaps)
    return arrivals


def _rates(num_gaps: int, pace: Pace) -> np.ndarray:
    """Return [num_gaps] float64, the rate before each request but the first."""
    if pace.ramp is None:
        return np.full(num_gaps, pace.request_rate)
    progress = np.arange(1, num_gaps + 1) / num_gaps
    if pace.ramp == "linear":
        return pace.start_rps + (pace.end_rps - pace.start_rps) * progress
    rates: np.ndarray = pace.start_rps * (pace.end_rps / pace.start_rps) ** progress
    return rates
