"""The CUDA engine on CPU tensors: any requests, arrivals, aborts and settings give the same streams.

The CPU engine, serial and with room for everything, says what each stream must get.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.attention.registry import create_attention
from phalanx.config.groups import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ModelSource,
    SchedulerConfig,
    ServerConfig,
    Settings,
)
from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepOutputs, StepPlan, TokenLogprobs
from phalanx.engine.cuda import CudaEngine
from phalanx.engine.engine import Engine, Model
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder
from phalanx.runtime.worker import Worker
from phalanx.scheduler.scheduler import Scheduler
from tests.models.exact_model import CONFIG, VOCAB, ExactModel
from tests.models.stand_in_cuda import stand_in
from tests.unit.test_engine import CONFIG as DECODER_CONFIG
from tests.unit.test_engine import decisive_decoder

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU"),
]
CPU = torch.device("cpu")
CONTEXT = 40
# The token, the alternatives and the asked-for ids, and the log-probabilities of all of these.
Position = tuple[int, list[int], list[int], list[float]]


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with stand_in():
        yield


@dataclass(frozen=True)
class Wish:
    """A request, and when things happen to it: at which call of `Worker.step` it comes and is aborted."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    logprobs: LogprobParams | None
    arrives: int = 0
    aborted: int | None = None

    def request(self, stream: int) -> EngineRequest:
        prompt = np.array(self.prompt, np.int32)
        return EngineRequest(stream, prompt, self.params, stop_ids=self.stop_ids, logprobs=self.logprobs)

    @property
    def num_tokens(self) -> int:
        """Room that it takes in the pool."""
        new = min(self.params.max_new_tokens or 0, CONTEXT - len(self.prompt))
        return len(self.prompt) + max(new - 1, 0)


@dataclass(frozen=True)
class Shape:
    """How the engine runs. spare_tokens: room in the pool beyond the largest request."""

    rows: int = 8
    page_size: int = 4
    chunk: int = -1
    max_prefill: int = 300
    grant_tokens: int = 16
    graph_rows: int = 0
    indices: str | None = None
    overlap: bool = False
    spare_tokens: int = 1000

    def settings(self, config: ModelConfig) -> Settings:
        return Settings(
            source=ModelSource(name="exact", load_format="dummy", path="exact", tokenizer_path="dummy"),
            model=config,
            cache=CacheConfig(
                page_size=self.page_size, max_total_tokens=None, mem_fraction_static=0.5, dtype="float32"
            ),
            scheduler=SchedulerConfig(
                max_running_requests=self.rows,
                context_length=CONTEXT,
                max_prefill_tokens=self.max_prefill,
                chunked_prefill_size=self.chunk,
                grant_tokens=self.grant_tokens,
            ),
            engine=EngineConfig(
                device="cuda",
                dtype="float32",
                attention_backend="flashinfer" if self.indices else "triton",
                overlap=self.overlap,
                cuda_graph=self.graph_rows > 0,
                cuda_graph_max_bs=min(self.graph_rows, self.rows),
                kv_indices_backend=self.indices,
                random_seed=0,
            ),
            server=ServerConfig(host="", port=0, served_model_name="exact"),
        )


@dataclass
class Stream:
    """What one stream was told."""

    tokens: list[int] = field(default_factory=list)
    end: Finish | None = None
    error: str | None = None
    logprobs: list[Position] = field(default_factory=list)
    prompt_logprobs: list[Position] = field(default_factory=list)


def positions_of(found: TokenLogprobs | None) -> Iterator[tuple[int, Position]]:
    """Each position with its index."""
    if found is None:
        return
    for i, index in enumerate(found.index.tolist()):
        top = slice(found.top_indptr[i], found.top_indptr[i + 1])
        ids = slice(found.ids_indptr[i], found.ids_indptr[i + 1])
        yield (
            index,
            (
                int(found.token_ids[i]),
                found.top_ids[top].tolist(),
                found.ids[ids].tolist(),
                [float(found.logprobs[i]), *found.top_logprobs[top], *found.ids_logprobs[ids]],
            ),
        )


class Streams(dict[int, Stream]):
    """Everything that came out, by stream id. Nothing may come after an end."""

    def take(self, outputs: StepOutputs | None) -> None:
        if outputs is None:
            return
        ids = outputs.stream_ids.tolist()
        assert len(set(ids)) == len(ids)
        for stream in ids:
            assert self[stream].end is None, "an output after the end"
        for index, position in positions_of(outputs.logprobs):
            self[ids[index]].logprobs.append(position)
        for index, position in positions_of(outputs.prompt_logprobs):
            self[ids[index]].prompt_logprobs.append(position)
        for stream, token, finish in zip(ids, outputs.tokens.tolist(), outputs.finish.tolist(), strict=True):
            if token >= 0:
                self[stream].tokens.append(token)
            if finish != Finish.NONE:
                self[stream].end = Finish(finish)
        for stream, status, message in outputs.errors:
            assert status == 500
            self[stream].error = message


class Reference:
    """The CPU engine, serial, prompts whole, with a row and pages for every request."""

    ROWS = 40

    def __init__(self, model: Model, config: ModelConfig = CONFIG) -> None:
        shape = Shape(rows=self.ROWS, max_prefill=16384)
        num_pages = self.ROWS * CONTEXT // 4 + 1
        pool = KVPool(config, num_pages=num_pages, page_size=4, dtype=torch.float32, device=CPU)
        attn = create_attention("torch_native", config)
        self.engine = Engine(shape.settings(config), model, pool, attn, CPU)
        scheduler = Scheduler(shape.settings(config).scheduler, num_pages=num_pages, page_size=4)
        self._worker = Worker(scheduler, self.engine, overlap=False)

    def run(self, wishes: list[Wish]) -> Streams:
        streams = Streams({stream: Stream() for stream in range(len(wishes))})
        for stream, wish in enumerate(wishes):
            self._worker.add(wish.request(stream))
        while self._worker.busy:
            for outputs in self._worker.step():
                streams.take(outputs)
        return streams


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    found = Reference(ExactModel(CONTEXT))
    yield found
    found.engine.close()


@pytest.fixture(scope="module")
def decoder() -> Iterator[tuple[Decoder, Reference]]:
    """A real model for both engines."""
    with torch.inference_mode():
        model = decisive_decoder()
    found = Reference(model, DECODER_CONFIG)
    yield model, found
    found.engine.close()


class Spoiling:
    """An engine whose steps fail where `spoiled` says: at the n-th launch, in that part of the model."""

    def __init__(self, engine: CudaEngine, model: ExactModel, spoiled: dict[int, str]) -> None:
        self._engine, self._model, self._spoiled = engine, model, spoiled
        self.num_launched = 0

    def launch(self, plan: StepPlan) -> object:
        self._model.fail_in = self._spoiled.get(self.num_launched)
        self.num_launched += 1
        try:
            return self._engine.launch(plan)
        finally:
            self._model.fail_in = None


class Case:
    """An engine of this shape, and a worker that drives it."""

    def __init__(
        self,
        shape: Shape,
        wishes: list[Wish],
        spoiled: dict[int, str] | None = None,
        *,
        decoder: Decoder | None = None,
    ) -> None:
        self.wishes = wishes
        config = CONFIG if decoder is None else DECODER_CONFIG
        largest = max((wish.num_tokens for wish in wishes), default=1)
        num_pages = 1 + -(-(largest + shape.spare_tokens) // shape.page_size)
        self.num_pages = num_pages
        chosen, model = shape.settings(config), ExactModel(CONTEXT)
        pool = KVPool(config, num_pages=num_pages, page_size=shape.page_size, dtype=torch.float32, device=CPU)
        attn = create_attention("triton", config)
        self.engine = CudaEngine(chosen, decoder or model, pool, attn, CPU)
        self.engine.warm_up(progress=False)
        self.scheduler = Scheduler(chosen.scheduler, num_pages=num_pages, page_size=shape.page_size)
        launcher = Spoiling(self.engine, model, spoiled or {})
        self.worker = Worker(
            self.scheduler, launcher, overlap=shape.overlap, launch_times=self.engine.launch_times
        )
        self.streams = Streams({stream: Stream() for stream in range(len(wishes))})

    def run(self) -> Streams:
        now, last = 0, max((wish.arrives for wish in self.wishes), default=0)
        while self.worker.busy or now <= last:
            for stream, wish in enumerate(self.wishes):
                if wish.arrives == now:
                    self.worker.add(wish.request(stream))
            gone = [stream for stream, wish in enumerate(self.wishes) if wish.aborted == now]
            self.worker.abort(gone)
            self.streams.take(self.worker.pending_outputs())
            for outputs in self.worker.step():
                self.streams.take(outputs)
            self.scheduler.check()
            now += 1
            assert now < 10000, "this never ends"
        stats = self.worker.stats()
        assert stats["pages_free"] == stats["pages_total"] == self.num_pages - 1
        assert (stats["pages_held"], stats["pages_reserved"]) == (0, 0)
        assert stats["rows_free"] == stats["rows_total"]
        return self.streams


def assert_same_positions(got: list[Position], want: list[Position]) -> None:
    assert [position[:3] for position in got] == [position[:3] for position in want]
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours[3], theirs[3], atol=1e-5)


def assert_beginning(got: Stream, want: Stream) -> None:
    """What a stream was told before it was cut short."""
    assert got.tokens == want.tokens[: len(got.tokens)]
    assert_same_positions(got.logprobs, want.logprobs[: len(got.logprobs)])
    assert_same_positions(got.prompt_logprobs, want.prompt_logprobs[: len(got.prompt_logprobs)])


def assert_streams(case: Case, got: Streams, want: Streams) -> None:
    for stream, wish in enumerate(case.wishes):
        ours, theirs = got[stream], want[stream]
        if ours.end is Finish.ABORT:
            assert wish.aborted is not None
            assert_beginning(ours, theirs)
        elif ours.error is not None:
            assert ours.end is Finish.ERROR and "spoiled in" in ours.error
            assert_beginning(ours, theirs)
        else:
            assert (ours.tokens, ours.end) == (theirs.tokens, theirs.end)
            assert_beginning(ours, theirs)
            assert len(ours.logprobs) == len(theirs.logprobs)
            assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)


KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.7, "presence_penalty": 0.9, "repetition_penalty": 0.8},
    {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -3.0}},
    {"temperature": 1.0, "logit_bias": {VOCAB - 1: 5.0}, "top_k": 1},
    {"temperature": 0.0, "min_new_tokens": 3},
    {"temperature": 1.5, "min_new_tokens": 6, "top_k": 8},
]


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    length = draw(st.one_of(st.integers(1, 9), st.integers(1, CONTEXT - 1), st.just(CONTEXT - 1)))
    seed = draw(st.integers(0, 2**31))
    prompt = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    max_new = draw(st.one_of(st.integers(0, 2), st.integers(0, 12), st.integers(0, 2 * CONTEXT)))
    kind = dict(draw(st.sampled_from(KINDS)))
    kind["min_new_tokens"] = min(int(kind.get("min_new_tokens", 0)), max_new)
    params = SamplingParams(max_new_tokens=max_new, sampling_seed=draw(st.integers(-5, 2**40)), **kind)
    tokens = st.integers(0, VOCAB - 1)
    logprobs = st.builds(
        LogprobParams,
        prompt_start=st.integers(-1, length),
        top_k=st.integers(0, 3),
        token_ids=st.lists(tokens, max_size=3).map(tuple),
    )
    arrives = draw(st.one_of(st.just(0), st.integers(0, 30)))
    delay = draw(st.one_of(st.none(), st.none(), st.integers(0, 20)))
    return Wish(
        prompt=prompt,
        params=params,
        stop_ids=tuple(draw(st.one_of(st.just([7]), st.lists(tokens, max_size=16)))),
        logprobs=draw(st.one_of(st.none(), st.none(), logprobs)),
        arrives=arrives,
        aborted=None if delay is None else arrives + delay,
    )


edges = st.sampled_from([1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 25])
shapes = st.builds(
    Shape,
    rows=edges,
    page_size=st.sampled_from([1, 1, 2, 4, 4, 16, 64]),
    chunk=st.sampled_from([-1, -1, 1, 3, 4, 8, 16, 17, 100, 8192]),
    max_prefill=st.sampled_from([1, 6, 50, 300]),
    grant_tokens=st.sampled_from([1, 4, 16, 16]),
    graph_rows=st.one_of(st.just(0), edges, st.just(100)),
    indices=st.sampled_from([None, None, "fused", "naive", "torch"]),
    overlap=st.booleans(),
    spare_tokens=st.sampled_from([0, 20, 100, 1000]),
)


@given(shape=shapes, all_wishes=st.lists(wishes(), max_size=Reference.ROWS))
def test_every_stream_gets_what_the_cpu_engine_gives_it(
    reference: Reference, shape: Shape, all_wishes: list[Wish]
) -> None:
    case = Case(shape, all_wishes)
    got = case.run()
    assert_streams(case, got, reference.run(all_wishes))
    assert all(stream.error is None for stream in got.values())


failures = st.dictionaries(
    st.integers(0, 30), st.sampled_from(["forward", "stored", "logits"]), min_size=1, max_size=3
)


@given(shape=shapes, all_wishes=st.lists(wishes(), min_size=1, max_size=25), spoiled=failures)
def test_steps_that_fail_end_their_own_streams_alone(
    reference: Reference, shape: Shape, all_wishes: list[Wish], spoiled: dict[int, str]
) -> None:
    case = Case(shape, all_wishes, spoiled)
    assert_streams(case, case.run(), reference.run(all_wishes))


greedy_wishes = st.builds(
    Wish,
    prompt=st.lists(st.integers(0, DECODER_CONFIG.vocab_size - 1), min_size=1, max_size=CONTEXT - 1),
    params=st.integers(0, 25).map(
        lambda limit: SamplingParams(temperature=0, max_new_tokens=limit, sampling_seed=0)
    ),
    stop_ids=st.just((7,)),
    logprobs=st.sampled_from([LogprobParams(), LogprobParams(prompt_start=0), LogprobParams(prompt_start=5)]),
    arrives=st.one_of(st.just(0), st.integers(0, 15)),
)


@settings(max_examples=settings().max_examples // 4)
@given(shape=shapes, all_wishes=st.lists(greedy_wishes, max_size=15))
def test_a_decoder_says_the_same_on_both_engines(
    decoder: tuple[Decoder, Reference], shape: Shape, all_wishes: list[Wish]
) -> None:
    """The last bits of its products depend on the batch: tokens as likely as each other may change places."""
    model, reference = decoder
    got = Case(replace(shape, indices=None), all_wishes, decoder=model).run()
    want = reference.run(all_wishes)
    for stream in want:
        ours, theirs = got[stream], want[stream]
        assert_as_likely(ours.prompt_logprobs, theirs.prompt_logprobs)
        pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
        parted = next((i for i, (one, other) in pairs if one != other), None)
        if parted is None:
            assert (ours.tokens, ours.end) == (theirs.tokens, theirs.end)
            assert_as_likely(ours.logprobs, theirs.logprobs)
        else:
            assert_as_likely(ours.logprobs[: parted + 1], theirs.logprobs[: parted + 1])


def assert_as_likely(got: list[Position], want: list[Position]) -> None:
    found = [[position[3][0] for position in positions] for positions in (got, want)]
    np.testing.assert_allclose(*found, atol=1e-3)
