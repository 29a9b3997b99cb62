"""Totals since the start, how long steps and waits last, and the current rate."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from phalanx.core.histogram import BOUNDS_S, WAIT_BOUNDS_S, Histogram
from phalanx.core.step import Finish, Int64, StepOutputs, StepPlan

_RATE_NS = 1_000_000_000  # a rate is told over a second or, where steps are longer, over a step


class Rate:
    """How fast a total grows while there is work, by the last whole second.

    Asking changes nothing, so any number of clients may.
    """

    def __init__(self) -> None:
        self._since_ns = self._updated_ns = 0
        self._since_total = 0
        self._per_s = 0.0

    def resume(self, now_ns: int, total: int) -> None:
        """There is work, perhaps after a pause, which does not count."""
        if now_ns - self._updated_ns >= _RATE_NS:
            self._since_ns = self._updated_ns = now_ns
            self._since_total, self._per_s = total, 0.0

    def update(self, now_ns: int, total: int) -> None:
        """The total has grown."""
        self._updated_ns = now_ns
        elapsed_ns = now_ns - self._since_ns
        if elapsed_ns >= _RATE_NS:
            self._per_s = (total - self._since_total) / elapsed_ns * 1e9
            self._since_ns, self._since_total = now_ns, total

    def per_s(self, now_ns: int) -> float:
        """Growth per second; 0 when none has come for two seconds."""
        return self._per_s if now_ns - self._updated_ns < 2 * _RATE_NS else 0.0


class Counters:
    """Running totals. A step costs two clock reads.

    Attributes:
        received: requests that were queued.
        prompt_tokens: prompt tokens planned.
        generated_tokens: output tokens handed to streams.
        step_rows: rows of all steps, and last_step_rows of the last one: each row gets a token.
        finished: [len(Finish)] int64, ended streams by reason.
        step_time: from a step's plan, or the end of the one before it if that came later, to its own end.
        queue_time: from a request's arrival until it gets a row.
    """

    def __init__(self) -> None:
        self.received = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.step_rows = 0
        self.last_step_rows = 0
        self.finished: Int64 = np.zeros(len(Finish), dtype=np.int64)
        self.step_time = Histogram(BOUNDS_S)
        self.queue_time = Histogram(WAIT_BOUNDS_S)
        self._rate = Rate()
        self._planned_ns: deque[int] = deque()  # of the steps in flight
        self._ended_ns = 0

    def entered(self, queued_ns: Iterable[int]) -> None:
        """Requests that arrived at these times (`perf_counter_ns`) get rows."""
        now_ns = time.perf_counter_ns()
        for arrived_ns in queued_ns:
            self.queue_time.add(now_ns - arrived_ns)

    def planned(self, plan: StepPlan) -> None:
        """A step is about to be launched; `ended` must follow for each, in the same order."""
        self.prompt_tokens += len(plan.prefill.input_ids)
        self.last_step_rows = len(plan.sample_rows)
        self.step_rows += self.last_step_rows
        now_ns = time.perf_counter_ns()
        if not self._planned_ns:
            self._rate.resume(now_ns, self.generated_tokens)
        self._planned_ns.append(now_ns)

    def ended(self, outputs: StepOutputs) -> None:
        """The oldest step in flight has ended: add its time, tokens and ends."""
        now_ns = time.perf_counter_ns()
        self.step_time.add(now_ns - max(self._planned_ns.popleft(), self._ended_ns))
        self._ended_ns = now_ns
        self.generated_tokens += int(np.count_nonzero(outputs.tokens >= 0))
        self._rate.update(now_ns, self.generated_tokens)
        ends = np.flatnonzero(outputs.finish != int(Finish.NONE))
        if len(ends):
            self.finished += np.bincount(outputs.finish[ends], minlength=len(Finish))

    def as_dict(self) -> dict[str, Any]:
        """By name, for `Scheduler.stats`."""
        ends = {
            f"finished_{reason.name.lower()}_total": int(self.finished[reason])
            for reason in Finish
            if reason != Finish.NONE
        }
        return {
            "requests_total": self.received,
            "prompt_tokens_total": self.prompt_tokens,
            "generated_tokens_total": self.generated_tokens,
            "gen_throughput": round(self._rate.per_s(time.perf_counter_ns()), 3),
            "step_rows_total": self.step_rows,
            "last_step_rows": self.last_step_rows,
            "step_time": {"bounds_s": BOUNDS_S.tolist(), **self.step_time.snapshot()},
            "queue_time": {"bounds_s": WAIT_BOUNDS_S.tolist(), **self.queue_time.snapshot()},
            **ends,
        }
