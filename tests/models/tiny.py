"""Tiny random Hugging Face checkpoints, made with transformers on the spot.

model = tiny_model("qwen3", num_hidden_layers=3)       # an eval-mode transformers model
save_tiny(tmp_path, model)                              # config.json, model.safetensors
save_tiny(tmp_path, model, max_shard_size="20KB")       # an index and several shards
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from phalanx.config.groups import ModelConfig, ModelSource
from phalanx.models.weights import iter_weights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_SHAPE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Far from transformers' 0.02: logits of a small random model should differ by more than rounding.
    "initializer_range": 0.25,
}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}


def tiny_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> transformers.PreTrainedModel:
    """A random model in eval mode; `overrides` are keys of the family's configuration class.

    Norms and biases are random as well, so that a mixed-up or forgotten one shows in the logits.
    """
    name = _CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SHAPE, **_EXTRA[family], **overrides})
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                elif parameter_name.endswith(".bias"):
                    parameter.normal_(0.0, 0.2)
    return model.to(dtype).eval()


def save_tiny(
    folder: Path, model: transformers.PreTrainedModel, *, max_shard_size: str | None = None
) -> Path:
    """Write config.json, generation_config.json and safetensors (several shards with max_shard_size)."""
    model.save_pretrained(folder, max_shard_size=max_shard_size or "5GB")
    return folder


def hf_from_source(source: ModelSource, config: ModelConfig) -> transformers.PreTrainedModel:
    """The model at `source`, run by transformers: float32, eval mode; generate() never stops by itself.

    Safetensors are read by transformers. A GGUF model is built from `config` and filled by iter_weights,
    which test_gguf.py compares with other readers (they take half a minute for SmolLM2).
    """
    if source.load_format == "safetensors":
        model = transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    else:
        model = _empty_model(config)
        weights = dict(iter_weights(source, config, progress=False))
        if config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights)
    model.generation_config.eos_token_id = None
    return model.eval()


def transformers_gguf(path: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights of a GGUF file as transformers' own reader has them."""
    # from_pretrained(gguf_file=...) wants one more package; this is the part of it that reads.
    return load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=_empty_model(config))["tensors"]


def _empty_model(config: ModelConfig) -> transformers.PreTrainedModel:
    hf_config = transformers.AutoConfig.for_model(
        config.architecture.removesuffix("ForCausalLM").lower(),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_q_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_id=list(config.eos_token_ids),
    )
    return transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)


def save_tiny_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a model as GGUF, laid out as llama.cpp's converter does. Norms and biases stay float32.

    quantization: of the matrices; rows must be whole blocks (Q8_0: multiples of 32). metadata: raw keys that
    are added (int, float or str). A tied model gets no output.weight.
    """
    config = model.config
    name = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"}.get(
        type(model).__name__, config.model_type
    )
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if name == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_token_list([f"token {i} é" for i in range(config.vocab_size)])
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    for tensor_name, values in {**_gguf_tensors(model, name), **(extra_tensors or {})}.items():
        if values.ndim == 1 or quantization == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor_name, values)
        else:
            packed = gguf.quants.quantize(values, quantization)
            writer.add_tensor(tensor_name, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    stem, _, kind = hf_name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.{kind}"
    layer, _, stem = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}"


def _gguf_tensors(model: transformers.PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = gguf_name(hf_name)
        part = name.split(".")[-2]
        values = tensor.float().numpy()
        if architecture == "llama" and part in heads:
            values = interleave(values, heads[part])
        tensors[name] = values
    return tensors


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row j and row j + head_dim/2 of each head become neighbours: rotary pairs side by side."""
    out = np.empty_like(values)
    head_dim = len(values) // num_heads
    for head in range(num_heads):
        for j in range(head_dim // 2):
            out[head * head_dim + 2 * j] = values[head * head_dim + j]
            out[head * head_dim + 2 * j + 1] = values[head * head_dim + head_dim // 2 + j]
    return out
