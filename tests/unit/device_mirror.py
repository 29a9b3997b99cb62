"""A device without a model: it keeps what an engine keeps, from StepPlans alone, and objects to wrong ones.

A request's sampling_seed says who it is. Each KV slot remembers which token of which request was written to
it last, so a page that two rows share, or that is handed out too early, shows in the next step of its row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from phalanx.core.request import EngineRequest
from phalanx.core.step import Finish, StepOutputs, StepPlan, StepResult
from phalanx.scheduler import Scheduler

GARBAGE = 999_999_999  # what a row samples after its end


def prompt_of(seed: int, prompt_len: int) -> np.ndarray:
    """The prompt of request `seed`."""
    return (seed * 7919 + np.arange(prompt_len) * 31).astype(np.int32) % 50_000


def token_of(seed: int, index: int) -> int:
    """Output token number `index` of request `seed`."""
    return (seed * 1009 + index * 17 + 3) % 60_000


class DeviceMirror:
    """Runs plans. `finish_of(seed, index)` says whether output token `index` of request `seed` ends it."""

    def __init__(
        self,
        *,
        num_rows: int,
        num_pages: int,
        page_size: int,
        context_length: int,
        grant_tokens: int,
        finish_of: Callable[[int, int], Finish],
    ) -> None:
        self.page_size = page_size
        self.finish_of = finish_of
        self.ring = max(1, grant_tokens // page_size)
        self.seed = np.full(num_rows, -1, dtype=np.int64)
        self.prompt_lens = np.zeros(num_rows, dtype=np.int64)
        self.seq_lens = np.zeros(num_rows, dtype=np.int64)
        self.generated = np.zeros(num_rows, dtype=np.int64)
        self.dead = np.zeros(num_rows, dtype=bool)
        self.granted_pages = np.zeros((num_rows, self.ring), dtype=np.int64)
        self.next_page_index = np.zeros(num_rows, dtype=np.int64)
        self.req_to_token = np.full((num_rows, context_length), -1, dtype=np.int64)
        self.slot_content = np.full((num_pages * page_size, 2), -1, dtype=np.int64)
        self.entered: list[int] = []  # seeds, in the order they came

    def launch(self, plan: StepPlan) -> StepResult:
        """Run a step now; the result may be read whenever."""
        self._enter(plan)
        self._grant(plan)
        self._prefill(plan)
        self._decode(plan)
        last = plan.prefill.rows[plan.prefill.is_last]
        assert plan.sample_rows.tolist() == [*plan.decode_rows.tolist(), *last.tolist()]
        assert len(set(plan.sample_rows.tolist())) == len(plan.sample_rows)
        assert plan.num_generated.tolist() == self.generated[plan.sample_rows].tolist()
        assert len(plan.needs_eager) == len(plan.sample_rows)
        touched = {*plan.sample_rows.tolist(), *plan.prefill.rows.tolist()}
        for row in touched:
            self._check_content(row)
        return self._sample(plan)

    def _enter(self, plan: StepPlan) -> None:
        columns = plan.entering
        assert set(columns.rows.tolist()) <= set(plan.prefill.rows.tolist())
        for row, seed, length in zip(columns.rows, columns.seed, columns.prompt_lens, strict=True):
            assert 1 <= row < len(self.seed)
            self.seed[row], self.prompt_lens[row] = seed, length
            self.seq_lens[row] = self.generated[row] = 0
            self.dead[row] = False
            self.next_page_index[row] = -1
            self.granted_pages[row] = 0
            self.req_to_token[row] = -1
            self.entered.append(int(seed))

    def _grant(self, plan: StepPlan) -> None:
        grants = plan.grants
        for row, index, page in zip(grants.rows, grants.page_index, grants.page_ids, strict=True):
            assert 1 <= page < len(self.slot_content) // self.page_size
            if self.next_page_index[row] >= 0:
                assert index == self.next_page_index[row], "a gap between grants"
            self.next_page_index[row] = index + 1
            self.granted_pages[row, index % self.ring] = page

    def _prefill(self, plan: StepPlan) -> None:
        chunks, first = plan.prefill, 0
        assert len(set(chunks.rows.tolist())) == chunks.count
        for row, start, length, last in zip(
            chunks.rows, chunks.starts, chunks.lens, chunks.is_last, strict=True
        ):
            stop = start + length
            assert length >= 1 and start == self.seq_lens[row]
            assert last == (stop == self.prompt_lens[row])
            seed = int(self.seed[row])
            expected = prompt_of(seed, int(self.prompt_lens[row]))[start:stop]
            assert chunks.input_ids[first : first + length].tolist() == expected.tolist()
            slots = chunks.slots[first : first + length].astype(np.int64)
            self._write(int(row), np.arange(start, stop), slots)
            self.seq_lens[row] = stop
            first += length
        assert first == len(chunks.input_ids) == len(chunks.slots)

    def _decode(self, plan: StepPlan) -> None:
        assert not set(plan.decode_rows.tolist()) & set(plan.prefill.rows.tolist())
        for row in plan.decode_rows.tolist():
            position = int(self.seq_lens[row])
            assert position >= self.prompt_lens[row], "decoding before the prompt is done"
            page_index, offset = divmod(position, self.page_size)
            assert page_index < self.next_page_index[row], "position without a granted page"
            page = self.granted_pages[row, page_index % self.ring]
            if offset:
                assert page == self.req_to_token[row, position - 1] // self.page_size
            self._write(row, np.array([position]), np.array([page * self.page_size + offset]))
            self.seq_lens[row] = position + 1

    def _write(self, row: int, positions: np.ndarray, slots: np.ndarray) -> None:
        assert (slots >= self.page_size).all(), "a write to the padding page"
        assert (slots % self.page_size == positions % self.page_size).all()
        self.req_to_token[row, positions] = slots
        self.slot_content[slots, 0] = self.seed[row]
        self.slot_content[slots, 1] = positions

    def _check_content(self, row: int) -> None:
        length = int(self.seq_lens[row])
        content = self.slot_content[self.req_to_token[row, :length]]
        assert (content[:, 0] == self.seed[row]).all(), f"row {row} reads another request's KV"
        assert (content[:, 1] == np.arange(length)).all()

    def _sample(self, plan: StepPlan) -> StepResult:
        size = len(plan.sample_rows)
        tokens, finish = np.full(size, GARBAGE, dtype=np.int32), np.zeros(size, dtype=np.uint8)
        for i, row in enumerate(plan.sample_rows.tolist()):
            seed, index = int(self.seed[row]), int(self.generated[row])
            self.generated[row] += 1
            if self.dead[row]:
                continue
            tokens[i] = token_of(seed, index)
            finish[i] = self.finish_of(seed, index)
            self.dead[row] = finish[i] != Finish.NONE
        return StepResult(step_id=plan.step_id, tokens=tokens, finish=finish)


class Driver:
    """A scheduler and its device, and what every stream was told."""

    def __init__(self, scheduler: Scheduler, device: DeviceMirror) -> None:
        self.scheduler = scheduler
        self.device = device
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.added: list[EngineRequest] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Finish] = {}
        self.errors: dict[int, str] = {}

    def add(self, request: EngineRequest) -> None:
        """Queue it; stream_id must be its seed."""
        assert request.stream_id == request.sampling.sampling_seed
        self.scheduler.add(request)
        self.added.append(request)
        self.tokens[request.stream_id] = []

    def abort(self, stream_ids: Iterable[int]) -> None:
        """Abort and read the ends."""
        self.scheduler.abort(stream_ids)
        self._absorb(self.scheduler.pending_outputs())
        assert self.scheduler.pending_outputs() is None

    def launch(self) -> StepPlan | None:
        """Plan and launch a step."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.in_flight.append((plan, self.device.launch(plan)))
        return plan

    def apply(self) -> StepOutputs:
        """Apply the oldest step in flight."""
        outputs = self.scheduler.apply(*self.in_flight.popleft())
        self._absorb(outputs)
        return outputs

    def fail(self, message: str) -> StepOutputs:
        """Fail the oldest step in flight."""
        outputs = self.scheduler.fail(self.in_flight.popleft()[0], message)
        self._absorb(outputs)
        return outputs

    def run(self, *, run_ahead: int, max_steps: int = 10_000) -> None:
        """Until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            plan = self.launch()
            assert plan is not None or self.in_flight, "work, but no plan"
            while len(self.in_flight) > (run_ahead if plan is not None else 0):
                self.apply()
            self.scheduler.check()
        raise AssertionError("did not finish")

    def check_idle(self) -> None:
        """Everything ended and everything was given back."""
        self.scheduler.check()
        stats = self.scheduler.stats()
        assert stats["pages_free"] == stats["pages_total"] and stats["pages_reserved"] == 0
        assert stats["rows_free"] == stats["rows_total"]
        assert stats["running"] == stats["queued"] == stats["steps_in_flight"] == 0
        assert self.ends.keys() == self.tokens.keys()
        assert stats["generated_tokens_total"] == sum(map(len, self.tokens.values()))
        reasons = [Finish.STOP, Finish.LENGTH, Finish.ABORT, Finish.ERROR]
        ended = [stats[f"finished_{r.name.lower()}_total"] for r in reasons]
        assert ended == [list(self.ends.values()).count(r) for r in reasons]
        assert self.device.entered == sorted(self.device.entered), "a request overtook another"

    def _absorb(self, outputs: StepOutputs | None) -> None:
        if outputs is None:
            return
        ids = outputs.stream_ids.tolist()
        assert len(set(ids)) == len(ids)
        assert outputs.stream_ids.dtype == np.int64 and outputs.tokens.dtype == np.int32
        assert outputs.finish.dtype == np.uint8
        for sid, token, finish in zip(ids, outputs.tokens.tolist(), outputs.finish.tolist(), strict=True):
            assert sid not in self.ends, f"stream {sid} was told something after its end"
            if token >= 0:
                self.tokens[sid].append(token)
            else:
                assert finish != Finish.NONE
            if finish:
                self.ends[sid] = Finish(finish)
        self.errors.update({sid: message for sid, _, message in outputs.errors})
