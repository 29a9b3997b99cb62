"""GGUF: header and tensors, by memory map. Imports no torch.

The format is that of ggml's gguf.md, versions 2 and 3, little-endian. The header is read here rather than
with gguf.GGUFReader, which builds several NumPy arrays for each of the tokenizer's hundred thousand strings
and takes seconds for it; blocks are dequantised by the gguf package.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from phalanx.core.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4

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


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's entry in the header. shape: row-major, as torch has it. start, num_bytes: in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file's header, and its bytes mapped.

    metadata: scalars, strings and arrays of numbers (as lists); arrays of strings, which are the tokenizer's,
    are left out. tensors: by the name in the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap


def open_gguf(path: Path) -> GGUFFile:
    """Map the file and read its header.

    Raises:
        ModelError: not a GGUF file of a known version, cut short, or a tensor of an unknown type.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"cannot read {path}: {error}") from error
    reader = _Reader(path, data)
    try:
        return reader.file()
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error})") from error


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


class _Reader:
    """A cursor over the header. Reading past the end is struct.error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def file(self) -> GGUFFile:
        if self.take(4) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        version = self.number("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path} has GGUF version {version} (or is big-endian); known: 2, 3")
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            value = self.value(self.number("I"))
            if value is not None:
                metadata[key] = value
        entries = [self.entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path} has alignment {alignment!r}")
        base = -(-self.at // alignment) * alignment
        tensors = {
            name: self.tensor(name, shape, kind, base + offset) for name, shape, kind, offset in entries
        }
        return GGUFFile(path=self.path, metadata=metadata, tensors=tensors, data=self.data)

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise struct.error(f"{count} bytes wanted at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: metadata of unknown kind {kind}")
        item, count = self.number("I"), self.number("Q")
        if item == _STRING:
            for _ in range(count):
                self.take(self.number("Q"))
            return None
        if item not in _SCALARS:
            raise ModelError(f"{self.path}: metadata array of unknown kind {item}")
        code = np.dtype("<" + _SCALARS[item]) if item != 7 else np.dtype(np.bool_)
        return np.frombuffer(self.take(count * code.itemsize), code).tolist()

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dims = self.number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ModelError(f"{self.path}: tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(num_dims)]))
        if 0 in shape:
            raise ModelError(f"{self.path}: tensor {name} is empty")
        return name, shape, self.number("I"), self.number("Q")

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name} has unknown type {kind}") from error
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if shape[-1] % block:
            raise ModelError(f"{self.path}: rows of {shape[-1]} in {name} are no whole {type_.name} blocks")
        num_bytes = math.prod(shape) // block * block_bytes
        if start + num_bytes > len(self.data):
            raise ModelError(f"{self.path} is cut short: tensor {name} ends beyond the file")
        return GGUFTensor(name=name, shape=shape, type=type_, start=start, num_bytes=num_bytes)
