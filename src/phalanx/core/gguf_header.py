"""The header of a GGUF file, by memory map: metadata and where each tensor lies.

The format is that of ggml's gguf.md, versions 2 and 3, little-endian. The header is read here rather than
with gguf.GGUFReader, which builds several NumPy arrays for each of the tokenizer's hundred thousand strings
and takes 2.6 s for SmolLM2's; this takes 0.1 s. Blocks are dequantised by the gguf package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from phalanx.core.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4


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

    metadata: scalars, strings and arrays (as lists); arrays of strings only if they were asked for.
    tensors: by the name in the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap


def open_gguf(path: Path, *, strings: bool = False) -> GGUFFile:
    """Map the file and read its header.

    Args:
        path: the file.
        strings: keep arrays of strings too, which are the tokenizer's and most of the header.

    Raises:
        ModelError: not a GGUF file of a known version, cut short, or a tensor of an unknown type.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"cannot read {path}: {error}") from error
    reader = _Reader(path, data, strings)
    try:
        return reader.file()
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error})") from error


class _Reader:
    """A cursor over the header. Reading past the end is struct.error."""

    def __init__(self, path: Path, data: mmap.mmap, strings: bool) -> None:
        self.path = path
        self.data = data
        self.keeps_strings = strings
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

    def strings(self, count: int) -> list[bytes]:
        return [self.take(self.number("Q")) for _ in range(count)]

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: metadata of unknown kind {kind}")
        item, count = self.number("I"), self.number("Q")
        if item == _STRING:
            texts = self.strings(count)
            return [text.decode("utf-8") for text in texts] if self.keeps_strings else None
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
