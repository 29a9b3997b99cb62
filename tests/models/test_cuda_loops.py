"""The CUDA engine in its loop: launches that wait for nothing, loops against each other, limits, failures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from phalanx.attention.base import AttentionBackend, ForwardBatch
from phalanx.config.groups import (
    SchedulerConfig,
    Settings,
)
from phalanx.core.errors import EngineError
from phalanx.core.step import Finish
from phalanx.engine.warm_up import most_prompt_tokens, padding_prompts, prompt_sizes
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder
from phalanx.runtime.trial import run_trial
from phalanx.runtime.worker import Worker
from phalanx.scheduler.scheduler import Scheduler
from tests.models.cuda_rig import (
    CONFIG,
    GREEDY,
    HAS_CUDA,
    KINDS,
    PROMPTS,
    Rig,
    assert_own_ends,
    cuda_only,
    device,
    dummy_decoder,
    make_engine,
    models,
    requests_of,
    run_engine,
    run_worker,
    same_share,
    settings,
)

__all__ = ["device", "models"]  # fixtures
pytestmark = [pytest.mark.gpu] if HAS_CUDA else []


@contextmanager
def no_synchronisation() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@cuda_only
@pytest.mark.parametrize("graph", [True, False])
def test_launching_never_waits_for_the_device(models, graph: bool) -> None:
    """Steps of every kind: entering rows, chunks, grants, decode, filters, penalties, log-probabilities."""
    rig = Rig(settings(CONFIG, graph=graph), models["bfloat16"])
    for round_ in range(2):  # the first one loads what PyTorch and Triton load lazily
        first = 1 + 10 * round_
        rows = list(range(first, first + len(KINDS)))
        for row, params in zip(rows, KINDS, strict=True):
            rig.hand.add(row, PROMPTS[row % 4], params)
        chunks = [(row, len(PROMPTS[row % 4])) for row in rows]
        plans = [rig.hand.plan(chunks=chunks[:3]), rig.hand.plan(decode=rows[:3], chunks=chunks[3:])]
        plans += [rig.hand.plan(decode=rows) for _ in range(9)]
        handles = []
        for plan in plans:
            if round_ == 0:
                handles.append(rig.engine.launch(plan))
            else:
                with no_synchronisation():
                    handles.append(rig.engine.launch(plan))
        for handle in handles:
            assert (handle.result().finish == Finish.NONE).all()


Change = Callable[[Settings], Settings]


def with_engine(**changes: object) -> Change:
    return lambda s: msgspec.structs.replace(s, engine=msgspec.structs.replace(s.engine, **changes))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("serial", with_engine(overlap=False)),
        ("eager", with_engine(cuda_graph=False, cuda_graph_max_bs=0)),
        ("small graphs", with_engine(cuda_graph_max_bs=8)),  # B29: larger steps run eagerly
    ],
)
def test_loops_and_graphs_give_the_same_tokens(models, name: str, change: Change) -> None:
    """In fp32: which rows share a step differs, and with it the last bits of the matrix products."""
    chosen = settings(CONFIG, dtype="float32")
    requests = requests_of(90, seed=1, logprobs=True)
    want, ends = run_worker(chosen, models["float32"], requests, 300)
    got, other_ends = run_worker(change(chosen), models["float32"], requests, 300)
    assert same_share(want, got) >= 0.97, name
    assert name == "eager" or sum(ends[s] == other_ends[s] for s in ends) >= 87
    assert len(ends) == 90 and all(tokens for tokens in want.values())


def test_a_trial_leaves_nothing_behind(models) -> None:
    chosen = settings(CONFIG)
    requests = requests_of(40, seed=4, logprobs=True)
    want = run_worker(chosen, models["bfloat16"], requests, 300)
    engine = make_engine(chosen, models["bfloat16"], 300)
    run_trial(engine, chosen, 300, engine.launch_times)
    assert run_engine(engine, chosen, requests, 300) == want


def test_alone_equals_in_a_batch(models) -> None:
    chosen = settings(CONFIG, dtype="float32", rows=64)
    requests = requests_of(64, seed=2)
    together, _ = run_worker(chosen, models["float32"], requests, 1600)
    alone = {}
    for request in requests[:12]:
        alone |= run_worker(chosen, models["float32"], [request], 1600)[0]
    assert same_share(alone, together) >= 11 / 12


@pytest.mark.parametrize(("page_size", "dtype"), [(1, "bfloat16"), (16, "bfloat16"), (4, "float16")])
def test_many_requests_through_a_small_pool(models, page_size: int, dtype: str) -> None:
    """B06: more buckets than rows. Every request ends for its own reason, every page comes back."""
    model = models["bfloat16"]
    if dtype == "float16":
        with torch.inference_mode():
            model = dummy_decoder(dtype)
    chosen = settings(CONFIG, dtype=dtype, rows=100, page_size=page_size, chunk=128)
    requests = requests_of(2000 if HAS_CUDA else 300, seed=3, max_new=20)
    tokens, ends = run_worker(chosen, model, requests, num_pages=1200 // page_size + 1)
    assert_own_ends(requests, tokens, ends)


def test_a_step_that_cannot_be_launched_harms_no_other(models) -> None:
    rig = Rig(settings(CONFIG), models["bfloat16"])
    reference = Rig(settings(CONFIG), models["bfloat16"])
    for each in (rig, reference):
        each.hand.add(1, PROMPTS[0], GREEDY)
        each.step(chunks=[(1, 5)])
    plan = rig.hand.plan(decode=[1])
    spoiled = type(plan)(
        **{name: getattr(plan, name) for name in plan.__slots__}
        | {"decode_rows": plan.decode_rows + 50, "sample_rows": plan.sample_rows + 50}
    )
    with pytest.raises(EngineError, match="decode row 51"):
        rig.engine.launch(spoiled).result()
    got = [rig.engine.launch(plan).result().tokens[0]] + [rig.step(decode=[1]).tokens[0] for _ in range(5)]
    assert got == [reference.step(decode=[1]).tokens[0] for _ in range(6)]


class NarrowModel:
    """Runs out of memory in steps of more than 64 tokens."""

    def __init__(self, model: Decoder) -> None:
        self._model, self.logits = model, model.logits
        self.sizes: list[int] = []

    def forward(self, batch: ForwardBatch, pool: KVPool, attn: AttentionBackend) -> torch.Tensor:
        self.sizes.append(len(batch.input_ids))
        if len(batch.input_ids) > 64:
            raise torch.OutOfMemoryError("no memory")
        return self._model.forward(batch, pool, attn)


def test_prompts_of_all_sizes_are_tried_before_the_first_request(models, caplog) -> None:
    narrow = NarrowModel(models["bfloat16"])
    rig = Rig(settings(CONFIG, graph=False, chunk=300), narrow)
    assert [size for size in narrow.sizes if size > 64] == [300, 256, 128]
    assert [record.args for record in caplog.records if "does not fit" in record.message] == [
        (300,), (256,), (128,),
    ]  # fmt: skip
    rig.hand.add(1, PROMPTS[0], GREEDY)
    assert rig.step(chunks=[(1, 5)]).finish.tolist() == [Finish.NONE]


@pytest.mark.parametrize(
    ("rows", "chunk", "max_prefill", "num_slots", "most"),
    [
        (64, 512, 16384, 9000, 512),
        (64, 8192, 1000, 9000, 1000),
        (64, -1, 1000, 9000, 1000),
        (64, -1, 50, 9000, 95),  # a longer prompt runs alone
        (64, -1, 10**9, 9000, 64 * 95),  # no more than all rows hold
        (64, 10**9, 10**9, 600, 600),  # nor than the pool
    ],
)
def test_no_step_larger_than_can_be_is_tried(rows, chunk, max_prefill, num_slots, most) -> None:
    config = SchedulerConfig(
        max_running_requests=rows,
        context_length=96,
        max_prefill_tokens=max_prefill,
        chunked_prefill_size=chunk,
    )
    assert most_prompt_tokens(config, num_slots) == most


def test_log_probabilities_that_fail_end_the_requests_of_their_step_alone(models) -> None:
    chosen = settings(CONFIG, rows=4)
    engine = make_engine(chosen, models["bfloat16"], 200)
    read, failures = engine._logprobs._read, [torch.OutOfMemoryError("no memory")]

    def once(*args: object) -> object:
        if failures:
            raise failures.pop()
        return read(*args)

    engine._logprobs._read = once
    worker = Worker(Scheduler(chosen.scheduler, num_pages=200, page_size=4), engine, overlap=True)
    requests = requests_of(7, seed=5, max_new=6, logprobs=True)
    for request in requests:
        worker.add(request)
    ends, errors = {}, {}
    while worker.busy:
        for outputs in worker.step():
            ends |= dict(zip(outputs.stream_ids.tolist(), outputs.finish.tolist(), strict=True))
            errors |= {stream: message for stream, _, message in outputs.errors}
    failed = [stream for stream, end in ends.items() if end == Finish.ERROR]
    assert 0 in failed and len(failed) < 7 and set(errors) == set(failed)
    assert set(errors.values()) == {"step 1 failed: OutOfMemoryError: no memory"}
    assert {ends[stream] for stream in range(7)} <= {Finish.ERROR, Finish.STOP, Finish.LENGTH}
    worker.scheduler.check()


def test_sizes_and_shapes_of_padding_prompts() -> None:
    assert prompt_sizes(8192) == [1 << n for n in range(14)]
    assert prompt_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert prompt_sizes(4) == [1, 2, 4] and prompt_sizes(1) == [1]
    plan = padding_prompts(300, 128)
    assert plan.prefill.lens.tolist() == [128, 128, 44] and plan.prefill.is_last.tolist() == [0, 0, 1]
    assert len(plan.prefill.input_ids) == len(plan.prefill.slots) == 300 and not plan.prefill.slots.any()
    assert padding_prompts(256, 128).prefill.lens.tolist() == [128, 128]
