"""The decoder against transformers, on tiny random models and on SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from phalanx.attention.base import DecodePart, ForwardBatch, PrefillPart
from phalanx.attention.registry import create_attention
from phalanx.config.groups import ModelConfig, RopeConfig
from phalanx.core.errors import ModelError
from phalanx.kvcache.pool import KVPool
from phalanx.layers.rope import inverse_frequencies
from phalanx.models.configs import load_model_config
from phalanx.models.decoder import Decoder
from phalanx.models.source import resolve_source
from phalanx.models.weights import iter_weights

CPU = torch.device("cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine a second thread mostly waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        self.attn = create_attention("numba", config)
        self.logits_index: torch.Tensor | None = None  # all tokens

    def step(
        self, decode: dict[int, int] | None = None, chunks: dict[int, list[int]] | None = None
    ) -> torch.Tensor:
        """decode: row -> its token; chunks: row -> tokens. Returns logits (of all tokens by default)."""
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
            logits_index=torch.arange(len(ids)) if self.logits_index is None else self.logits_index,
            num_decode=len(decode),
            decode=decode_part if decode else None,
            prefill=prefill_part if chunks else None,
        )
        return self.model.logits(self.model.forward(batch, self.pool, self.attn))


def build(
    model: transformers.PreTrainedModel,
    rope: RopeConfig | None = None,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
) -> Decoder:
    decoder = Decoder(config_of(model, rope), dtype=dtype, device=CPU, fused=fused)
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("page_size", "fused"), [(1, False), (16, False), (16, True)])
@pytest.mark.parametrize("case", CASES)
def test_serving_equals_transformers(case: str, page_size: int, fused: bool) -> None:
    """Prefill, chunked prefill, decode and mixed steps, all against one full forward per row.

    fused: the layers as CUDA runs them, through the kernels' torch backends.
    """
    make, rope = CASES[case]
    model = perturb(make())
    server = Server(build(model, rope, fused=fused), page_size=page_size)
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


@pytest.mark.usefixtures("one_thread")
def test_a_batch_equals_each_row_alone() -> None:
    model = build(perturb(qwen3()))
    together = Server(model)
    texts = {row: prompt(5 * row, row) for row in range(1, 6)}
    together.step(chunks=texts)
    joined = together.step(decode={row: row for row in texts})
    for index, (row, tokens) in enumerate(texts.items()):
        alone = Server(model)
        alone.step(chunks={row: tokens})
        assert_close(joined[index : index + 1], alone.step(decode={row: row}))


@pytest.mark.usefixtures("one_thread")
def test_logits_of_chosen_tokens_and_none() -> None:
    model = build(perturb(llama()))
    server = Server(model)
    everything = server.step(chunks={1: prompt(9, 1), 2: prompt(4, 2)})
    again = Server(model)
    again.logits_index = torch.tensor([8, 12])
    assert_close(again.step(chunks={1: prompt(9, 1), 2: prompt(4, 2)}), everything[[8, 12]])
    again.logits_index = torch.empty(0, dtype=torch.int64)
    assert again.step(decode={1: 5}).shape == (0, SHAPE["vocab_size"])
    assert Server(model).step().shape == (0, SHAPE["vocab_size"])


@pytest.mark.usefixtures("one_thread")
def test_bfloat16_is_near_float32() -> None:
    model = perturb(llama())
    tokens = prompt(30, 4)
    server = Server(build(model, dtype=torch.bfloat16))
    got = server.step(chunks={1: tokens[:29]})
    got = torch.cat((got, server.step(decode={1: tokens[29]})))
    assert got.dtype == torch.bfloat16
    want = wanted(model, tokens)
    error = (got.float() - want).norm() / want.norm()
    assert error < 0.03


@pytest.mark.parametrize("lm_head", ["absent", "equal", "different", "instead of the embedding"])
def test_tied_checkpoints_equal_transformers(tmp_path, lm_head: str) -> None:
    """Case B60: what a checkpoint of a tied model holds decides, as in transformers."""
    source = perturb(llama(tie=True))
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    state.pop("lm_head.weight")
    if lm_head == "equal":
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    elif lm_head == "different":
        state["lm_head.weight"] = state["model.embed_tokens.weight"].flip(0).contiguous()
    elif lm_head != "absent":
        state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    source.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = Decoder(config_of(source), dtype=torch.float32, device=CPU)
    ours.load_weights(state.items())
    tokens = prompt(12, 1)
    assert_close(Server(ours).step(chunks={1: tokens}), wanted(theirs, tokens))


def test_wrong_checkpoints_are_refused() -> None:
    model = llama()
    config, good = config_of(model), weights_of(model)
    name = "model.layers.1.self_attn.k_proj.weight"
    others = [pair for pair in good if pair[0] != name]
    weight = dict(good)[name]

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        Decoder(config, dtype=torch.float32, device=CPU).load_weights(weights)

    with pytest.raises(ModelError, match=f"lacks 1 tensors: {name}"):
        load(others)
    with pytest.raises(ModelError, match=r"shape \[48, 16\], not \[16, 48\]"):
        load([*others, (name, weight.T)])
    with pytest.raises(ModelError, match=r"extra\.weight is not expected"):
        load([*good, ("extra.weight", weight)])
    with pytest.raises(ModelError, match="comes twice"):
        load([*good, (name, weight)])
    with pytest.raises(ModelError, match="not a float"):
        load([*others, (name, weight.to(torch.int8))])
    with pytest.raises(ModelError, match="lm_head"):
        load([pair for pair in good if pair[0] != "lm_head.weight"])
    both = {"lm_head.weight", "model.embed_tokens.weight"}
    tied = Decoder(config_of(llama(tie=True)), dtype=torch.float32, device=CPU)
    with pytest.raises(ModelError, match="lacks 2 tensors"):
        tied.load_weights([pair for pair in good if pair[0] not in both])
    loaded = build(model)
    with pytest.raises(ModelError, match="already"):
        loaded.load_weights(good)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("rope", "config"),
    [
        (None, RopeConfig()),
        (LINEAR, CASES["llama-linear"][1]),
        (LLAMA3, ROPE_LLAMA3),
        (
            LLAMA3 | {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0),
        ),
    ],
)
def test_inverse_frequencies_equal_transformers(rope, config: RopeConfig, head_dim: int) -> None:
    more = {"rope_parameters": rope} if rope else {}
    hf = transformers.LlamaConfig(**SHAPE | {"hidden_size": 6 * head_dim}, **more)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf).inv_freq
    assert torch.equal(inverse_frequencies(config, head_dim), theirs)


def test_unknown_rope_and_odd_head_are_refused() -> None:
    with pytest.raises(ModelError, match="yarn"):
        inverse_frequencies(RopeConfig(kind="yarn"), 64)
    with pytest.raises(ModelError, match="head_dim"):
        inverse_frequencies(RopeConfig(), 7)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.usefixtures("one_thread")
def test_smollm2_greedy_tokens_equal_transformers() -> None:
    """Ten prompts of token ids, fp32, 32 tokens each, as one batch here and one by one there."""
    source = resolve_source("smollm2")
    config = load_model_config(source)
    weights = list(iter_weights(source, config, progress=False))
    ours = Decoder(config, dtype=torch.float32, device=CPU)
    ours.load_weights(weights)
    theirs = smollm2_in_transformers(config, weights)
    rng = np.random.default_rng(11)
    prompts = {row: rng.integers(20, 40000, row + 2).tolist() for row in range(1, 11)}

    server = Server(ours, page_size=16, num_rows=10)
    ends = np.cumsum([len(tokens) for tokens in prompts.values()]) - 1
    last = server.step(chunks=prompts)[ends].argmax(-1).tolist()
    got = {row: [token] for row, token in zip(prompts, last, strict=True)}
    for _ in range(31):
        last = server.step(decode={row: tokens[-1] for row, tokens in got.items()}).argmax(-1).tolist()
        for row, token in zip(got, last, strict=True):
            got[row].append(token)

    longest = max(map(len, prompts.values()))
    ids = torch.tensor([[0] * (longest - len(t)) + t for t in prompts.values()])
    mask = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in prompts.values()])
    with torch.inference_mode():
        out = theirs.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=32, eos_token_id=None)
    assert list(got.values()) == out[:, longest:].tolist()


def smollm2_in_transformers(config: ModelConfig, weights) -> transformers.PreTrainedModel:
    hf = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_q_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(hf)
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.eval()
