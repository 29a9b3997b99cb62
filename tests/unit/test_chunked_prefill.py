"""Prompts in chunks on the CPU engine: the same tokens, and aborts in the middle (B18)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from phalanx.attention.registry import create_attention
from phalanx.config.groups import SchedulerConfig
from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepPlan
from phalanx.engine.engine import Engine, StepHandle
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder
from phalanx.runtime.worker import Worker
from phalanx.scheduler.scheduler import Scheduler
from tests.unit.test_engine import CONFIG, decisive_decoder, settings

CPU = torch.device("cpu")
LONG_CONTEXT = 4096


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decisive_decoder()


class Recorder:
    """The engine, and the chunk lengths of every step that it was given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.chunks: list[list[int]] = []

    def launch(self, plan: StepPlan) -> StepHandle:
        self.chunks.append(plan.prefill.lens.tolist())
        return self._engine.launch(plan)


class Loop:
    """A worker over a real engine; `streams` collects tokens, `ends` how streams ended."""

    def __init__(self, model: Decoder, page_size: int, overlap: bool, **scheduler: int) -> None:
        config = SchedulerConfig(max_running_requests=6, grant_tokens=16, **scheduler)
        num_pages = 6 * -(-config.context_length // page_size) + 1
        chosen = msgspec.structs.replace(settings(page_size), scheduler=config)
        pool = KVPool(CONFIG, num_pages=num_pages, page_size=page_size, dtype=torch.float32, device=CPU)
        self.engine = Engine(chosen, model, pool, create_attention("torch_native", CONFIG), CPU)
        self.recorder = Recorder(self.engine)
        self.worker = Worker(
            Scheduler(config, num_pages=num_pages, page_size=page_size), self.recorder, overlap=overlap
        )
        self.num_pages = num_pages
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}

    def add(self, stream: int, prompt: list[int], max_new_tokens: int, temperature: float = 0.0) -> None:
        params = SamplingParams(
            temperature=temperature, max_new_tokens=max_new_tokens, sampling_seed=stream, ignore_eos=True
        )
        self.streams[stream] = []
        self.worker.add(EngineRequest(stream, np.array(prompt, np.int32), params))

    def step(self) -> None:
        for outputs in self.worker.step():
            self._take(outputs)

    def _take(self, outputs: object) -> None:
        arrays = (outputs.stream_ids, outputs.tokens, outputs.finish)
        for stream, token, finish in zip(*(a.tolist() for a in arrays), strict=True):
            assert stream not in self.ends, "an output after the end"
            if token >= 0:
                self.streams[stream].append(token)
            if finish != Finish.NONE:
                self.ends[stream] = finish

    def abort(self, stream: int) -> None:
        self.worker.abort([stream])
        outputs = self.worker.pending_outputs()
        if outputs is not None:
            self._take(outputs)

    def run(self) -> None:
        while self.worker.busy:
            self.step()
        self.worker.scheduler.check()
        stats = self.worker.stats()
        assert stats["pages_free"] == stats["pages_total"] == self.num_pages - 1
        assert (stats["pages_held"], stats["pages_reserved"]) == (0, 0)


@pytest.fixture
def loop(model: Decoder) -> Iterator[object]:
    made: list[Loop] = []

    def make(page_size: int = 4, overlap: bool = True, **scheduler: int) -> Loop:
        made.append(Loop(model, page_size, overlap, **scheduler))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


PROMPTS = [[5, 9, 13, 2, 7], [11], [3] * 17, list(range(20, 36)), list(range(1, 34))]


def run_all(loop: Loop) -> dict[int, list[int]]:
    for stream, prompt in enumerate(PROMPTS):
        loop.add(stream, prompt, 6, temperature=0.9 * (stream % 2))
    loop.run()
    assert set(loop.ends.values()) == {Finish.LENGTH} and len(loop.ends) == len(PROMPTS)
    return loop.streams


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_of_any_size_give_the_tokens_of_whole_prompts(
    loop, chunk: int, page_size: int, overlap: bool
) -> None:
    """Greedy and seeded rows, in fp32."""
    whole = loop(page_size, overlap, context_length=40, chunked_prefill_size=-1)
    want = run_all(whole)
    assert sorted(n for lens in whole.recorder.chunks for n in lens) == sorted(map(len, PROMPTS))
    chunked = loop(page_size, overlap, context_length=40, chunked_prefill_size=chunk)
    assert run_all(chunked) == want
    assert all(sum(lens) <= chunk for lens in chunked.recorder.chunks)
    assert sum(sum(lens) for lens in chunked.recorder.chunks) == sum(map(len, PROMPTS))
    assert len({tuple(tokens) for tokens in want.values()}) == len(PROMPTS)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("launched", [2, 16])
def test_abort_within_a_chunked_prompt_and_just_after_it(loop, launched: int, overlap: bool) -> None:
    """B18: a prompt of 4000 tokens in chunks of 256, aborted after chunk 2, and when the last is launched."""
    rng = np.random.default_rng(0)
    long = rng.integers(1, CONFIG.vocab_size, 4000).tolist()
    sizes = {"context_length": LONG_CONTEXT, "chunked_prefill_size": 256}
    alone = loop(16, overlap, **sizes)
    alone.add(1, PROMPTS[0], 40)
    alone.run()
    chunked = loop(16, overlap, **sizes)
    chunked.add(1, PROMPTS[0], 40)
    chunked.step()
    chunked.add(2, long, 50)
    while sum(256 in lens or 4000 % 256 in lens for lens in chunked.recorder.chunks) < launched:
        chunked.step()
    had = len(chunked.streams[2])
    assert had == (launched == 16 and not overlap)  # read at once in the serial loop, else in flight
    chunked.abort(2)
    chunked.run()
    assert len(chunked.streams[2]) == had and chunked.ends[2] == Finish.ABORT
    assert chunked.streams[1] == alone.streams[1] and chunked.ends[1] == Finish.LENGTH
    chunked.ends.clear()
    chunked.add(3, PROMPTS[0], 40)  # live
    chunked.run()
    assert chunked.streams[3] == alone.streams[1]
