"""A run over time: requests in flight, tokens and completions per second, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.bench.parse import Outcome

_NUM_SAMPLES = 2000
_SERIES_POINTS = 200
_SHORTEST_BIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Timeline:
    """When things happened, in seconds from the start of the run.

    Attributes:
        duration_s: length of the run.
        starts, ends: [num_sent] float64 each sorted: clock start and end of every request, failed ones too.
        finishes: [num_completed] float64 sorted: end of every successful request.
        last_send: when the last request was started; 0 for an empty run.
        token_times: [num_events] float64 sorted: output tokens of successful requests...
        token_counts: [num_events] float64: ...and how many at each of these times.
    """

    duration_s: float
    starts: np.ndarray
    ends: np.ndarray
    finishes: np.ndarray
    last_send: float
    token_times: np.ndarray
    token_counts: np.ndarray

    def in_flight(self, times: np.ndarray) -> np.ndarray:
        """Return [len(times)] int64, requests between clock start and end at each instant."""
        begun = np.searchsorted(self.starts, times, side="right")
        return begun - np.searchsorted(self.ends, times, side="right")

    def sampled_in_flight(self) -> np.ndarray:
        """Return [2000] int64, the number in flight at evenly spaced instants of the run ([0] if empty)."""
        if not len(self.starts) or self.duration_s <= 0:
            return np.empty(0, np.int64)
        instants = (np.arange(_NUM_SAMPLES) + 0.5) * (self.duration_s / _NUM_SAMPLES)
        return self.in_flight(instants)

    def tokens_between(self, begin: float, end: float) -> float:
        """Return the output tokens that arrived in [begin, end)."""
        low, high = np.searchsorted(self.token_times, [begin, end])
        return float(self.token_counts[low:high].sum())

    def tokens_per_second(self) -> np.ndarray:
        """Return [ceil(duration)] float64, the output tokens of each second of the run."""
        return self.token_bins(1.0)

    def token_bins(self, width_s: float) -> np.ndarray:
        """Return float64 output tokens in consecutive bins of `width_s`, covering the run."""
        num_bins = max(1, int(np.ceil(self.duration_s / width_s)))
        return _binned(self.token_times, self.token_counts, width_s, num_bins)

    def series(self) -> dict[str, list[float]]:
        """Return the run as at most 200 points for charts: bin centres and values."""
        if self.duration_s <= 0 or not len(self.starts):
            return {"t_s": [], "output_tokens_per_s": [], "in_flight": [], "requests_per_s": []}
        # Equal bins of 0.1 s or more: a short one left over at the end would show a huge rate.
        num_bins = max(1, min(_SERIES_POINTS, int(self.duration_s / _SHORTEST_BIN_S)))
        width = self.duration_s / num_bins
        centres = (np.arange(num_bins) + 0.5) * width
        tokens = _binned(self.token_times, self.token_counts, width, num_bins)
        finished = _binned(self.finishes, np.ones(len(self.finishes)), width, num_bins)
        return {
            "t_s": centres.round(4).tolist(),
            "output_tokens_per_s": (tokens / width).round(2).tolist(),
            "in_flight": self.in_flight(centres).tolist(),
            "requests_per_s": (finished / width).round(3).tolist(),
        }


def _binned(times: np.ndarray, counts: np.ndarray, width_s: float, num_bins: int) -> np.ndarray:
    """Sum `counts` over bins of equal width; what lies at the very end belongs to the last one."""
    return np.bincount(np.clip((times / width_s).astype(np.int64), 0, num_bins - 1), counts, num_bins)


def make_timeline(
    outcomes: Sequence[Outcome],
    token_times: np.ndarray,
    token_counts: np.ndarray,
    began: float,
    duration_s: float,
) -> Timeline:
    """Build the timeline of a run.

    Args:
        outcomes: all requests.
        token_times: [num] float64 `time.perf_counter` seconds at which output tokens came, in any order.
        token_counts: [num] tokens at each.
        began: `time.perf_counter` start of the run.
        duration_s: its length.
    """
    starts = np.sort(np.asarray([outcome.start for outcome in outcomes], np.float64) - began)
    order = np.argsort(token_times, kind="stable")
    return Timeline(
        duration_s,
        starts,
        np.sort(np.asarray([outcome.end for outcome in outcomes], np.float64) - began),
        np.sort(np.asarray([o.end for o in outcomes if o.success], np.float64) - began),
        float(starts[-1]) if len(starts) else 0.0,
        token_times[order] - began,
        np.asarray(token_counts, np.float64)[order],
    )
