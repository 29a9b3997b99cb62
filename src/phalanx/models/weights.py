"""A model's weights under their Hugging Face names: from safetensors, from GGUF, or made up.

Names, shapes and completeness are checked from the headers, before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phalanx.config.groups import ModelConfig, ModelSource
from phalanx.core.errors import ModelError
from phalanx.models.gguf_file import GGUFCheckpoint
from phalanx.models.safetensors_file import SafetensorsCheckpoint

Shape = tuple[int, ...]
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_DUMMY_STD = 0.02


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every weight that the model needs, in the order of the layers.

    A tied model needs no lm_head.weight, though its checkpoint may carry one.
    """
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    projections = {
        "self_attn.q_proj": (config.q_size, hidden, config.attention_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.attention_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.attention_out_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {_EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        for name, (out_features, in_features, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (out_features,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    return shapes


def check_weights(seen: Mapping[str, Shape], config: ModelConfig) -> None:
    """Raise ModelError unless `seen` (canonical name -> shape) is just what the model needs.

    A tied checkpoint may hold the shared matrix under either name, or both.
    """
    if config.num_layers > len(seen):  # before a damaged header's 10^9 layers are spelled out
        raise ModelError(f"the checkpoint holds {len(seen)} tensors, too few for {config.num_layers} layers")
    expected = expected_weights(config)
    allowed = {_HEAD: expected[_EMBEDDING], **expected}
    if config.tie_word_embeddings and _HEAD in seen:
        del expected[_EMBEDDING]
    if missing := [name for name in expected if name not in seen]:
        raise ModelError(f"the checkpoint lacks {_few(missing)}")
    if leftover := [name for name in seen if name not in allowed]:
        raise ModelError(f"the checkpoint holds {_few(leftover)}, which {config.architecture} has no use for")
    for name, shape in seen.items():
        if tuple(shape) != allowed[name]:
            raise ModelError(f"{name} has shape {list(shape)}, expected {list(allowed[name])}")


def iter_weights(
    source: ModelSource, config: ModelConfig, *, progress: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (canonical name, CPU tensor) for all weights of `source`.

    Tensors have the checkpoint's float dtype (float32 from GGUF) and may lie in a memory map: copy, do not
    write to them. A tied checkpoint's lm_head.weight is yielded too. progress: a bar on standard error.

    Raises:
        ModelError: missing, leftover or misshapen tensors, before the first is yielded; a tensor that is not
            of floats, or a file that cannot be read, when its turn comes.
    """
    path = Path(source.path)
    if source.load_format == "safetensors":
        checkpoint = SafetensorsCheckpoint(path)
        shapes, tensors = checkpoint.shapes, checkpoint.tensors()
    elif source.load_format == "gguf":
        gguf = GGUFCheckpoint(path, num_q_heads=config.num_q_heads, num_kv_heads=config.num_kv_heads)
        shapes, tensors = gguf.shapes, ((name, torch.from_numpy(array)) for name, array in gguf.arrays())
    else:
        raise ModelError(f"{source.name} has no weights to read (load format {source.load_format})")
    try:
        check_weights(shapes, config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    columns = (TextColumn("loading weights"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("", total=len(shapes))
        for name, tensor in tensors:
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise ModelError(f"{path}: {name} is {tensor.dtype}; only unquantised weights can be loaded")
            yield name, tensor
            bar.advance(task)


def iter_dummy_weights(
    config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (canonical name, tensor) made on `device`: ones for norms, normal(0, 0.02) for the rest.

    The same seed, dtype and kind of device give the same weights.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, shape in expected_weights(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            yield name, tensor.fill_(1.0)
        else:
            yield name, tensor.normal_(0.0, _DUMMY_STD, generator=generator)


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
