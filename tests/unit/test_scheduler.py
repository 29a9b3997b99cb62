"""scheduler/: admission, chunks, grants, ends and log-probabilities, case by case."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from phalanx.config.groups import SchedulerConfig
from phalanx.core.errors import ConfigError, EngineError, RequestError
from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from phalanx.core.step import Finish, StepPlan, StepResult, TokenLogprobs
from phalanx.microbench import host
from phalanx.scheduler import Scheduler
from tests.unit.device_mirror import DeviceMirror, Driver, prompt_of, token_of


def make(seed: int, prompt_len: int, max_new: int, **more) -> EngineRequest:
    engine = {key: more.pop(key) for key in ("stop_ids", "logprobs") if key in more}
    sampling = SamplingParams(max_new_tokens=max_new, sampling_seed=seed, **more)
    return EngineRequest(stream_id=seed, input_ids=prompt_of(seed, prompt_len), sampling=sampling, **engine)


def scheduler_of(*, pool=1000, page_size=1, rows=8, context=512, **more) -> Scheduler:
    config = SchedulerConfig(max_running_requests=rows, context_length=context, **more)
    return Scheduler(config, num_pages=1 + pool // page_size, page_size=page_size)


def driver_of(finish_of=lambda seed, index: Finish.NONE, **more) -> Driver:
    scheduler = scheduler_of(**more)
    device = DeviceMirror(
        num_rows=scheduler.table.num_rows,
        num_pages=scheduler.pages.allocator.num_pages,
        page_size=scheduler.pages.page_size,
        context_length=scheduler.config.context_length,
        grant_tokens=scheduler.config.grant_tokens,
        finish_of=finish_of,
    )
    return Driver(scheduler, device)


def result_of(plan: StepPlan, **more) -> StepResult:
    size = len(plan.sample_rows)
    return StepResult(
        plan.step_id, np.arange(100, 100 + size, dtype=np.int32), np.zeros(size, dtype=np.uint8), **more
    )


# Requests that cannot run


@pytest.mark.parametrize("prompt_len", [64, 65, 640])
def test_a_prompt_that_fills_the_context_is_refused(prompt_len):
    scheduler = scheduler_of(context=64)
    with pytest.raises(RequestError, match=rf"{prompt_len} tokens.* 64 ") as caught:
        scheduler.add(make(1, prompt_len, 1))
    assert caught.value.status == 400 and not scheduler.has_work


def test_max_new_tokens_is_cut_to_the_context():
    driver = driver_of(context=64)
    driver.add(make(1, 63, 999_999))
    driver.add(make(2, 60, 999_999))
    driver.run(run_ahead=1)
    assert [len(driver.tokens[s]) for s in (1, 2)] == [1, 4]
    assert set(driver.ends.values()) == {Finish.LENGTH}
    driver.check_idle()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_request_beyond_the_pool_is_refused_and_the_next_is_served(page_size):
    driver = driver_of(pool=512, context=8192, page_size=page_size)
    with pytest.raises(RequestError, match=r"600 .* 512"):
        driver.scheduler.add(make(1, 600, 0))
    with pytest.raises(RequestError, match=r"500 .*500 .*999 .*512"):
        driver.scheduler.add(make(2, 500, 500))
    driver.add(make(3, 13, 500))  # 512 slots: the last token needs none
    driver.add(make(4, 1, 2))
    driver.run(run_ahead=1)
    assert len(driver.tokens[3]) == 500 and len(driver.tokens[4]) == 2
    driver.check_idle()


def test_other_bad_requests():
    scheduler = scheduler_of()
    scheduler.add(make(1, 3, 1))
    for request, message in (
        (make(1, 3, 1), "stream 1 "),
        (make(2, 0, 1), "0 tokens"),
        (make(2, 1, -1), "-1"),
        (make(2, 1, 1, stop_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1))), "17 stop token ids, at most 16"),
    ):
        with pytest.raises(RequestError, match=message):
            scheduler.add(request)
    scheduler.plan()
    with pytest.raises(RequestError, match="stream 1 "):
        scheduler.add(make(1, 3, 1))


def test_a_full_queue_answers_503():
    scheduler = scheduler_of(max_queued_requests=2)
    scheduler.add(make(1, 1, 1))
    scheduler.add(make(2, 1, 1))
    with pytest.raises(RequestError, match="2 requests are waiting, at most 2 may") as caught:
        scheduler.add(make(3, 1, 1))
    assert caught.value.status == 503
    scheduler.plan()
    scheduler.add(make(3, 1, 1))
    assert scheduler.num_queued == 1 and scheduler.num_running == 2


@pytest.mark.parametrize(
    "change",
    [
        {"schedule_policy": "lpm"},
        {"chunked_prefill_size": 0},
        {"max_running_requests": 0},
        {"context_length": 1},
        {"max_prefill_tokens": 0},
        {"grant_tokens": 0},
    ],
)
def test_bad_settings(change):
    config = msgspec.structs.replace(SchedulerConfig(max_running_requests=1, context_length=8), **change)
    with pytest.raises(ConfigError, match=next(iter(change)).replace("schedule_policy", "policy")):
        Scheduler(config, num_pages=10, page_size=1)


# The first plan


def test_the_plan_of_a_first_step():
    scheduler = scheduler_of(page_size=4, pool=40)
    scheduler.add(make(7, 5, 9, temperature=0.0, top_p=0.5, min_new_tokens=1, stop_ids=(3, 4)))
    scheduler.add(make(8, 4, 9, temperature=0.7, top_k=5, logit_bias={11: 2.0, 12: -1.0}))
    scheduler.add(make(9, 2, 1, temperature=1e300, top_k=10**12, frequency_penalty=0.5, stop_ids=(9,)))
    plan = scheduler.plan()
    entering, prefill, grants = plan.entering, plan.prefill, plan.grants
    assert entering.rows.tolist() == prefill.rows.tolist() == plan.sample_rows.tolist() == [1, 2, 3]
    assert len(plan.decode_rows) == 0 and plan.num_generated.tolist() == [0, 0, 0]
    assert entering.temperature.tolist() == [0, np.float32(0.7), np.finfo(np.float32).max]
    assert entering.top_p.tolist() == [0.5, 1, 1] and entering.top_k.tolist() == [-1, 5, 2**31 - 1]
    assert entering.frequency_penalty.tolist() == [0, 0, 0.5]
    assert entering.repetition_penalty.tolist() == [1, 1, 1]
    assert entering.presence_penalty.tolist() == entering.min_p.tolist() == [0, 0, 0]
    assert entering.min_new_tokens.tolist() == [1, 0, 0] and entering.seed.tolist() == [7, 8, 9]
    assert entering.prompt_lens.tolist() == [5, 4, 2] and entering.seed.dtype == np.int64
    assert entering.stop_indptr.tolist() == [0, 2, 2, 3] and entering.stop_ids.tolist() == [3, 4, 9]
    assert entering.bias_indptr.tolist() == [0, 0, 2, 2]
    assert entering.bias_ids.tolist() == [11, 12] and entering.bias_values.tolist() == [2, -1]
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "bias_values"):
        assert getattr(entering, name).dtype == np.float32
    assert prefill.starts.tolist() == [0, 0, 0] and prefill.lens.tolist() == [5, 4, 2]
    assert prefill.is_last.all() and len(prefill.input_ids) == 11 == plan.num_tokens
    assert prefill.slots.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17]
    # Row 1 decodes on in its second page; row 2's page is full; row 3 ends with this step.
    triples = zip(grants.rows.tolist(), grants.page_index.tolist(), grants.page_ids.tolist(), strict=True)
    assert list(triples) == [(1, 1, 2)]
    assert plan.needs_eager.tolist() == [True, True, True] and plan.logprobs is None
    scheduler.apply(plan, result_of(plan))
    plan = scheduler.plan()
    assert plan.decode_rows.tolist() == [1, 2] and plan.num_generated.tolist() == [1, 1]
    assert plan.needs_eager.tolist() == [False, True], "min_new_tokens is met, greedy ignores top_p"
    for array in (plan.decode_rows, plan.sample_rows, plan.num_generated, plan.grants.page_ids):
        assert array.dtype == np.int32
    triples = zip(plan.grants.rows, plan.grants.page_index, plan.grants.page_ids, strict=True)
    # A block is 4 pages, but the row reserved 3 in all; row 3 gave page 4 back.
    assert list(triples) == [(2, 1, 4), (2, 2, 5)]


def test_one_page_at_a_time_where_a_page_is_a_block():
    scheduler = scheduler_of(page_size=16, pool=160)
    scheduler.add(make(1, 16, 40))
    scheduler.apply(plan := scheduler.plan(), result_of(plan))
    granted = []
    while (plan := scheduler.plan()) is not None:
        granted.append(plan.grants.page_index.tolist())
        scheduler.apply(plan, result_of(plan))
    assert granted == [[1] if i == 0 else [2] if i == 16 else [3] if i == 32 else [] for i in range(39)]


# Who waits


def test_nothing_overtakes_the_head_of_the_queue():
    driver = driver_of(pool=40)
    driver.add(make(1, 10, 11))  # 20 of 40
    driver.add(make(2, 10, 21))  # 30: waits
    driver.add(make(3, 1, 2))  # would fit
    plan = driver.launch()
    assert plan.entering.seed.tolist() == [1]
    assert (driver.scheduler.num_running, driver.scheduler.num_queued) == (1, 2)
    driver.run(run_ahead=0)
    assert driver.device.entered == [1, 2, 3]
    driver.check_idle()


def test_whole_prompts_share_a_step_up_to_the_limit_and_a_longer_one_runs_alone():
    scheduler = scheduler_of(max_prefill_tokens=10)
    for seed, prompt_len in enumerate([4, 6, 1, 30, 2], start=1):
        scheduler.add(make(seed, prompt_len, 1))
    lens = []
    while (plan := scheduler.plan()) is not None:
        lens.append(plan.prefill.lens.tolist())
        assert plan.prefill.is_last.all()
        scheduler.apply(plan, result_of(plan))
    assert lens == [[4, 6], [1], [30], [2]]


def test_chunks_split_a_prompt_and_only_the_last_samples():
    scheduler = scheduler_of(chunked_prefill_size=4)
    for seed, prompt_len in enumerate([3, 6, 5], start=1):
        scheduler.add(make(seed, prompt_len, 1))
    steps = []
    while (plan := scheduler.plan()) is not None:
        p = plan.prefill
        steps.append((p.starts.tolist(), p.lens.tolist(), p.is_last.tolist(), plan.sample_rows.tolist()))
        scheduler.apply(plan, result_of(plan))
        scheduler.check()
    assert steps == [
        ([0, 0], [3, 1], [True, False], [1]),
        ([1], [4], [False], []),
        ([5, 0], [1, 3], [True, False], [2]),
        ([3], [2], [True], [1]),
    ]


def test_chunks_ride_along_with_decode_rows():
    driver = driver_of(chunked_prefill_size=4)
    driver.add(make(1, 2, 20))
    driver.launch()
    driver.add(make(2, 9, 2))
    tokens = []
    for _ in range(3):
        plan = driver.launch()
        tokens.append((plan.decode_rows.tolist(), len(plan.prefill.input_ids)))
    assert tokens == [([1], 4), ([1], 4), ([1], 1)]


# Ends


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_0_new_tokens_run_the_prompt_and_yield_none(run_ahead):
    driver = driver_of(finish_of=lambda seed, index: Finish.STOP if seed == 2 else Finish.NONE)
    driver.add(make(1, 5, 0))
    driver.add(make(2, 1, 0))
    driver.add(make(3, 1, 1))
    driver.run(run_ahead=run_ahead)
    assert driver.tokens == {1: [], 2: [], 3: [token_of(3, 0)]}
    assert set(driver.ends.values()) == {Finish.LENGTH}
    driver.check_idle()


def test_serial_use_never_leaves_a_row_behind():
    driver = driver_of(finish_of=lambda seed, index: Finish.STOP if index == seed else Finish.NONE)
    for seed in range(6):
        driver.add(make(seed, 3, 50))
    while driver.launch() is not None:
        driver.apply()
        assert driver.scheduler.table.num_used == driver.scheduler.num_running
    driver.check_idle()
    assert driver.tokens == {s: [token_of(s, i) for i in range(s + 1)] for s in range(6)}


def test_a_stopped_row_is_dropped_from_the_step_in_flight_and_freed_after_it():
    driver = driver_of(finish_of=lambda seed, index: Finish.STOP if index == 1 else Finish.NONE)
    driver.add(make(1, 3, 50))
    for _ in range(3):
        driver.launch()
    driver.apply()
    assert driver.apply().finish.tolist() == [Finish.STOP]
    stats = driver.scheduler.stats()
    assert stats["running"] == 0 and stats["pages_held"] == 19 and driver.scheduler.has_work
    assert driver.launch() is None
    assert len(driver.apply().stream_ids) == 0
    driver.check_idle()
    assert not driver.scheduler.has_work


def test_the_last_token_by_count_needs_no_further_step():
    driver = driver_of()
    driver.add(make(1, 3, 2))
    assert driver.launch() is not None and driver.launch() is not None
    assert driver.launch() is None, "both tokens are launched"
    driver.apply()
    assert driver.apply().finish.tolist() == [Finish.LENGTH]
    driver.check_idle()


def test_non_finite_logits_end_one_stream():
    driver = driver_of(finish_of=lambda s, i: Finish.ERROR if (s, i) == (1, 2) else Finish.NONE)
    driver.add(make(1, 3, 5))
    driver.add(make(2, 3, 5))
    driver.run(run_ahead=1)
    assert [len(driver.tokens[s]) for s in (1, 2)] == [2, 5]
    assert driver.ends == {1: Finish.ERROR, 2: Finish.LENGTH} and list(driver.errors) == [1]
    driver.check_idle()


@pytest.mark.parametrize("launches", [2, 3, 4, 5])
def test_abort_in_the_middle_of_a_prompt_and_just_after_it(launches):
    driver = driver_of(chunked_prefill_size=4)
    driver.add(make(1, 13, 100))  # 4 chunks
    for _ in range(launches):
        driver.launch()
    driver.abort([1])
    assert driver.tokens[1] == [] and driver.ends == {1: Finish.ABORT}
    driver.run(run_ahead=1)
    driver.check_idle()


def test_abort_of_a_queued_request_frees_the_head_of_the_queue():
    driver = driver_of(rows=1)
    for seed in (1, 2, 3):
        driver.add(make(seed, 3, 4))
    driver.launch()
    driver.abort([2, 2, 99])
    driver.run(run_ahead=1)
    assert driver.ends == {1: Finish.LENGTH, 2: Finish.ABORT, 3: Finish.LENGTH}
    driver.abort([1, 2, 3])
    driver.check_idle()


def test_two_hundred_aborted_streams_leave_nothing():
    driver = driver_of(rows=16)
    for seed in range(200):
        driver.add(make(seed, 5, 400))
    for seed in range(200):
        driver.launch()
        if seed % 3:
            driver.apply()
        driver.abort([seed])
    driver.run(run_ahead=1)
    driver.check_idle()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_tight_pool_gives_what_a_big_one_gives(page_size):
    outcomes = []
    for pool, run_ahead in ((1024, 0), (1024, 1), (100_000, 0)):
        driver = driver_of(pool=pool, page_size=page_size, rows=16)
        for seed in range(16):
            driver.add(make(seed, 32, 256))
        driver.run(run_ahead=run_ahead)
        driver.check_idle()
        outcomes.append((driver.tokens, driver.ends))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert all(len(t) == 256 for t in outcomes[0][0].values())


def test_a_failed_step_ends_its_streams_and_no_other():
    driver = driver_of(chunked_prefill_size=4)
    driver.add(make(1, 2, 9))
    driver.add(make(2, 9, 9))
    driver.launch()
    driver.add(make(3, 2, 3))
    outputs = driver.fail("out of memory")
    assert outputs.stream_ids.tolist() == [1, 2] and set(outputs.tokens.tolist()) == {-1}
    assert outputs.errors == ((1, 500, "out of memory"), (2, 500, "out of memory"))
    driver.run(run_ahead=1)
    assert driver.tokens[3] == [token_of(3, i) for i in range(3)]
    driver.check_idle()


def test_results_out_of_order_or_of_the_wrong_shape_are_refused_and_change_nothing():
    scheduler = scheduler_of()
    scheduler.add(make(1, 2, 9))
    first, second = scheduler.plan(), scheduler.plan()
    with pytest.raises(EngineError, match="step 2 came back, the oldest in flight is 1"):
        scheduler.apply(second, result_of(second))
    with pytest.raises(EngineError, match="result of step 2"):
        scheduler.apply(first, result_of(second))
    short = StepResult(1, np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8))
    with pytest.raises(EngineError, match="sampled 1 rows"):
        scheduler.apply(first, short)
    assert scheduler.apply(first, result_of(first)).tokens.tolist() == [100]
    scheduler.check()


def test_outputs_do_not_share_memory_with_the_result():
    scheduler = scheduler_of()
    scheduler.add(make(1, 2, 9))
    plan = scheduler.plan()
    result = result_of(plan)
    outputs = scheduler.apply(plan, result)
    result.tokens[:] = 0
    result.finish[:] = 1
    assert outputs.tokens.tolist() == [100] and outputs.finish.tolist() == [0]


def test_an_idle_scheduler_plans_nothing():
    scheduler = scheduler_of()
    assert scheduler.plan() is None and not scheduler.has_work and scheduler.pending_outputs() is None
    with pytest.raises(EngineError, match="the oldest in flight is none"):
        scheduler.fail(StepPlan(1, *[None] * 7), "x")
    scheduler.check()


def test_check_sees_a_page_in_two_rows():
    scheduler = scheduler_of()
    scheduler.add(make(1, 2, 9))
    scheduler.add(make(2, 2, 9))
    scheduler.plan()
    scheduler.check()
    width = scheduler.pages.max_pages_per_row
    scheduler.pages._lists[2 * width] = scheduler.pages._lists[width]
    with pytest.raises(AssertionError, match="4 pages in the rows' lists, 3 of them different"):
        scheduler.check()


# Log-probabilities


def values_at(index, *, top_lens, ids_lens) -> TokenLogprobs:
    """Made-up values that name their position: 10 * position + j."""
    top_indptr = np.concatenate(([0], np.cumsum(top_lens))).astype(np.int32)
    ids_indptr = np.concatenate(([0], np.cumsum(ids_lens))).astype(np.int32)
    top = np.array([10 * q + j for q, n in enumerate(top_lens) for j in range(n)], dtype=np.int32)
    ids = np.array([10 * q + j for q, n in enumerate(ids_lens) for j in range(n)], dtype=np.int32)
    return TokenLogprobs(
        index=np.array(index, dtype=np.int32),
        token_ids=np.arange(len(index), dtype=np.int32) * 10,
        logprobs=-np.arange(len(index), dtype=np.float32),
        top_indptr=top_indptr,
        top_ids=top,
        top_logprobs=-top.astype(np.float32),
        ids_indptr=ids_indptr,
        ids=ids,
        ids_logprobs=-ids.astype(np.float32),
    )


def test_rows_that_want_logprobs_are_named_with_what_they_want():
    scheduler = scheduler_of()
    scheduler.add(make(1, 2, 9))
    scheduler.add(make(2, 2, 9, logprobs=LogprobParams(top_k=2, token_ids=(5, 6, 7))))
    scheduler.add(make(3, 2, 2, logprobs=LogprobParams()))
    scheduler.add(make(4, 2, 9, logprobs=LogprobParams(top_k=1, token_ids=(8,))))
    scheduler.add(make(5, 2, 0, logprobs=LogprobParams(top_k=1)))
    seen = []
    for _ in range(3):
        plan = scheduler.plan()
        lp = plan.logprobs
        seen.append((lp.sample_index.tolist(), lp.top_k.tolist(), lp.ids_indptr.tolist(), lp.ids.tolist()))
        assert plan.needs_eager[lp.sample_index].all() and plan.needs_eager.sum() == len(lp.sample_index)
        assert len(lp.prompt_chunk) == 0
        scheduler.apply(plan, result_of(plan))
    assert seen[0] == seen[1] == ([1, 2, 3], [2, 0, 1], [0, 3, 3, 4], [5, 6, 7, 8])
    assert seen[2] == ([1, 2], [2, 1], [0, 3, 4], [5, 6, 7, 8])
    scheduler.abort([2, 4])
    assert scheduler.plan().logprobs is None


def test_logprobs_follow_their_streams_when_others_drop_out():
    scheduler = scheduler_of()
    for seed in (1, 2, 3):
        scheduler.add(make(seed, 2, 9, logprobs=LogprobParams(top_k=seed)))
    first = scheduler.plan()
    scheduler.abort([1])
    values = values_at([0, 1, 2], top_lens=[1, 2, 3], ids_lens=[2, 0, 1])
    outputs = scheduler.apply(first, result_of(first, logprobs=values))
    assert outputs.stream_ids.tolist() == [2, 3] and outputs.tokens.tolist() == [101, 102]
    lp = outputs.logprobs
    assert lp.index.tolist() == [0, 1] and lp.token_ids.tolist() == [10, 20]
    assert lp.logprobs.tolist() == [-1, -2]
    assert lp.top_indptr.tolist() == [0, 2, 5] and lp.top_ids.tolist() == [10, 11, 20, 21, 22]
    assert lp.top_logprobs.tolist() == [-10, -11, -20, -21, -22]
    assert lp.ids_indptr.tolist() == [0, 0, 1] and lp.ids.tolist() == [20]
    assert lp.ids_logprobs.tolist() == [-20]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        # chunks of 4 over 10 positions: [0, 4), [4, 8), [8, 10)
        (0, [(1, [1, 2, 3, 4]), (5, [5, 6, 7, 8]), (9, [9])]),
        (1, [(1, [1, 2, 3, 4]), (5, [5, 6, 7, 8]), (9, [9])]),
        (4, [(4, [4]), (5, [5, 6, 7, 8]), (9, [9])]),
        (6, [None, (6, [6, 7, 8]), (9, [9])]),
        (9, [None, None, (9, [9])]),
    ],
)
def test_prompt_logprobs_of_a_chunked_prompt_are_complete(start, expected):
    scheduler = scheduler_of(chunked_prefill_size=4)
    request = make(1, 10, 1, logprobs=LogprobParams(prompt_start=start, top_k=3, token_ids=(1, 2)))
    scheduler.add(request)
    for want in expected:
        plan = scheduler.plan()
        lp = plan.logprobs
        if want is None:
            assert lp is None
        else:
            first, positions = want
            assert lp.prompt_chunk.tolist() == [0] and lp.prompt_start.tolist() == [first]
            assert lp.prompt_targets.tolist() == request.input_ids[positions].tolist()
            assert lp.prompt_indptr.tolist() == [0, len(positions)]
            assert lp.prompt_top_k.tolist() == [3] and lp.prompt_ids.tolist() == [1, 2]
            assert lp.prompt_ids_indptr.tolist() == [0, 2]
        size = 0 if want is None else len(want[1])
        values = values_at([0] * size, top_lens=[3] * size, ids_lens=[2] * size) if size else None
        outputs = scheduler.apply(plan, result_of(plan, prompt_logprobs=values))
        if plan.prefill.is_last[0]:
            assert (outputs.tokens.tolist(), outputs.finish.tolist()) == ([100], [Finish.LENGTH])
        elif size:
            assert (outputs.tokens.tolist(), outputs.finish.tolist()) == ([-1], [Finish.NONE])
        else:
            assert len(outputs.stream_ids) == 0
        if size:
            assert outputs.stream_ids.tolist() == [1]
            assert outputs.prompt_logprobs.index.tolist() == [0] * size
    assert not scheduler.has_work


def test_prompt_logprobs_point_at_the_right_streams():
    scheduler = scheduler_of(chunked_prefill_size=8)
    wants = LogprobParams(prompt_start=0)
    scheduler.add(make(1, 1, 9))
    scheduler.apply(plan := scheduler.plan(), result_of(plan))
    scheduler.add(make(2, 2, 9, logprobs=wants))
    scheduler.add(make(3, 3, 0, logprobs=wants))
    scheduler.add(make(4, 9, 9, logprobs=wants))
    plan = scheduler.plan()
    assert plan.decode_rows.tolist() == [1] and plan.prefill.lens.tolist() == [2, 3, 3]
    assert plan.logprobs.prompt_chunk.tolist() == [0, 1, 2]
    assert plan.logprobs.prompt_indptr.tolist() == [0, 1, 3, 6]
    values = values_at([0, 1, 1, 2, 2, 2], top_lens=[0] * 6, ids_lens=[0] * 6)
    scheduler.abort([2])
    outputs = scheduler.apply(plan, result_of(plan, prompt_logprobs=values))
    assert outputs.stream_ids.tolist() == [1, 3, 4] and outputs.tokens.tolist() == [100, -1, -1]
    assert outputs.finish.tolist() == [Finish.NONE, Finish.LENGTH, Finish.NONE]
    assert outputs.prompt_logprobs.index.tolist() == [1, 1, 2, 2, 2]
    assert outputs.prompt_logprobs.token_ids.tolist() == [10, 20, 30, 40, 50]


def test_a_one_token_prompt_has_no_prompt_logprobs():
    scheduler = scheduler_of()
    scheduler.add(make(1, 1, 3, logprobs=LogprobParams(prompt_start=0)))
    plan = scheduler.plan()
    assert plan.logprobs.sample_index.tolist() == [0] and len(plan.logprobs.prompt_chunk) == 0


# The benchmark


@pytest.mark.parametrize("flags", [[], ["--overlap", "--stop-rate", "0.05", "--page-size", "16", "--gc-off"]])
def test_bench_host_reports_every_row(flags, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    host.add_arguments(parser)
    args = parser.parse_args(["--running", "32", "--steps", "20", "--warm-up-steps", "5", *flags])
    assert host.run(args) == 0
    report = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] == 20 and 28 <= report["rows_per_step"] <= 32
    assert report["us_per_row_step"] > 0 and report["overlap"] == bool(flags)


def test_bench_host_refuses_what_cannot_be():
    import argparse

    parser = argparse.ArgumentParser()
    host.add_arguments(parser)
    with pytest.raises(ConfigError, match="--running must be at least 1, got 0"):
        host.run(parser.parse_args(["--running", "0"]))
    with pytest.raises(ConfigError, match="--stop-rate"):
        host.run(parser.parse_args(["--stop-rate", "1.5"]))
