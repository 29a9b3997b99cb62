"""The decoder against transformers, on tiny random models and on SmolLM2."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers

from phalanx.attention.base import DecodePart, ForwardBatch, PrefillPart
from phalanx.attention.registry import create_attention
from phalanx.config.groups import ModelConfig, RopeConfig
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
ROPE_LLAMA3 = RopeConfig(theta=10000.0, kind="llama3", factor=4.0, original_max_position=32)


def llama(tie: bool = False, rope: dict | None = None) -> transformers.PreTrainedModel:
    more = {"rope_parameters": rope} if rope else {}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, tie_word_embeddings=tie, **more))


def biased_llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)
    )


def mistral() -> transformers.PreTrainedModel:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SHAPE, head_dim=8, sliding_window=None)
    )


def qwen2(tie: bool = True) -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, tie_word_embeddings=tie))


def qwen3() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=20))


def config_of(model: transformers.PreTrainedModel, rope: RopeConfig | None = None) -> ModelConfig:
    """What the config reader would say, spelled out from the live model."""
    hf = model.config
    kind = type(model).__name__
    return ModelConfig(
        architecture=kind,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_q_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        rope=rope or RopeConfig(theta=hf.rope_parameters["rope_theta"]),
        max_position_embeddings=hf.max_position_embeddings,
        tie_word_embeddings=hf.tie_word_embeddings,
        attention_bias=kind.startswith("Qwen2") or getattr(hf, "attention_bias", False),
        attention_out_bias=kind.startswith("Llama") and hf.attention_bias,
        mlp_bias=getattr(hf, "mlp_bias", False),
        qk_norm=kind.startswith("Qwen3"),
    )


def perturb(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Larger weights, biases and norms than the initial ones, so that a lost one shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


def weights_of(model: transformers.PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return list(state.items())


class Server:
    """Rows of a request table over scattered pages; feeds a Decoder like the engine does."""

    def __init__(self, model: Decoder, *, page_size: int = 1, num_rows: int = 6, room: int = 64) -> None:
        config = model.config
        pages = -(-room // page_size)
        shuffled = np.random.default_rng(3).permutation(num_rows * pages) + 1
        offsets = np.arange(page_size)
        slots = shuffled.reshape(num_rows, pages, 1) * page_size + offsets
        self.table = torch.full((num_rows + 1, pages * page_size + 5), 10**6, dtype=torch.int32)
        self.table[0] = 0
        self.table[1:, : pages * page_size] = torch.from_numpy(slots.reshape(num_rows, -1))
        self.pool = KVPool(
            config, num_pages=num_rows * pages + 1, page_size=page_size, dtype=model.dtype, device=CPU
        )
        self.lens = [0] * (num_rows + 1)
        self.model = model
        self.attn = create_attention("torch_native", config)

    def step(
        self, decode: dict[int, int] | None = None, chunks: dict[int, list[int]] | None = None
    ) -> torch.Tensor:
        """decode: row -> its token; chunks: row -> tokens. Returns logits of all tokens of the step."""
        decode, chunks = decode or {}, chunks or {}
        spans = [(row, self.lens[row], 1) for row in decode]
        spans += [(row, self.lens[row], len(tokens)) for row, tokens in chunks.items()]
        ids = list(decode.values()) + [t for tokens in chunks.values() for t in tokens]
        slots = [self.table[row, start : start + n].long() for row, start, n in spans]
        places = [torch.arange(start, start + n) for _, start, n in spans]
        for row, start, n in spans:
            self.lens[row] = start + n
        decode_part = DecodePart(
            rows=torch.tensor(list(decode), dtype=torch.int64),
            seq_lens=torch.tensor([self.lens[r] for r in decode], dtype=torch.int32),
        )
        chunk_spans = spans[len(decode) :]
        prefill_part = PrefillPart(
            rows=torch.tensor(list(chunks), dtype=torch.int64),
            starts=[start for _, start, _ in chunk_spans],
            lens=[n for _, _, n in chunk_spans],
        )
        batch = ForwardBatch(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.cat(places) if places else torch.empty(0, dtype=torch.int64),
            slot_mapping=torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64),
            req_to_token=self.table,
            logits_index=torch.arange(len(ids)),
            num_decode=len(decode),
            decode=decode_part if decode else None,
            prefill=prefill_part if chunks else None,
        )
        return self.model.logits(self.model.forward(batch, self.pool, self.attn))


def build(
    model: transformers.PreTrainedModel, rope: RopeConfig | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    decoder = Decoder(config_of(model, rope), dtype=dtype, device=CPU)
    decoder.load_weights(iter(weights_of(model)))
    return decoder


@torch.no_grad()
def wanted(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], length).tolist()


CASES: dict[str, tuple[Callable[[], transformers.PreTrainedModel], RopeConfig | None]] = {
    "llama": (llama, None),
    "llama-tied": (lambda: llama(tie=True), None),
    "llama-linear": (
        lambda: llama(rope=LINEAR),
        RopeConfig(theta=500.0, kind="linear", factor=3.0),
    ),
    "llama-llama3": (lambda: llama(rope=LLAMA3), ROPE_LLAMA3),
    "llama-biased": (biased_llama, None),
    "mistral": (mistral, None),
    "qwen2": (lambda: qwen2(tie=False), None),
    "qwen2-tied": (qwen2, None),
    "qwen3": (qwen3, None),
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_serving_equals_transformers(case: str, page_size: int) -> None:
    """Prefill, chunked prefill, decode and mixed steps, all against one full forward per row."""
    make, rope = CASES[case]
    model = perturb(make())
    server = Server(build(model, rope), page_size=page_size)
    texts = {row: prompt(length, row) for row, length in ((1, 40), (2, 17), (3, 50), (4, 3))}
    full = {row: wanted(model, tokens) for row, tokens in texts.items()}

    out = server.step(chunks={1: texts[1][:33], 4: texts[4][:1], 3: texts[3][:16]})
    assert_close(out, torch.cat((full[1][:33], full[4][:1], full[3][:16])))
    out = server.step(decode={4: texts[4][1], 1: texts[1][33]}, chunks={3: texts[3][16:31], 2: texts[2][:16]})
    assert_close(out, torch.cat((full[4][1:2], full[1][33:34], full[3][16:31], full[2][:16])))
    out = server.step(decode={2: texts[2][16], 1: texts[1][34], 4: texts[4][2], 3: texts[3][31]})
    assert_close(out, torch.cat((full[2][16:], full[1][34:35], full[4][2:], full[3][31:32])))
    out = server.step(chunks={3: texts[3][32:], 1: texts[1][35:]})
    assert_close(out, torch.cat((full[3][32:], full[1][35:])))
