"""GGUF metadata -> ModelConfig. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from phalanx.config.groups import ModelConfig, RopeConfig
from phalanx.core.errors import ModelError
from phalanx.core.gguf_header import GGUFFile, GGUFTensor, open_gguf
from phalanx.models.gguf_file import ROPE_FREQS, read_tensor

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


def gguf_model_config(path: Path) -> ModelConfig:
    """ModelConfig of a GGUF file of architecture llama (Mistral among them), qwen2 or qwen3.

    dtype is that of the projections where they are floats, and bfloat16 where they are quantised.

    Raises:
        ModelError: unreadable, an unknown architecture, or a feature that is not built.
    """
    meta = _Metadata(open_gguf(path))
    q_heads = meta.integer("attention.head_count")
    kv_heads = meta.integer("attention.head_count_kv", q_heads)
    hidden = meta.integer("embedding_length")
    if q_heads % kv_heads:
        raise meta.error(f"{q_heads} query heads cannot share {kv_heads} key heads evenly")
    head_dim = meta.integer("attention.key_length", None if hidden % q_heads else hidden // q_heads)
    if head_dim % 2:
        raise meta.error(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.error("keys and values of different widths are not built")
    if meta.integer("rope.dimension_count", head_dim) != head_dim:
        raise meta.error("rotary embedding over a part of the head is not built")
    vocab_size = meta.entry("token_embd.weight").shape[0]
    stored = meta.entry("blk.0.attn_q.weight").type
    # The end of the text, and the end of a turn where that is another token.
    ends = [meta.token_id(key, vocab_size) for key in ("eos_token_id", "eot_token_id")]
    return ModelConfig(
        architecture=meta.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=meta.integer("feed_forward_length"),
        num_layers=meta.integer("block_count"),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope=_rope(meta, head_dim),
        max_position_embeddings=meta.integer("context_length"),
        tie_word_embeddings="output.weight" not in meta.file.tensors,
        attention_bias="blk.0.attn_q.bias" in meta.file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in meta.file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in meta.file.tensors,
        qk_norm=meta.architecture == "Qwen3ForCausalLM",
        sliding_window=meta.integer("attention.sliding_window", 0) or None,
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        bos_token_id=meta.token_id("bos_token_id", vocab_size),
        dtype=_DTYPES.get(stored, "bfloat16"),
        quantization=None if stored in _DTYPES else GGMLQuantizationType(stored).name,
    )


class _Metadata:
    """Typed look-ups in the metadata of one architecture; errors name the file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise self.error(f"GGUF architecture {name} is not built; known: {', '.join(_ARCHITECTURES)}")
        self.prefix = name
        self.architecture = _ARCHITECTURES[name]
        if file.metadata.get("split.count", 0) not in (0, 1):
            raise self.error(
                "a GGUF split over several files is not built; merge it (llama-gguf-split --merge)"
            )
        if self.get("expert_count", 0):
            raise self.error("mixture-of-experts is not built")

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.file.path}: {what}")

    def get(self, key: str, default: Any) -> Any:
        """The value; one that is given per layer counts where all layers agree."""
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.error(f"{key} differs between layers; not built")
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != default):
            raise self.error(f"{self.prefix}.{key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise self.error(f"{self.prefix}.{key} must be a positive number, got {value!r}")
        # The file holds float32: the shortest decimal that means it (1e-05, not 9.99999974e-06).
        return float(str(np.float32(value)))

    def entry(self, name: str) -> GGUFTensor:
        if name not in self.file.tensors:
            raise self.error(f"tensor {name} is missing")
        return self.file.tensors[name]

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """The id under `tokenizer.ggml.<key>`, or None."""
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and (not isinstance(value, int) or not 0 <= value < vocab_size):
            raise self.error(f"{key} {value!r} is no token id (vocabulary of {vocab_size})")
        return value


def _rope(meta: _Metadata, head_dim: int) -> RopeConfig:
    theta = meta.number("rope.freq_base", 10000.0)
    kind = meta.get("rope.scaling.type", "none")
    if ROPE_FREQS in meta.file.tensors:
        factors = read_tensor(meta.file, meta.file.tensors[ROPE_FREQS])
        if kind != "none":
            raise meta.error(f"{ROPE_FREQS} together with rope scaling {kind!r} is not built")
        return _rope_from_factors(meta, theta, head_dim, factors)
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))  # new name, old name
    if kind == "none" and meta.get("rope.scale_linear", 1.0) == 1.0:
        return RopeConfig(theta=theta)
    if kind in ("none", "linear"):
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    raise meta.error(f"rope scaling {kind!r} is not built; known: none, linear, and Llama 3.1's factors")


def _rope_from_factors(
    meta: _Metadata, theta: float, head_dim: int, factors: npt.NDArray[np.float32]
) -> RopeConfig:
    """Llama 3.1 scaling from the divisors of the frequencies that converters write in its place.

    The lowest frequencies are divided by the full factor, which gives it away; the other three settings are
    the same in every Llama 3.x. Whether the guess is right is checked against all of the divisors.
    """
    if factors.shape != (head_dim // 2,) or not np.isfinite(factors).all() or factors.min() <= 0:
        raise meta.error(f"{ROPE_FREQS} is not {head_dim // 2} positive numbers")
    if np.all(factors == 1):
        return RopeConfig(theta=theta)
    rope = RopeConfig(theta=theta, kind="llama3", factor=float(str(factors.max())))
    if not np.allclose(llama3_divisors(rope, head_dim), factors, rtol=1e-4):
        raise meta.error(f"{ROPE_FREQS} is not the Llama 3.1 scaling; not built")
    return rope


def llama3_divisors(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float64]:
    """What Llama 3.1's scaling divides each frequency by: [head_dim / 2] float64, 1 to rope.factor."""
    frequency = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = rope.original_max_position * frequency / (2 * np.pi)  # in the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)  # 0: long waves, stretched in full; 1: short waves, left alone
    return 1.0 / ((1.0 - smooth) / rope.factor + smooth)
