"""What a step meets for the first time is loaded or compiled at the start: later it would hold up others."""

from __future__ import annotations

import msgspec
import pytest
import torch

from phalanx.engine.buckets import decode_buckets
from phalanx.kernels.prefill_attention import tile_lengths
from phalanx.kernels.prefill_attention_triton import query_tile
from phalanx.models.decoder import Decoder
from phalanx.models.weights import iter_dummy_weights
from tests.models import test_cuda_engine as engines
from tests.models.test_cuda_engine import CONFIG, DEVICE, GREEDY, HAS_CUDA, PROMPTS, Rig, device, settings

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
def test_prompts_that_are_tried_run_every_tile(group: int) -> None:
    tiles = {query_tile(length, group) for length in range(1, 200)}
    assert {query_tile(length, group) for length in tile_lengths(group)} == tiles


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
