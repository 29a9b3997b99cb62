"""Tiny random Hugging Face checkpoints, made with transformers on the spot.

model = tiny_model("qwen3", num_hidden_layers=3)       # an eval-mode transformers model
save_tiny(tmp_path, model)                              # config.json, model.safetensors
save_tiny(tmp_path, model, max_shard_size="20KB")       # an index and several shards
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

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
