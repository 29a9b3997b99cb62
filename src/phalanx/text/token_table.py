"""What each token id adds to a text, as bytes, when the tokenizer's decoder allows such a table at all.

Two kinds of tokenizers do:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): a token is a few bytes, a text is their concatenation;
- byte fallback (Llama 2, Mistral, Gemma): a token is a piece of text, or one byte `<0xE4>`; a run of byte
  tokens that is not valid UTF-8 as a whole becomes one U+FFFD per byte.

Nothing is taken on trust: the decoder may consist of known parts only, and the finished table is compared
with the library's own decoding, id by id and on sequences. A tokenizer that fails gets no table, and the
library decodes for it.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_NUM_PROBES = 64
_PROBE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Bytes of every token.

    Attributes:
        raw: [num_ids] the bytes of each id; b"" for ids that no token has.
        is_byte: [num_ids] byte-fallback tokenizers: the token stands for a single byte; None: byte-level BPE.
        strip_leading_space: the decoder drops one space at the very beginning of a text.
    """

    raw: list[bytes]
    is_byte: list[bool] | None
    strip_leading_space: bool

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` by the table alone: the plain definition that incremental decoding must equal."""
        if self.is_byte is None:
            return b"".join(self.raw[i] for i in ids).decode("utf-8", "replace")
        parts: list[str] = []
        run = b""
        for i in ids:
            if self.is_byte[i]:
                run += self.raw[i]
            elif self.raw[i]:
                parts += [decode_run(run), self.raw[i].decode("utf-8")]
                run = b""
        text = "".join([*parts, decode_run(run)])
        return text[1:] if self.strip_leading_space and text.startswith(" ") else text


def decode_run(run: bytes) -> str:
    """A run of byte-fallback tokens as text: valid UTF-8, or one U+FFFD per byte."""
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def build_token_table(backend: tokenizers.Tokenizer, num_ids: int) -> TokenTable | None:
    """The table of `backend` for ids 0 .. num_ids-1, or None if its decoder cannot be put into one."""
    parts = _decoder_parts(json.loads(backend.to_str())["decoder"])
    if parts is None:
        return None
    kinds = [part["type"] for part in parts]
    tokens = _tokens(backend, num_ids)
    if kinds[-1] == "ByteLevel":
        table = _byte_level_table(parts[:-1], tokens)
    else:
        table = _byte_fallback_table(parts, tokens)
    return table if table is not None and _equals_library(table, backend, tokens) else None


def _tokens(backend: tokenizers.Tokenizer, num_ids: int) -> list[str | None]:
    tokens: list[str | None] = [None] * num_ids
    for token, i in backend.get_vocab(with_added_tokens=True).items():
        if i < num_ids:
            tokens[i] = token
    return tokens


def _decoder_parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """The decoder as a flat list of parts, or None where one of them is not understood here."""
    if decoder is None:
        return None
    parts: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    known = {"ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip"}
    if not parts or any(part["type"] not in known for part in parts):
        return None
    for part in parts:
        # A pattern longer than a character could match across two tokens once they are fused.
        if part["type"] == "Replace" and len(part["pattern"].get("String", "")) != 1:
            return None
    return parts


def _byte_level_table(before: list[dict[str, Any]], tokens: list[str | None]) -> TokenTable | None:
    if any(part["type"] not in ("ByteFallback", "Fuse", "Replace") for part in before):
        return None
    alphabet = byte_level_alphabet()
    raw = []
    for token in tokens:
        try:
            raw.append(bytes([alphabet[c] for c in token or ""]))
        except KeyError:  # the library takes a token with a foreign character as it is written
            if any(part["type"] == "Fuse" for part in before):
                return None  # and here all that is fused with it
            raw.append((token or "").encode())
    return TokenTable(raw=raw, is_byte=None, strip_leading_space=False)


def _byte_fallback_table(parts: list[dict[str, Any]], tokens: list[str | None]) -> TokenTable | None:
    kinds = [part["type"] for part in parts]
    strips = [part for part in parts if part["type"] == "Strip"]
    if "ByteLevel" in kinds or "Fuse" not in kinds or (strips and kinds[-1] != "Strip") or len(strips) > 1:
        return None
    if any((part["content"], part["start"], part["stop"]) != (" ", 1, 0) for part in strips):
        return None
    replaces = [(p["pattern"]["String"], p["content"]) for p in parts if p["type"] == "Replace"]
    raw, is_byte = [], []
    for token in tokens:
        match = _BYTE_TOKEN.match(token or "") if "ByteFallback" in kinds else None
        is_byte.append(match is not None)
        if match is not None:
            raw.append(bytes([int(match[1], 16)]))
            continue
        text = token or ""
        for old, new in replaces:
            text = text.replace(old, new)
        raw.append(text.encode())
    return TokenTable(raw=raw, is_byte=is_byte, strip_leading_space=bool(strips))


def _equals_library(table: TokenTable, backend: tokenizers.Tokenizer, tokens: list[str | None]) -> bool:
    """Compare every id alone, then sequences, half of them made of ids that are no whole characters."""
    ids = [i for i, token in enumerate(tokens) if token is not None]
    singles = backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
    if any(table.decode([i]) != text for i, text in zip(ids, singles, strict=True)):
        return False
    rng = random.Random(0)
    fragments = [i for i in ids if not _is_text(table.raw[i]) or (table.is_byte and table.is_byte[i])]
    mixed = [ids, fragments or ids, fragments + rng.choices(ids, k=len(fragments) + 1)]
    probes = (
        [rng.choices(mixed[n % 3], k=rng.randint(2, _PROBE_TOKENS)) for n in range(_NUM_PROBES)]
        if ids
        else []
    )
    texts = backend.decode_batch(probes, skip_special_tokens=False)
    return all(table.decode(probe) == text for probe, text in zip(probes, texts, strict=True))


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
