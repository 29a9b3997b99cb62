"""Any requests, aborts, failures and run-ahead: each stream gets its tokens, in order, and one end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phalanx.config.groups import SchedulerConfig
from phalanx.core.errors import RequestError
from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish
from phalanx.scheduler import Scheduler
from tests.unit.device_mirror import DeviceMirror, Driver, prompt_of, token_of

CONTEXT = 48
MAX_PREFILL = 24


class Case:
    """A driver, and the truth about every request in it."""

    def __init__(self, *, rows: int, page_size: int, pool_tokens: int, chunk: int, grant_tokens: int) -> None:
        num_pages = 1 + -(-pool_tokens // page_size)
        self.capacity = (num_pages - 1) * page_size
        config = SchedulerConfig(
            max_running_requests=rows,
            context_length=CONTEXT,
            max_prefill_tokens=MAX_PREFILL,
            chunked_prefill_size=chunk,
            grant_tokens=grant_tokens,
        )
        self.chunk = chunk
        self.stop_at: dict[int, int | None] = {}
        self.error_at: dict[int, int | None] = {}
        self.limits: dict[int, int] = {}
        self.touched_by_failure: set[int] = set()
        device = DeviceMirror(
            num_rows=rows + 1,
            num_pages=num_pages,
            page_size=page_size,
            context_length=CONTEXT,
            grant_tokens=grant_tokens,
            finish_of=self.finish_of,
        )
        self.driver = Driver(Scheduler(config, num_pages=num_pages, page_size=page_size), device)

    def finish_of(self, seed: int, index: int) -> Finish:
        if index == self.error_at[seed]:
            return Finish.ERROR
        return Finish.STOP if index == self.stop_at[seed] else Finish.NONE

    def add(self, prompt_len: int, max_new: int, stop_at: int | None, error_at: int | None) -> None:
        seed = len(self.limits)
        limit = min(max_new, CONTEXT - prompt_len)
        request = EngineRequest(
            stream_id=seed,
            input_ids=prompt_of(seed, prompt_len),
            sampling=SamplingParams(max_new_tokens=max_new, sampling_seed=seed),
        )
        if prompt_len >= CONTEXT or prompt_len + max(limit - 1, 0) > self.capacity:
            with pytest.raises(RequestError) as caught:
                self.driver.scheduler.add(request)
            assert caught.value.status == 400 and str(prompt_len) in caught.value.message
            return
        self.stop_at[seed], self.error_at[seed], self.limits[seed] = stop_at, error_at, limit
        self.driver.add(request)

    def check_plan(self, plan) -> None:
        if plan is None:
            return
        size = len(plan.prefill.input_ids)
        if self.chunk > 0:
            assert size <= min(self.chunk, MAX_PREFILL)
        else:
            assert size <= MAX_PREFILL or plan.prefill.count == 1

    def expected(self, seed: int) -> tuple[list[int], Finish]:
        """Undisturbed, this is what the stream gets."""
        tokens = []
        if self.limits[seed] == 0:
            return [], Finish.ERROR if self.error_at[seed] == 0 else Finish.LENGTH
        for index in range(self.limits[seed]):
            finish = self.finish_of(seed, index)
            if finish == Finish.ERROR:
                return tokens, finish
            tokens.append(token_of(seed, index))
            if finish == Finish.STOP:
                return tokens, finish
        return tokens, Finish.LENGTH

    def check_end(self) -> None:
        """After the last step."""
        self.driver.check_idle()
        for seed in self.limits:
            tokens, finish = self.expected(seed)
            got, end = self.driver.tokens[seed], self.driver.ends[seed]
            if end == Finish.ABORT or (end == Finish.ERROR and seed in self.touched_by_failure):
                assert got == tokens[: len(got)]
            else:
                assert (got, end) == (tokens, finish)


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        rows=st.integers(1, 6),
        page_size=st.sampled_from([1, 4, 16]),
        pool_tokens=st.sampled_from([16, 40, 64, 400]),
        chunk=st.sampled_from([-1, 3, 16]),
        grant_tokens=st.sampled_from([1, 4, 16]),
    )


request_shapes = st.tuples(
    st.one_of(st.integers(1, 20), st.integers(1, CONTEXT + 2)),  # prompt_len
    st.one_of(st.integers(0, 3), st.integers(0, 60)),  # max_new_tokens
    st.none() | st.integers(0, 20),  # stop at
    st.one_of(st.none(), st.none(), st.integers(0, 10)),  # error at
)


@pytest.mark.fuzz
@given(case=cases(), shapes=st.lists(request_shapes, max_size=20), run_ahead=st.integers(0, 2))
def test_every_stream_gets_its_tokens(case, shapes, run_ahead):
    for shape in shapes:
        case.add(*shape)
    case.driver.run(run_ahead=run_ahead)
    case.check_end()


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, aborts, launches, results and failures in any order."""

    @initialize(case=cases())
    def start(self, case):
        self.case = case
        self.driver = case.driver

    @rule(shapes=st.lists(request_shapes, min_size=1, max_size=5))
    def add(self, shapes):
        for shape in shapes:
            self.case.add(*shape)

    @rule(data=st.data())
    def abort(self, data):
        known = sorted(self.driver.tokens)
        ids = data.draw(st.lists(st.sampled_from([*known, 10**9]), max_size=4))
        alive = [sid for sid in ids if sid in known and sid not in self.driver.ends]
        self.driver.abort(ids)
        assert all(self.driver.ends[sid] == Finish.ABORT for sid in alive)

    @precondition(lambda self: len(self.driver.in_flight) <= 2)
    @rule(times=st.integers(1, 3))
    def launch(self, times):
        for _ in range(times):
            self.case.check_plan(self.driver.launch())

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def apply(self):
        self.driver.apply()

    @rule(rounds=st.integers(1, 12))
    def run_ahead(self, rounds):
        for _ in range(rounds):
            plan = self.driver.launch()
            self.case.check_plan(plan)
            while len(self.driver.in_flight) > (plan is not None):
                self.driver.apply()
            self.driver.scheduler.check()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def fail(self):
        outputs = self.driver.fail("the device fell over")
        self.case.touched_by_failure.update(outputs.stream_ids.tolist())
        for sid in outputs.stream_ids.tolist():
            assert self.driver.ends[sid] == Finish.ERROR and self.driver.errors[sid] == "the device fell over"

    @invariant()
    def conserved(self):
        scheduler = self.driver.scheduler
        scheduler.check()
        if not self.driver.in_flight:
            assert scheduler.table.num_used == scheduler.num_running, "zombies at rest"

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.run(run_ahead=1)
            self.case.check_end()


TestSchedulerMachine = pytest.mark.fuzz(SchedulerMachine.TestCase)
