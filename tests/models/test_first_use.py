"""What a step meets for the first time is loaded or compiled at the start: later it would hold up others."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from phalanx.engine.buckets import decode_buckets
from phalanx.engine.sampled import CudaHandle, Sampled
from phalanx.engine.warm_up import prompt_sizes
from phalanx.kernels.prefill_attention_triton import query_tile
from phalanx.models.decoder import Decoder
from phalanx.models.weights import iter_dummy_weights
from tests.models import cuda_rig as engines
from tests.models.cuda_rig import CONFIG, DEVICE, GREEDY, HAS_CUDA, PROMPTS, Rig, device, settings
from tests.models.launches import noted_launches

__all__ = ["device"]
pytestmark = [pytest.mark.gpu] if HAS_CUDA else []


class Watched:
    """A model that notes how many logits it is asked for."""

    def __init__(self, model: Decoder) -> None:
        self._model, self.forward = model, model.forward
        self.lines: list[int] = []

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.lines.append(len(hidden))
        return self._model.logits(hidden, out)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    with torch.inference_mode():
        return engines.dummy_decoder("bfloat16")


def test_eager_steps_ask_for_logits_in_the_sizes_of_decode(decoder) -> None:
    watched = Watched(decoder)
    rig = Rig(settings(CONFIG, graph=False), watched)
    tried, watched.lines = set(watched.lines), []
    for row, prompt in enumerate(PROMPTS, 1):
        rig.hand.add(row, prompt, GREEDY)
    rig.step(chunks=[(1, 5), (2, 1), (3, 9)])
    rig.step(decode=[1, 2], chunks=[(3, 8), (4, 16), (5, 20)])
    assert watched.lines == [8, 8]
    assert tried == set(decode_buckets(20)) == {8, 16, 20 + 4}


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("limit", [1, 3, 5, 9, 20, 40, 63, 200])
def test_prompts_that_are_tried_run_every_tile(group: int, limit: int) -> None:
    tiles = {query_tile(length, group) for length in range(1, limit + 1)}
    assert {query_tile(length, group) for length in prompt_sizes(limit)} == tiles


@pytest.mark.parametrize("lanes", [0, 1, 2, 3, 4, 5, 24])
def test_sampling_outputs_are_aligned_apart_and_read_back(lanes: int) -> None:
    sampled = Sampled.empty(torch.zeros(lanes, 9, device=DEVICE))
    assert (len(sampled.tokens), len(sampled.finish)) == (lanes, lanes)
    assert sampled.tokens.data_ptr() % 16 == 0 and sampled.finish.data_ptr() % 16 == 0
    sampled.finish.copy_(torch.arange(lanes) % 3)
    sampled.tokens.copy_(torch.arange(lanes) - 2**31)
    hand = engines.HandScheduler(4, 1)
    for live in {lanes, lanes // 2}:  # a captured step has padding lanes
        plan = replace(hand.plan(), sample_rows=torch.arange(1, live + 1).int().numpy())
        result = CudaHandle(plan, sampled, None).result()
        assert result.tokens.tolist() == [n - 2**31 for n in range(live)]
        assert result.finish.tolist() == [n % 3 for n in range(live)]


@pytest.mark.skipif(HAS_CUDA, reason="compiled below")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    ("indices", "rows", "page_size", "context"),
    [
        (None, 33, 16, 96),
        ("fused", 20, 1, 96),
        ("triton", 5, 4, 96),
        ("torch", 12, 4, 96),
        (None, 90, 16, 32768),
    ],
)
def test_every_kind_of_launch_is_tried_at_the_start(graph, indices, rows, page_size, context) -> None:
    """Where there is no device: with page lists as FlashInfer reads them, and rows that may be cut."""
    chosen = settings(CONFIG, graph=graph, rows=rows, page_size=page_size, indices=indices)
    scheduler = msgspec.structs.replace(chosen.scheduler, context_length=context)
    chosen = msgspec.structs.replace(chosen, scheduler=scheduler)
    with noted_launches() as found, torch.inference_mode():
        model = Decoder(CONFIG, dtype=torch.bfloat16, device=DEVICE, fused=True)
        model.load_weights(iter_dummy_weights(CONFIG, seed=3, dtype=torch.bfloat16, device=DEVICE))
        engine = engines.make_engine(chosen, model, 1500)
        tried = set(found)
        requests = engines.requests_of(60, seed=6, max_new=12, logprobs=True)
        for part in (requests[:1], requests[1:4], requests):
            engines.run_engine(engine, chosen, part, 1500)
        lone = replace(requests[0], input_ids=requests[0].input_ids[:1])
        engines.run_engine(engine, chosen, [lone], 1500)
    names = {name for name, _, _ in tried}
    assert names >= {"attend_rows", "rank_rows", "attend_chunks", "choose_tokens", "prepare_lanes"}
    assert ("find_rows" in names and "attend_pieces" in names) == (context > 96)
    assert [kind for kind in found if kind not in tried] == []


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("graph", [True, False])
def test_nothing_is_compiled_after_the_start(graph: bool, monkeypatch) -> None:
    """Steps of all kinds and of even and odd numbers of rows, with sizes that no other test compiles for."""
    from triton import knobs

    config = msgspec.structs.replace(CONFIG, vocab_size=4112, head_dim=32)
    with torch.inference_mode():
        model = Decoder(config, dtype=torch.bfloat16, device=DEVICE)
        model.load_weights(iter_dummy_weights(config, seed=3, dtype=torch.bfloat16, device=DEVICE))
    chosen = settings(config, graph=graph, rows=33)
    engine = engines.make_engine(chosen, model, 700)
    compiled = []

    def note(*, fn: object, **_: object) -> None:
        compiled.append(fn.name)  # type: ignore[attr-defined]

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    for count in (1, 120):
        engines.run_engine(engine, chosen, engines.requests_of(count, seed=6, logprobs=True), 700)
    assert compiled == []
