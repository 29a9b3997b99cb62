"""The safetensors shards of a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from phalanx.core.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Buffers that old checkpoints carry along; they follow from the configuration.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class SafetensorsCheckpoint:
    """The weights of a folder: model.safetensors.index.json is obeyed where there is one.

    shapes: name -> shape, from the headers of the shards.

    Raises (on construction):
        ModelError: a shard is missing or unreadable, or index and shards do not agree.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = _read_index(folder)
        self._shards = _shards(folder, index)
        for shard in self._shards:
            shapes = _read_shapes(shard)
            if index is not None:
                _compare(shard, set(shapes), {name for name, file in index.items() if file == shard.name})
            for name, shape in shapes.items():
                if name in self.shapes:
                    raise ModelError(f"{folder}: tensor {name} is in two shards")
                self.shapes[name] = shape
        self.shapes = {name: s for name, s in self.shapes.items() if not name.endswith(_IGNORED_SUFFIX)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU tensor), shard by shard. Raises ModelError for a shard that cannot be read."""
        for shard in self._shards:
            try:
                with safe_open(shard, framework="pt", device="cpu") as file:
                    for name in file.keys():
                        if name in self.shapes:
                            yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{shard} cannot be read: {error}") from error


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name in the folder; None without an index."""
    path = folder / _INDEX
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} has no readable weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{path}: weight_map is not a map of names to files")
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise ModelError(f"{path} puts {name} outside its folder: {file}")
    return weight_map


def _shards(folder: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        shards = [folder / name for name in sorted(set(index.values()))]
        for shard in shards:
            if not shard.is_file():
                raise ModelError(f"{shard} is missing, though {_INDEX} names it")
        return shards
    single = folder / _SINGLE
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder} holds no .safetensors file")
    if len(found) > 1:
        raise ModelError(f"{folder} holds {len(found)} .safetensors files and no {_INDEX}")
    return found


def _read_shapes(shard: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(shard, framework="pt", device="cpu") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{shard} cannot be read: {error}") from error


def _compare(shard: Path, held: set[str], indexed: set[str]) -> None:
    if missing := sorted(indexed - held):
        raise ModelError(f"{shard} lacks {missing[0]}, which {_INDEX} places there ({len(missing)} in all)")
    if extra := sorted(name for name in held - indexed if not name.endswith(_IGNORED_SUFFIX)):
        raise ModelError(
            f"{shard} holds {extra[0]}, which {_INDEX} does not name there ({len(extra)} in all)"
        )
