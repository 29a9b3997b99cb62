"""Tensors of a GGUF file under their Hugging Face names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from phalanx.core.errors import ModelError
from phalanx.core.gguf_header import GGUFFile, GGUFTensor, open_gguf

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FREQS = "rope_freqs.weight"


def read_tensor(file: GGUFFile, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """The tensor dequantised: tensor.shape, float32, an array of its own.

    Raises:
        ModelError: the gguf package cannot dequantise its type.
    """
    raw = np.frombuffer(file.data, np.uint8, count=tensor.num_bytes, offset=tensor.start)
    if tensor.type == GGMLQuantizationType.F32:
        return raw.view("<f4").reshape(tensor.shape).astype(np.float32)  # astype copies off the map
    rows = raw.reshape(*tensor.shape[:-1], -1)
    try:
        values = dequantize(rows, tensor.type)
    except NotImplementedError as error:
        raise ModelError(
            f"{file.path}: tensor {tensor.name} has type {tensor.type.name}, not readable"
        ) from error
    return np.require(values.reshape(tensor.shape), np.float32, ["C", "W"])


def canonical_name(name: str) -> str | None:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; None for an unknown name."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES and kind in ("weight", "bias"):
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


class GGUFCheckpoint:
    """The weights of a GGUF file under their Hugging Face names.

    shapes: canonical name -> shape, from the header. A name outside the scheme stays as it is.
    """

    def __init__(self, path: Path, *, num_q_heads: int, num_kv_heads: int) -> None:
        self._file = open_gguf(path)
        # In the llama architecture, and there alone, converters interleave the halves of each q and k head.
        self._heads: dict[str, int] = {}
        if self._file.metadata.get("general.architecture") == "llama":
            self._heads = {"attn_q": num_q_heads, "attn_k": num_kv_heads}
        # rope_freqs is part of the rotary settings (gguf_config), not a weight.
        self._tensors = {
            canonical_name(name) or name: tensor
            for name, tensor in self._file.tensors.items()
            if name != ROPE_FREQS
        }
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """(canonical name, float32 array in Hugging Face's row order), in the order of the file.

        Raises:
            ModelError: as read_tensor.
        """
        for name, tensor in self._tensors.items():
            values = read_tensor(self._file, tensor)
            heads = self._heads.get(tensor.name.split(".")[-2]) if tensor.name.startswith("blk.") else None
            yield name, values if heads is None else unpermute(values, heads)


def unpermute(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the GGUF llama row order of q or k.

    GGUF keeps the two members of each rotary pair side by side (rows 0, 1 of a head turn together); Hugging
    Face keeps them half a head apart. values: [num_heads * head_dim, ...], weight or bias; the result has its
    shape.
    """
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
