"""What tests of the CUDA engine share: settings, models, an engine with hand-made plans, requests and loops.

Without a GPU the same engine runs on CPU tensors (`stand_in_cuda`): all but what only a device can show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
import torch

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
from phalanx.config.hardware import detect
from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish
from phalanx.engine.cuda import CudaEngine
from phalanx.engine.memory import DTYPES
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder
from phalanx.models.dummy import BUILTIN_CONFIGS
from phalanx.models.weights import iter_dummy_weights
from phalanx.runtime.worker import Worker
from phalanx.scheduler.scheduler import Scheduler
from tests.models.stand_in_cuda import stand_in
from tests.unit.step_plans import HandScheduler

HAS_CUDA = torch.cuda.is_available()
cuda_only = pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
needs_flashinfer = pytest.mark.skipif(not detect().has_flashinfer, reason="needs flashinfer")
DEVICE = torch.device("cuda:0" if HAS_CUDA else "cpu")
GREEDY = SamplingParams(temperature=0)
CONTEXT = 96
CONFIG: ModelConfig = msgspec.structs.replace(
    BUILTIN_CONFIGS["tiny-llama"], vocab_size=1000, head_dim=64, tie_word_embeddings=False
)
PROMPTS = [[5, 9, 13, 2, 7], [11], [3] * 17, list(range(20, 36)), list(range(1, 60))]


def settings(
    config: ModelConfig,
    *,
    dtype: str = "bfloat16",
    backend: str = "triton",
    graph: bool = True,
    rows: int = 20,
    page_size: int = 4,
    chunk: int = 48,
    indices: str | None = None,
) -> Settings:
    if backend == "flashinfer" and indices is None:
        indices = "fused"
    return Settings(
        source=ModelSource(name="tiny", load_format="dummy", path="tiny", tokenizer_path="dummy"),
        model=config,
        cache=CacheConfig(page_size=page_size, max_total_tokens=None, mem_fraction_static=0.5, dtype=dtype),
        scheduler=SchedulerConfig(
            max_running_requests=rows, context_length=CONTEXT, chunked_prefill_size=chunk
        ),
        engine=EngineConfig(
            device="cuda",
            dtype=dtype,
            attention_backend=backend,
            overlap=True,
            cuda_graph=graph,
            cuda_graph_max_bs=rows if graph else 0,
            kv_indices_backend=indices,
            random_seed=0,
        ),
        server=ServerConfig(host="", port=0, served_model_name="tiny"),
    )


def dummy_decoder(dtype: str) -> Decoder:
    """Ten times the usual spread, so that a wrong position or a missing token changes the argmax."""
    decoder = Decoder(CONFIG, dtype=DTYPES[dtype], device=DEVICE)
    weights = iter_dummy_weights(CONFIG, seed=3, dtype=DTYPES[dtype], device=DEVICE)
    decoder.load_weights((name, w if name.endswith("norm.weight") else w * 10) for name, w in weights)
    return decoder


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with nullcontext() if HAS_CUDA else stand_in():
        yield


@pytest.fixture(scope="module")
def models() -> dict[str, Decoder]:
    with torch.inference_mode():
        return {dtype: dummy_decoder(dtype) for dtype in ("bfloat16", "float32")}


def make_engine(chosen: Settings, model: object, num_pages: int) -> CudaEngine:
    with torch.inference_mode():
        pool = KVPool(
            chosen.model,
            num_pages=num_pages,
            page_size=chosen.cache.page_size,
            dtype=DTYPES[chosen.cache.dtype],
            device=DEVICE,
        )
        attn = create_attention(chosen.engine.attention_backend, chosen.model, DEVICE)
        engine = CudaEngine(chosen, model, pool, attn, DEVICE)
    engine.warm_up(progress=False)
    return engine


class Rig:
    """An engine and hand-made plans for it."""

    def __init__(self, chosen: Settings, model: object, num_pages: int = 200) -> None:
        self.engine = make_engine(chosen, model, num_pages)
        self.pool = self.engine._pool
        self.hand = HandScheduler(num_pages, chosen.cache.page_size)

    def step(self, **kwargs: object):
        return self.engine.launch(self.hand.plan(**kwargs)).result()

    def logits(self, count: int) -> torch.Tensor:
        return self.engine._logits[:count].float().cpu()


def serve(
    rig: Rig, prompts: list[list[int]], num_steps: int, *, mixed: bool = True
) -> tuple[np.ndarray, torch.Tensor]:
    """Greedy tokens [prompts, num_steps] and the logits they came from [num_steps, prompts, vocab].

    The first prompt comes alone and decodes while the others come in two chunks each; or with mixed=False all
    come in one step, which is eager, so that they have the same bits whatever is captured.
    """
    if not mixed:
        rig.engine._wanted_shapes = []
    rows = list(range(1, len(prompts) + 1))
    for row, prompt in zip(rows, prompts, strict=True):
        rig.hand.add(row, prompt, GREEDY)
    halves = [(row, len(prompts[row - 1]) // 2) for row in rows[1:] if len(prompts[row - 1]) > 1]
    rests = [(row, len(prompts[row - 1]) - dict(halves).get(row, 0)) for row in rows[1:]]
    tokens = {row: [] for row in rows}
    logits = {row: [] for row in rows}

    def step(decode: list[int], chunks: list[tuple[int, int]]) -> None:
        plan = rig.hand.plan(decode=decode, chunks=chunks, needs_eager=False)
        result = rig.engine.launch(plan).result()
        found = rig.logits(len(plan.sample_rows))
        for i, row in enumerate(plan.sample_rows.tolist()):
            tokens[row].append(int(result.tokens[i]))
            logits[row].append(found[i])

    if mixed:
        step([], [(1, len(prompts[0]))])
        step([1], halves)
        step([1], rests)
    else:
        step([], [(row, len(prompts[row - 1])) for row in rows])
    while min(map(len, tokens.values())) < num_steps:
        step(rows[::-1], [])
    picked = torch.stack([torch.stack(logits[row][:num_steps]) for row in rows], 1)
    return np.array([tokens[row][:num_steps] for row in rows]), picked


KINDS: list[SamplingParams] = [
    GREEDY,
    SamplingParams(temperature=0.9, sampling_seed=1),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, sampling_seed=2),
    SamplingParams(temperature=0.9, min_p=0.05, sampling_seed=3),
    SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=0, logit_bias={5: 4.0, 9: -3.0}, min_new_tokens=3),
]


def requests_of(
    count: int, *, seed: int, max_new: int = 30, logprobs: bool = False, kinds: int = len(KINDS)
) -> list[EngineRequest]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        prompt = rng.integers(0, CONFIG.vocab_size, rng.integers(1, 60)).astype(np.int32)
        params = KINDS[i % kinds]
        params = params.__class__(
            **{name: getattr(params, name) for name in params.__slots__}
            | {"max_new_tokens": int(rng.integers(max(1, params.min_new_tokens), max_new + 1))}
            | {"sampling_seed": i}
        )
        wanted = LogprobParams(prompt_start=0, top_k=2) if logprobs and i % 3 == 0 else None
        found.append(EngineRequest(i, prompt, params, stop_ids=(7,), logprobs=wanted))
    return found


def run_worker(
    chosen: Settings, model: object, requests: list[EngineRequest], num_pages: int
) -> tuple[dict[int, list[int]], dict[int, int]]:
    return run_engine(make_engine(chosen, model, num_pages), chosen, requests, num_pages)


def run_engine(
    engine: CudaEngine, chosen: Settings, requests: list[EngineRequest], num_pages: int
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Tokens and end of every stream; the pool must be whole again afterwards."""
    scheduler = Scheduler(chosen.scheduler, num_pages=num_pages, page_size=chosen.cache.page_size)
    worker = Worker(scheduler, engine, overlap=chosen.engine.overlap)
    for request in requests:
        worker.add(request)
    tokens = {request.stream_id: [] for request in requests}
    ends: dict[int, int] = {}
    while worker.busy:
        for outputs in worker.step():
            arrays = (outputs.stream_ids.tolist(), outputs.tokens.tolist(), outputs.finish.tolist())
            for stream, token, finish in zip(*arrays, strict=True):
                if token >= 0:
                    tokens[stream].append(token)
                if finish != Finish.NONE:
                    assert stream not in ends
                    ends[stream] = finish
    scheduler.check()
    stats = worker.stats()
    assert stats["pages_free"] == stats["pages_total"] == num_pages - 1
    assert (stats["pages_held"], stats["pages_reserved"]) == (0, 0)
    return tokens, ends


def assert_own_ends(
    requests: list[EngineRequest], tokens: dict[int, list[int]], ends: dict[int, int]
) -> None:
    """Each of `requests_of` ended at its stop token or its limit."""
    for request in requests:
        found = tokens[request.stream_id]
        if ends[request.stream_id] == Finish.STOP:
            assert found[-1] == 7 and 7 not in found[:-1]
        else:
            assert ends[request.stream_id] == Finish.LENGTH and len(found) == request.max_new_tokens


def same_share(one: dict[int, list[int]], other: dict[int, list[int]]) -> float:
    return float(np.mean([one[stream] == other[stream] for stream in one]))
