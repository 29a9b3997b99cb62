"""Where a model lies: what the user typed -> ModelSource. Nothing is read here but names and magic bytes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import huggingface_hub

from phalanx.config.cli import LOAD_FORMATS
from phalanx.config.groups import ModelSource
from phalanx.core.errors import ConfigError, ModelError
from phalanx.models.dummy import BUILTIN_CONFIGS
from phalanx.models.pull import PULLED_MODELS, pulled_path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG_FILES = ["config.json", "generation_config.json"]
_TOKENIZER_FILES = ["tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template*"]
# "model*" leaves out a second copy of the weights under another name (consolidated.safetensors and the like).
_WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json"]


def resolve_source(
    model: str,
    *,
    load_format: str = "auto",
    tokenizer_path: str | None = None,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ModelSource:
    """Find a model.

    Args:
        model: first match of: a pulled model (`smollm2`), a built-in shape (`llama-3-8b`, ...; load_format
            dummy only), a .gguf file, a folder, a hub id. `./smollm2` is the way to a folder of such a name.
        load_format: "auto", "safetensors", "gguf" or "dummy" (shape without weights).
        tokenizer_path: in place of the model's own: a folder, a .gguf file, a hub id, a pulled
            model or "dummy".
        revision: of a hub id: branch, tag or commit.
        cache_dir: for pulled models (default: see models.pull) and for the hub (default: the hub's own).

    Raises:
        ModelError: nothing usable lies there. ConfigError: the options contradict each other.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    found, path = _find(model, load_format, revision, cache_dir)
    if load_format == "dummy":
        found = "dummy"
    elif load_format not in ("auto", found):
        raise ModelError(f"{path} holds no {load_format} weights (found: {found})")
    if tokenizer_path is not None:
        tokenizer = _find_tokenizer(tokenizer_path, cache_dir)
    else:
        tokenizer = "dummy" if path in BUILTIN_CONFIGS else path
    return ModelSource(name=model, load_format=found, path=path, tokenizer_path=tokenizer, revision=revision)


def _find(
    model: str, load_format: str, revision: str | None, cache_dir: str | os.PathLike[str] | None
) -> tuple[str, str]:
    """(format of the weights that lie there, path)."""
    if not model:
        raise ModelError("the model has no name")
    path = Path(model).expanduser().absolute()
    is_local = model in PULLED_MODELS or model in BUILTIN_CONFIGS or path.exists() or _looks_local(model)
    if is_local and revision is not None:
        raise ConfigError(f"a revision goes with a hub id; {model} is not one")
    if model in PULLED_MODELS:
        return "gguf", str(pulled_path(model, cache_dir))
    if model in BUILTIN_CONFIGS:
        if load_format != "dummy":
            raise ModelError(f"{model} is a built-in shape without weights: add --load-format dummy")
        return "dummy", model
    if path.is_dir():
        return _find_in_folder(path, load_format)
    if path.exists():
        return "gguf", str(_gguf_file(path))
    if is_local:
        raise ModelError(f"no file or folder {path}")
    if load_format == "dummy" and "/" not in model:
        known = ", ".join([*PULLED_MODELS, *sorted(BUILTIN_CONFIGS)])
        raise ModelError(f"{model} is no path and no name known here ({known})")
    patterns = _CONFIG_FILES + _TOKENIZER_FILES + ([] if load_format == "dummy" else _WEIGHT_FILES)
    return _find_in_folder(_from_hub(model, patterns, revision, cache_dir), load_format)


def _looks_local(model: str) -> bool:
    return model.endswith(".gguf") or not _HUB_ID.fullmatch(model)


def _find_in_folder(folder: Path, load_format: str) -> tuple[str, str]:
    has_config = (folder / "config.json").is_file()
    ggufs = sorted(folder.glob("*.gguf"))
    if load_format == "dummy" and has_config:
        return "dummy", str(folder)
    if load_format != "gguf" and any(folder.glob("*.safetensors*")):
        if not has_config:
            raise ModelError(f"{folder} has no config.json")
        return "safetensors", str(folder)
    if len(ggufs) == 1:
        return "gguf", str(_gguf_file(ggufs[0]))
    if ggufs:
        raise ModelError(f"{folder} holds {len(ggufs)} .gguf files; name one of them")
    if load_format == "gguf":
        raise ModelError(f"{folder} holds no .gguf file")
    if not has_config:
        raise ModelError(f"{folder} has no config.json and no .gguf file: not a model folder")
    raise ModelError(f"{folder} has a config.json but no weights (.safetensors or .gguf)")


def _gguf_file(path: Path) -> Path:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is not a .gguf file; for safetensors name the folder")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file (it starts with {magic!r})")
    return path


def _find_tokenizer(tokenizer: str, cache_dir: str | os.PathLike[str] | None) -> str:
    if tokenizer == "dummy":
        return tokenizer
    if tokenizer in PULLED_MODELS:
        return str(pulled_path(tokenizer, cache_dir))
    path = Path(tokenizer).expanduser().absolute()
    if path.is_dir():
        return str(path)
    if path.exists():
        return str(_gguf_file(path))
    if _looks_local(tokenizer):
        raise ModelError(f"no tokenizer at {path}")
    return str(_from_hub(tokenizer, _CONFIG_FILES + _TOKENIZER_FILES, None, cache_dir))


def _from_hub(
    model: str, patterns: list[str], revision: str | None, cache_dir: str | os.PathLike[str] | None
) -> Path:
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=Path(cache_dir) if cache_dir is not None else None,
            allow_patterns=patterns,
        )
    except Exception as error:  # the hub client lets errors of several HTTP and file layers through
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        known = (
            "" if "/" in model else f", no name known here ({', '.join([*PULLED_MODELS, *BUILTIN_CONFIGS])})"
        )
        raise ModelError(
            f"{model} is no local path{known} and could not be had from the hub ({why})"
        ) from error
    return Path(folder)
