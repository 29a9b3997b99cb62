"""Checkpoint metadata -> ModelConfig, from a Hugging Face folder. Imports no torch.

Keys and their defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

import json
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config.groups import ModelConfig, ModelSource, RopeConfig
from phalanx.core.errors import ModelError, first_line
from phalanx.core.settle import end_tokens
from phalanx.models.dummy import BUILTIN_CONFIGS
from phalanx.models.gguf_config import gguf_model_config


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers' class of an architecture says where config.json is silent.

    num_kv_heads, head_dim: None where derived from the query heads. sliding_window: without the key.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(max_position_embeddings=2048, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": _Family(
        num_kv_heads=8, max_position_embeddings=131072, sliding_window=4096, bos_token_id=1, eos_token_id=2
    ),
    "Qwen2ForCausalLM": _Family(num_kv_heads=32, sliding_window=4096),
    "Qwen3ForCausalLM": _Family(num_kv_heads=32, head_dim=128, sliding_window=4096),
}
_DTYPES = ("bfloat16", "float16", "float32")


def load_model_config(source: ModelSource) -> ModelConfig:
    """Shape and flags of the model at `source`.

    Raises:
        ModelError: no readable metadata, an unknown architecture, or a feature that is not built; one line
            that names the file and the value.
    """
    if source.load_format == "dummy" and source.path in BUILTIN_CONFIGS:
        return BUILTIN_CONFIGS[source.path]
    path = Path(source.path)
    is_gguf = path.suffix == ".gguf" and not path.is_dir()
    config = gguf_model_config(path) if is_gguf else hf_model_config(path)
    end_tokens(config.eos_token_ids, where=str(path))  # as many as a row has room for?
    return config


def hf_model_config(folder: Path) -> ModelConfig:
    """ModelConfig from a folder's config.json and, where there is one, generation_config.json.

    Raises:
        ModelError: as load_model_config.
    """
    config = _Json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _Json(generation_path) if generation_path.is_file() else None
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_unbuilt(config)
    hidden = config.integer("hidden_size")
    q_heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", family.num_kv_heads or q_heads)
    if q_heads % kv_heads:
        raise config.error(f"{q_heads} query heads cannot share {kv_heads} key heads evenly")
    bias = config.flag("attention_bias")
    is_llama, is_qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config, family, hidden, q_heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, family),
        max_position_embeddings=_max_positions(config, family),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=is_qwen2 or (bias and (is_llama or is_qwen3)),
        attention_out_bias=bias and (is_llama or is_qwen3),
        mlp_bias=is_llama and config.flag("mlp_bias"),
        qk_norm=is_qwen3,
        sliding_window=_sliding_window(config, family, architecture),
        eos_token_ids=_eos(config, generation, family),
        bos_token_id=_bos(config, generation, family),
        dtype=_dtype(config),
    )


class _Json:
    """One JSON object file, with typed look-ups that name the file in their errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ModelError(f"{path.parent} has no {path.name}") from error
        except (OSError, ValueError, RecursionError) as error:  # ValueError: a number of 5000 digits too
            raise ModelError(f"{path} cannot be read as JSON: {first_line(error)}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} does not hold a JSON object")
        self.values: dict[str, Any] = values

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")

    def get(self, key: str, default: Any) -> Any:
        """The value; the default where the key is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def flag(self, key: str) -> bool:
        """True or false; false where the key is missing or null."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer below 2**31; required where there is no default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.error(f"{key} must be a positive integer below 2**31, got {reprlib.repr(value)}")
        return value

    def number(self, key: str, default: float) -> float:
        return self.positive(key, self.get(key, default))

    def positive(self, key: str, value: Any) -> float:
        # The largest float, not inf: an integer may lie between.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self.error(f"{key} must be a positive number, got {reprlib.repr(value)}")
        return float(value)


def _architecture(config: _Json) -> str:
    names = config.get("architectures", [])
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.error("no architecture is named")
    if names[0] not in _FAMILIES:
        raise config.error(f"architecture {names[0]} is not built; known: {', '.join(_FAMILIES)}")
    return names[0]


def _refuse_unbuilt(config: _Json) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise config.error(f"hidden_act {activation!r} is not built; only 'silu' is")
    quantization = config.get("quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise config.error(f"quantization_config ({method}) is not built; use unquantised weights or a GGUF")


def _head_dim(config: _Json, family: _Family, hidden: int, q_heads: int) -> int:
    if family.head_dim is None and config.get("head_dim", None) is None:
        if hidden % q_heads:
            raise config.error(
                f"hidden_size {hidden} is no multiple of {q_heads} heads, and no head_dim is given"
            )
        head_dim = hidden // q_heads
    else:
        head_dim = config.integer("head_dim", family.head_dim)
    if head_dim % 2:
        raise config.error(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _max_positions(config: _Json, family: _Family) -> int:
    return config.integer("max_position_embeddings", family.max_position_embeddings)


def _rope(config: _Json, family: _Family) -> RopeConfig:
    """Both spellings: rope_scaling beside rope_theta, and transformers 5's rope_parameters that hold it."""
    scaling = config.get("rope_scaling", None) or config.get("rope_parameters", None) or {}
    if not isinstance(scaling, dict):
        raise config.error(f"rope scaling must be an object, got {scaling!r}")
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (1.0, None):
        raise config.error(f"partial_rotary_factor {partial} is not built")
    theta = scaling.get("rope_theta")
    theta = config.number("rope_theta", 10000.0) if theta is None else config.positive("rope_theta", theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3"):
        raise config.error(f"rope scaling {kind!r} is not built; known: default, linear, llama3")

    def value(key: str) -> float:
        if key not in scaling:
            raise config.error(f"rope scaling {kind!r} lacks {key}")
        return config.positive(key, scaling[key])

    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=value("factor"))
    original = scaling.get("original_max_position_embeddings")
    low, high = value("low_freq_factor"), value("high_freq_factor")
    if low >= high:
        raise config.error(f"rope scaling: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=value("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_max_positions(config, family)
        if original is None
        else min(int(config.positive("original_max_position_embeddings", original)), 2**31 - 1),
    )


def _sliding_window(config: _Json, family: _Family, architecture: str) -> int | None:
    """The window if any layer uses it; a window on some layers alone bounds the context just the same."""
    if family.sliding_window is None or config.values.get("sliding_window", family.sliding_window) is None:
        return None
    window = config.integer("sliding_window", family.sliding_window)
    if architecture == "MistralForCausalLM":
        return window
    if not config.flag("use_sliding_window"):
        return None
    layer_types = config.get("layer_types", None)
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise config.error(f"max_window_layers must be an integer, got {first!r}")
        return window if first < config.integer("num_hidden_layers") else None
    if not isinstance(layer_types, list):
        raise config.error(f"layer_types must be a list, got {layer_types!r}")
    return window if any(kind != "full_attention" for kind in layer_types) else None


def _eos(config: _Json, generation: _Json | None, family: _Family) -> tuple[int, ...]:
    """generation_config.json first, as in transformers' generate()."""
    value = generation.get("eos_token_id", None) if generation else None
    if value is None:
        value = config.values.get("eos_token_id", family.eos_token_id)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    vocab_size = config.integer("vocab_size")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise config.error(f"eos_token_id {reprlib.repr(token)} is no token id (vocab_size {vocab_size})")
    return tuple(dict.fromkeys(ids))


def _bos(config: _Json, generation: _Json | None, family: _Family) -> int | None:
    value = config.values.get("bos_token_id", family.bos_token_id)
    if value is None and generation:
        value = generation.get("bos_token_id", None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**31:
        raise config.error(f"bos_token_id {reprlib.repr(value)} is no token id")
    return value


def _dtype(config: _Json) -> str:
    """dtype (transformers 5) or torch_dtype; without either, transformers' default."""
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise config.error(f"dtype {dtype} is not built; known: {', '.join(_DTYPES)}")
    return dtype
