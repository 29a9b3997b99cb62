"""Host time of every step by phase, always recorded: histograms with exact counts and sums.

A step costs a clock read and an append for each phase, about a microsecond in all; the histograms are brought
up to date in bulk, every few hundred steps and when they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from phalanx.core.histogram import BOUNDS_S, Histogram, mean_s, quantile_s
from phalanx.engine.launch_times import LaunchTimes

_READY_NS = 50_000  # a result that the host waited for no longer than this had been there


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One histogram for each phase of a step.

    Attributes:
        plan: deciding a step.
        launch: handing it to the engine; waits for the device in there are left out.
        kv_indices: of it, building FlashInfer's page lists outside the step's graph.
        wait: blocked on the device, per turn of the loop.
        apply: taking in a step's result.
        send: from a step's outputs until they were sent on, or collected.
        between_steps: between two steps with decode rows. Serial: from the moment a step's result was read
            until the next step's inputs were queued; the device has nothing to do then. Run-ahead: one turn
            of the loop without its waits, which costs the device nothing while it is below a step's own time.
        idle: of these, those in which the device may have had nothing to do. Serial: all. Run-ahead: turns
            that waited for nothing, since the result was there.
    """

    plan: Histogram = field(default_factory=Histogram)
    launch: Histogram = field(default_factory=Histogram)
    kv_indices: Histogram = field(default_factory=Histogram)
    wait: Histogram = field(default_factory=Histogram)
    apply: Histogram = field(default_factory=Histogram)
    send: Histogram = field(default_factory=Histogram)
    between_steps: Histogram = field(default_factory=Histogram)
    idle: Histogram = field(default_factory=Histogram)

    def snapshot(self) -> dict[str, Any]:
        """{"bounds_s": [...], "<phase>": `Histogram.snapshot`, ...}: since the start, ready for JSON."""
        return {"bounds_s": BOUNDS_S.tolist()} | {phase: getattr(self, phase).snapshot() for phase in PHASES}


PHASES = tuple(f.name for f in fields(StepTimes))


class StepTimer:
    """Follows the loop and records into `times`. Call its methods in the order of a turn of the loop.

    Args:
        run_ahead: the loop launches a step before it reads the one before.
    """

    def __init__(self, *, run_ahead: bool) -> None:
        self.times = StepTimes()
        self._run_ahead = run_ahead
        self._mark = 0  # when the phase in progress began
        self._began = 0  # this turn of the loop
        self._waited = 0  # in this turn
        self._last_wait = 0  # in the turn before
        self._last_turn = 0  # the turn before, without its waits: from its begin to this one's
        self._read_at = 0  # when the last result was read
        self._decodes = False  # whether the last step launched has decode rows
        self._ended_at = 0  # when outputs were handed to the caller; 0: there were none

    def begin(self) -> None:
        """A turn of the loop begins."""
        now = time.perf_counter_ns()
        self._last_turn, self._last_wait = now - self._began - self._waited, self._waited
        self._mark = self._began = now
        self._waited = 0

    def planned(self) -> None:
        """There is a step to launch."""
        now = time.perf_counter_ns()
        self.times.plan.add(now - self._mark)
        self._mark = now

    def launched(self, num_decode: int, inside: LaunchTimes | None) -> None:
        """It is launched. num_decode: its decode rows. inside: what the engine says of it, if it does."""
        now = time.perf_counter_ns()
        prepared_at = now
        if inside is not None:
            self._waited, prepared_at = inside.wait_ns, inside.prepared_at_ns
            if inside.indices_ns is not None:
                self.times.kv_indices.add(inside.indices_ns)
        self.times.launch.add(now - self._mark - self._waited)
        if num_decode and self._decodes:
            between = self._last_turn if self._run_ahead else prepared_at - self._read_at
            self.times.between_steps.add(between)
            if not self._run_ahead or self._last_wait <= _READY_NS:
                self.times.idle.add(between)
        self._decodes = num_decode > 0
        self._mark = now

    def read(self) -> None:
        """A result was waited for, since the last mark."""
        now = time.perf_counter_ns()
        self._waited += now - self._mark
        self._mark = self._read_at = now

    def applied(self) -> None:
        """It was taken in."""
        now = time.perf_counter_ns()
        self.times.apply.add(now - self._mark)
        self._mark = now

    def end(self, *, has_outputs: bool) -> None:
        """The turn is over but for what the caller does with its outputs."""
        self.times.wait.add(self._waited)
        self._ended_at = self._mark if has_outputs else 0

    def pause(self) -> None:
        """The loop halts: the time until its next turn is between no steps."""
        self._mark = time.perf_counter_ns()
        self._decodes = False

    def sent(self) -> None:
        """The caller is done with the outputs of the last turn, if it had any."""
        if self._ended_at:
            self.times.send.add(time.perf_counter_ns() - self._ended_at)
            self._ended_at = 0


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What was recorded between two snapshots of one `StepTimes`."""
    result: dict[str, Any] = {"bounds_s": after["bounds_s"]}
    for phase in PHASES:
        late, early = after[phase], before[phase]
        result[phase] = {
            "count": late["count"] - early["count"],
            "sum_s": late["sum_s"] - early["sum_s"],
            "buckets": [a - b for a, b in zip(late["buckets"], early["buckets"], strict=True)],
        }
    return result


def summary_ms(snapshot: Mapping[str, Any], phase: str) -> dict[str, float | None]:
    """{"mean": ms, "p99": ms} of one phase of `StepTimes.snapshot`; None for both if it is empty."""
    mean, p99 = mean_s(snapshot[phase]), quantile_s(snapshot["bounds_s"], snapshot[phase], 0.99)
    return {
        "mean": None if mean is None else round(mean * 1e3, 4),
        "p99": None if p99 is None else round(p99 * 1e3, 4),
    }
