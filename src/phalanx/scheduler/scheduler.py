"""The scheduler: the one place that advances a request.

`plan` decides a step from what was launched, `apply` takes in what came back. With run-ahead, step i+1 is
planned before step i is applied; used one after the other, the same calls are the serial scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from phalanx.config.groups import SchedulerConfig
from phalanx.core.errors import EngineError, RequestError
from phalanx.core.request import EngineRequest
from phalanx.core.step import (
    EnteringRows,
    Finish,
    Int64,
    PageGrants,
    StepOutputs,
    StepPlan,
    StepResult,
)
from phalanx.scheduler.limits import check_config, check_request
from phalanx.scheduler.logprobs import LogprobRows
from phalanx.scheduler.outputs import (
    LaunchedStep,
    build_outputs,
    check_result,
    end_outputs,
    settle,
)
from phalanx.scheduler.pages import RowPages, concat_grants
from phalanx.scheduler.prefill import (
    NO_CHUNKS,
    NO_PREFILL,
    Chunks,
    PartialPrompt,
    TokenBudget,
    admit,
)
from phalanx.scheduler.queue import Waiting, WaitingQueue
from phalanx.scheduler.records import NO_ENTERING, device_columns, unpack
from phalanx.scheduler.stats import Counters
from phalanx.scheduler.table import RequestTable, RowState


class Scheduler:
    """Rows, pages and the queue of one engine. Not thread-safe: one thread owns it.

    Args:
        config: admission and step shape.
        num_pages: pages of the KV pool, padding page 0 included.
        page_size: tokens of a page.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(self, config: SchedulerConfig, *, num_pages: int, page_size: int) -> None:
        check_config(config, num_pages, page_size)
        self.config = config
        self.table = RequestTable(config.max_running_requests)
        self.pages = RowPages(
            num_rows=self.table.num_rows,
            max_pages_per_row=min(-(-config.context_length // page_size), num_pages - 1),
            num_pages=num_pages,
            page_size=page_size,
            grant_tokens=config.grant_tokens,
        )
        self._queue = WaitingQueue()
        self._logprobs = LogprobRows(self.table.num_rows)
        self._counters = Counters()
        self._row_of: dict[int, int] = {}  # stream id -> row, streams that have not ended
        self._partial: PartialPrompt | None = None  # never more than one
        self._launched: deque[LaunchedStep] = deque()
        self._zombies: deque[tuple[int, Int64]] = deque()  # (release after this step, rows)
        self._last_planned = 0
        self._last_applied = 0
        self._aborted: list[int] = []

    # Requests in and out

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: 400 if it can never run (the message names both numbers), 503 if the queue is full.
        """
        if request.stream_id in self._row_of or request.stream_id in self._queue:
            raise RequestError(f"stream {request.stream_id} is already running")
        waiting = check_request(request, self.config.context_length, self.pages)
        limit = self.config.max_queued_requests
        if limit is not None and len(self._queue) >= limit:
            raise RequestError(
                f"{len(self._queue)} requests are waiting, at most {limit} may", status=503, code="queue_full"
            )
        self._queue.push(waiting)
        self._counters.received += 1

    def abort(self, stream_ids: Iterable[int]) -> None:
        """End these streams now; ids that have ended or never were are ignored.

        No token of them comes out of a later `apply`; their ends come out of `pending_outputs`.
        """
        rows = []
        for stream_id in stream_ids:
            row = self._row_of.pop(stream_id, None)
            if row is not None:
                rows.append(row)
            elif not self._queue.remove(stream_id):
                continue
            self._aborted.append(stream_id)
            self._counters.finished[Finish.ABORT] += 1
        if rows:
            self._drop_partial(rows)
            self._retire(np.array(rows, dtype=np.int64), self._last_planned)

    def pending_outputs(self) -> StepOutputs | None:
        """Ends of streams that were aborted since the last call (step_id -1), or None. Call after `abort`."""
        if not self._aborted:
            return None
        stream_ids = np.array(self._aborted, dtype=np.int64)
        self._aborted.clear()
        return end_outputs(-1, stream_ids, Finish.ABORT)

    # A step

    def plan(self) -> StepPlan | None:
        """The next step, or None if no row can run (`apply` what is in flight, or wait for a request)."""
        table = self.table
        is_decode = table.state == RowState.DECODE
        decode_rows = np.flatnonzero(is_decode)
        entering, chunks = self._plan_chunks()
        if not len(decode_rows) and not chunks.count:
            return None
        grants = self.pages.advance(is_decode)
        prefill = chunks.build(self.pages) if chunks.count else NO_PREFILL
        last_rows = chunks.rows[prefill.is_last]
        sample_rows = np.concatenate((decode_rows, last_rows)) if len(last_rows) else decode_rows

        num_generated = table.launched.take(sample_rows)
        max_new_tokens = table.max_new_tokens.take(sample_rows)
        final_index = np.flatnonzero(num_generated + 1 >= max_new_tokens)
        table.launched += is_decode
        table.launched[last_rows] = 1
        table.state[last_rows] = RowState.DECODE
        table.state[sample_rows[final_index]] = RowState.LAST
        if len(last_rows):
            grants = concat_grants(grants, self._grant_last_pages(last_rows))

        self._last_planned += 1
        step = LaunchedStep(
            step_id=self._last_planned,
            sample_rows=sample_rows,
            num_decode=len(decode_rows),
            prefill=prefill,
            final_index=final_index,
            no_token_index=final_index[max_new_tokens[final_index] == 0],
        )
        self._launched.append(step)
        rows32 = sample_rows.astype(np.int32)
        plan = StepPlan(
            step_id=step.step_id,
            decode_rows=rows32[: len(decode_rows)],
            entering=entering,
            prefill=prefill,
            grants=grants,
            sample_rows=rows32,
            num_generated=num_generated,
            needs_eager=num_generated < table.eager_until.take(sample_rows),
            logprobs=self._logprobs.plan(sample_rows, chunks),
        )
        self._counters.planned(plan)
        return plan

    def apply(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Take in what a step produced. Steps are applied in the order they were planned.

        Raises:
            EngineError: the plan is not the oldest in flight, or the result does not fit it. Nothing is
                changed: `fail` the plan.
        """
        step = self._oldest(plan)
        check_result(step, result)
        self._launched.popleft()
        self._last_applied = step.step_id
        table, rows, chunk_rows = self.table, step.sample_rows, step.prefill.rows
        tokens, finish, ended = settle(step, result)
        live = table.state.take(rows) != RowState.ZOMBIE
        outputs = build_outputs(
            step,
            result,
            tokens=tokens,
            finish=finish,
            live=live,
            stream_ids=table.stream_ids.take(rows),
            live_chunks=table.state[chunk_rows] != RowState.ZOMBIE,
            chunk_stream_ids=table.stream_ids[chunk_rows],
        )
        self._counters.ended(outputs)
        ended = ended[live[ended]]
        if len(ended):
            self._forget(rows[ended])
            # A row that used up its count is in no later plan; one that stopped may be in all of them.
            is_final = np.isin(ended, step.final_index, assume_unique=True)
            self._retire(rows[ended[is_final]], step.step_id)
            self._retire(rows[ended[~is_final]], self._last_planned)
        self._release_zombies()
        return outputs

    def fail(self, plan: StepPlan, message: str) -> StepOutputs:
        """The engine could not run this step: every stream in it ends with ERROR and this message.

        Takes the place of `apply` for the plan. Rows of it that are also in later plans are dropped there.

        Raises:
            EngineError: the plan is not the oldest in flight.
        """
        step = self._oldest(plan)
        self._launched.popleft()
        self._last_applied = step.step_id
        rows = step.all_rows()
        rows = rows[self.table.state[rows] != RowState.ZOMBIE]
        outputs = end_outputs(step.step_id, self.table.stream_ids[rows], Finish.ERROR, message)
        self._counters.ended(outputs)
        self._drop_partial(rows.tolist())
        self._forget(rows)
        self._retire(rows, self._last_planned)
        self._release_zombies()
        return outputs

    # What there is

    @property
    def has_work(self) -> bool:
        """Whether a request waits, runs, or a step is in flight."""
        return bool(self._queue) or bool(self._launched) or self.table.num_used > 0

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet applied."""
        return len(self._launched)

    @property
    def num_running(self) -> int:
        """Streams that have a row and have not ended."""
        return len(self._row_of)

    @property
    def num_queued(self) -> int:
        """Requests that wait for a row."""
        return len(self._queue)

    def stream_ids(self) -> list[int]:
        """Streams that wait or run."""
        return [*self._queue.stream_ids(), *self._row_of]

    def stats(self) -> dict[str, Any]:
        """Gauges and counters by name: running, queued, pages_*, *_total; histograms as in core.histogram."""
        allocator = self.pages.allocator
        return {
            "running": self.num_running,
            "queued": self.num_queued,
            "steps_in_flight": self.num_in_flight,
            "rows_total": self.config.max_running_requests,
            "rows_free": self.table.num_free,
            "page_size": self.pages.page_size,
            "pages_total": allocator.num_usable,
            "pages_free": allocator.num_free,
            "pages_held": allocator.num_held,
            "pages_cached": 0,
            "pages_reserved": allocator.num_usable - self.pages.num_unreserved,
            "steps_total": self._last_applied,
            **self._counters.as_dict(),
        }

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless rows and pages are conserved. Scans the pool."""
        table, pages = self.table, self.pages
        table.check()
        used = table.used_rows()
        pages.check(used)
        num_zombies = int(np.count_nonzero(table.state == RowState.ZOMBIE))
        assert num_zombies == sum(len(rows) for _, rows in self._zombies), f"{num_zombies} zombie rows"
        assert num_zombies == 0 or self._launched, f"{num_zombies} zombie rows, and no step in flight"
        assert len(self._row_of) == table.num_used - num_zombies, (
            f"{len(self._row_of)} streams, {table.num_used} rows in use, {num_zombies} of them zombies"
        )
        kv_lens = table.prompt_lens[used] + np.maximum(table.launched[used] - 1, 0)
        room = pages.held[used] * pages.page_size - kv_lens
        wrong = np.flatnonzero(room != pages.room[used])
        assert not len(wrong), (
            f"row {used[wrong[0]]}: room {pages.room[used][wrong[0]]}, not {room[wrong[0]]}"
        )

    # Inside

    def _plan_chunks(self) -> tuple[EnteringRows, Chunks]:
        partial = self._partial
        if partial is None and not self._queue:
            return NO_ENTERING, NO_CHUNKS
        budget = TokenBudget(self.config)
        taken = budget.take(len(partial.request.input_ids) - partial.done) if partial is not None else 0
        admitted, lens = admit(
            self._queue, budget, num_rows=self.table.num_free, num_pages=self.pages.num_unreserved
        )
        entering, chunks = self._enter(admitted, lens) if admitted else (NO_ENTERING, NO_CHUNKS)
        if partial is not None:
            chunks = chunks.after(partial, taken)
        self._partial = chunks.partial()
        return entering, chunks

    def _enter(self, admitted: list[Waiting], lens: list[int]) -> tuple[EnteringRows, Chunks]:
        requests, records = [w.request for w in admitted], unpack(admitted)
        self._counters.entered([w.queued_ns for w in admitted])
        rows = self.table.enter(records)
        prompt_lens = records["prompt_len"].copy()
        self.pages.enter(rows, prompt_lens, records["num_pages"])
        for row, request in zip(rows.tolist(), requests, strict=True):
            self._row_of[request.stream_id] = row
            if request.logprobs is not None and request.max_new_tokens > 0:
                self._logprobs.enter(row, request.logprobs)
        chunks = Chunks(
            rows=rows,
            starts=np.zeros(len(rows), dtype=np.int32),
            lens=np.array(lens, dtype=np.int32),
            prompt_lens=prompt_lens,
            requests=requests,
        )
        return device_columns(rows, records, requests), chunks

    def _grant_last_pages(self, last_rows: Int64) -> PageGrants:
        """Name the partly filled last pages of prompts that have just ended, where decode goes on in them."""
        rows = last_rows[(self.table.state[last_rows] == RowState.DECODE) & (self.pages.room[last_rows] > 0)]
        return self.pages.last_pages(rows, self.table.prompt_lens[rows])

    def _oldest(self, plan: StepPlan) -> LaunchedStep:
        if not self._launched or self._launched[0].step_id != plan.step_id:
            awaited = self._launched[0].step_id if self._launched else "none"
            raise EngineError(f"step {plan.step_id} came back, the oldest in flight is {awaited}")
        return self._launched[0]

    def _drop_partial(self, rows: list[int]) -> None:
        if self._partial is not None and self._partial.row in rows:
            self._partial = None

    def _forget(self, rows: Int64) -> None:
        for stream_id in self.table.stream_ids[rows].tolist():
            del self._row_of[stream_id]

    def _retire(self, rows: Int64, last_step: int) -> None:
        """Free these ended rows ([k]) once `last_step`, the last one that may touch them, is applied."""
        if not len(rows):
            return
        if last_step <= self._last_applied:
            self._release(rows)
        else:
            self.table.state[rows] = RowState.ZOMBIE
            self._zombies.append((last_step, rows))

    def _release_zombies(self) -> None:
        while self._zombies and self._zombies[0][0] <= self._last_applied:
            self._release(self._zombies.popleft()[1])

    def _release(self, rows: Int64) -> None:
        self.pages.release(rows)
        self._logprobs.leave(rows)
        self.table.release(rows)
