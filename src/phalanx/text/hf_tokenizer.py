"""A tokenizer from a Hugging Face model folder, without transformers.

Read are tokenizer.json (required), tokenizer_config.json, special_tokens_map.json, chat_template.jinja. What
is added around a text is up to tokenizer.json alone: add_bos_token and add_eos_token of the config belong to
the slow tokenizers, and transformers 5 ignores them too where there is a tokenizer.json.
"""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from phalanx.core.errors import ModelError, first_line
from phalanx.text.parts import TokenizerParts

_TOKEN_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_MAX_ID_DIGITS = 10


def hf_tokenizer(folder: Path) -> TokenizerParts:
    """Read the tokenizer of a model folder.

    Raises:
        ModelError: no such folder, no tokenizer.json in it, or a file that cannot be read.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder, and not a .gguf file")
    file = folder / "tokenizer.json"
    if not file.is_file():
        others = [
            name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()
        ]
        hint = f" (its {others[0]} alone is not supported)" if others else ""
        raise ModelError(
            f"{folder}: no tokenizer.json{hint}; give --tokenizer-path, or serve ids alone "
            "(--skip-tokenizer-init)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{file}: not a readable tokenizer ({first_line(error)})") from error
    # Some files carry the truncation of a training run; a server must see the whole prompt.
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older folders name their special tokens in a file of its own
        config |= _read_json(folder / "special_tokens_map.json")
    _add_missing_tokens(backend, config, folder)
    special = _special_tokens(config)
    bos, eos = (_with_id(backend, special.get(name)) for name in ("bos_token", "eos_token"))
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos[1] if bos else None,
        eos_token_ids=(eos[1],) if eos else (),
        chat_template=_chat_template(folder, config),
        special_tokens=special,
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # "\\ud800" is JSON, but no text
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not readable ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: must hold a JSON object")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Named tokens: "bos_token" and its like, given as text or as {"content": text, ...}."""
    named = {}
    for name, value in config.items():
        content = _content(value)
        if name.endswith("_token") and content is not None:
            named[name] = content
    return named


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _with_id(backend: tokenizers.Tokenizer, token: str | None) -> tuple[str, int] | None:
    i = backend.token_to_id(token) if token is not None else None
    return None if token is None or i is None else (token, i)


def _listed_tokens(config: dict[str, Any], folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """`added_tokens_decoder` by id: objects with a text as "content"."""
    listed = config.get("added_tokens_decoder") or {}
    where = f"{folder}/tokenizer_config.json: added_tokens_decoder"
    if not isinstance(listed, dict):
        raise ModelError(f"{where} must be an object, got {reprlib.repr(listed)}")
    found = {}
    for key, token in listed.items():
        if not key.isdecimal() or len(key) > _MAX_ID_DIGITS:
            raise ModelError(f"{where} has the key {reprlib.repr(key)}, which is no token id")
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ModelError(f"{where} has no text for id {key}, but {reprlib.repr(token)}")
        found[int(key)] = token
    return sorted(found.items())


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Tokens that only tokenizer_config.json knows (`added_tokens_decoder`), or calls special."""
    for i, token in _listed_tokens(config, folder):
        if backend.token_to_id(token["content"]) is not None:
            continue
        options = {k: bool(token[k]) for k in _TOKEN_FLAGS if k in token}
        backend.add_tokens([AddedToken(token["content"], **options)])
        if backend.token_to_id(token["content"]) != i:
            raise ModelError(f"{folder}: added token {token['content']!r} does not get its id {i}")
    lists = [config.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    extra = [_content(token) for tokens in lists if isinstance(tokens, list) for token in tokens]
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = [token for token in (*_special_tokens(config).values(), *extra) if token and token not in marked]
    known = [token for token in named if backend.token_to_id(token) is not None]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's template, else chat_template.json's."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: not readable ({first_line(error)})") from error
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None
