"""The steady-state window: from the end of the ramp-up to the start of the drain, and what flowed in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.bench.timeline import Timeline

# In flight counts as "ramped up" at this share of the plateau.
_RAMPED_UP = 0.95
# A bin counts as "full output" at this share of the plateau rate.
_FULL_OUTPUT = 0.8
_MIN_SHARE_OF_RUN = 0.1
_MIN_FINISHED = 2
_NUM_BINS = 50


@dataclass(frozen=True, slots=True)
class SteadyWindow:
    """The window and its figures. Times are seconds from the start of the run.

    Attributes:
        begin_s, end_s: bounds.
        rule: "in flight" or "output rate", see `find_steady_window`.
        num_finished: successful requests that ended in it.
        requests_per_s: those, per second of the window.
        output_tokens_per_s: output tokens that arrived in it, per second.
        mean_in_flight: time average of the requests in flight.
    """

    begin_s: float
    end_s: float
    rule: str
    num_finished: int
    requests_per_s: float
    output_tokens_per_s: float
    mean_in_flight: float

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.begin_s


def find_steady_window(timeline: Timeline, *, ramped_rate: bool = False) -> tuple[SteadyWindow | None, str]:
    """Return the window, or None and the reason.

    Where requests went on being sent after the first had ended ("in flight"): the window opens when the
    number in flight has reached 95% of its median over the second half of the sending, and a request has
    ended; it closes with the last send, since from then on the load shrinks.

    Where everything was sent before the first request ended, the queue is in the server and the client cannot
    see it ("output rate"): the window spans the first to the last bin (a fiftieth of the run) whose output
    rate reaches 80% of the plateau, which is the 75th percentile over the bins.

    A window must cover a tenth of the run and see two requests end.

    Args:
        timeline: the run.
        ramped_rate: the request rate rose over the whole run, so that nothing was steady.
    """
    if not len(timeline.finishes):
        return None, "no request succeeded"
    if ramped_rate:
        return None, "the request rate rose over the whole run"
    if timeline.last_send > timeline.finishes[0]:
        rule, bounds = "in flight", _by_in_flight(timeline)
    else:
        rule, bounds = "output rate", _by_output_rate(timeline)
    if bounds is None:
        return None, f"no plateau ({rule})"
    begin, end = bounds
    if end - begin < _MIN_SHARE_OF_RUN * timeline.duration_s:
        return None, f"shorter than a tenth of the run ({rule})"
    num_finished = int(np.diff(np.searchsorted(timeline.finishes, [begin, end]))[0])
    if num_finished < _MIN_FINISHED:
        return None, f"fewer than {_MIN_FINISHED} requests ended in it ({rule})"
    length = end - begin
    instants = begin + (np.arange(1000) + 0.5) * (length / 1000)
    return (
        SteadyWindow(
            begin,
            end,
            rule,
            num_finished,
            num_finished / length,
            timeline.tokens_between(begin, end) / length,
            float(timeline.in_flight(instants).mean()),
        ),
        "",
    )


def _by_in_flight(timeline: Timeline) -> tuple[float, float] | None:
    end = timeline.last_send
    instants = end / 2 + (np.arange(1000) + 0.5) * (end / 2000)
    needed = _RAMPED_UP * float(np.median(timeline.in_flight(instants)))
    # The number in flight reaches a level at a start, never in between.
    levels = timeline.in_flight(timeline.starts)
    reached = timeline.starts[levels >= needed]
    if not len(reached):
        return None
    return max(float(reached[0]), float(timeline.finishes[0])), end


def _by_output_rate(timeline: Timeline) -> tuple[float, float] | None:
    if not len(timeline.token_times) or timeline.duration_s <= 0:
        return None
    width = timeline.duration_s / _NUM_BINS
    tokens = timeline.token_bins(width)
    plateau = np.percentile(tokens, 75)
    if plateau <= 0:
        return None
    full = np.flatnonzero(tokens >= _FULL_OUTPUT * plateau)
    return float(full[0] * width), float((full[-1] + 1) * width)
