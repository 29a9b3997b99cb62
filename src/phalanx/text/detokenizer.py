"""Incremental detokenization: ids in, complete text out, never half a character.

Whatever the split of the ids over calls, all that `push` and `finish` return adds up to the text of decoding
all ids at once. With a token table a token costs a list lookup; without one the library decodes a short
window.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

import msgspec

from phalanx.text.token_table import TokenTable, decode_run
from phalanx.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_WINDOW_TOKENS = 64


class DetokState(Protocol):
    """One text being decoded."""

    @property
    def held(self) -> bytes | list[bytes]:
        """What waits for its rest; false if nothing does."""
        ...

    @property
    def whole(self) -> WholeTexts | None:
        """The table of whole texts, while an id adds just its own if nothing is held."""
        ...

    def push(self, ids: Sequence[int]) -> str:
        """Append ids, each in [0, vocab_size); returns the text that is complete now."""
        ...

    def finish(self) -> str:
        """What is still held: the bytes of a character that will not be completed, as U+FFFD."""
        ...


class Detokenizer:
    """Makes and advances decoding states; one per tokenizer, shared by all streams of a process.

    Attributes:
        tokenizer: where it came from.
        uses_table: False if the library decodes each token (any decoder but byte-level and byte-fallback).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.uses_table = tokenizer.table is not None
        self._tables: dict[bool, _ByteLevelTable | _ByteFallbackTable] = {}
        if tokenizer.table is not None:
            kind = _ByteLevelTable if tokenizer.table.is_byte is None else _ByteFallbackTable
            self._tables = {
                skip: kind(tokenizer.table, tokenizer.special_ids if skip else frozenset())
                for skip in (True, False)
            }

    def new_state(self, skip_special_tokens: bool = True) -> DetokState:
        """A state for a new text."""
        table = self._tables.get(skip_special_tokens)
        if isinstance(table, _ByteLevelTable):
            return _ByteLevelState(table)
        if isinstance(table, _ByteFallbackTable):
            return _ByteFallbackState(table)
        return _WindowState(self.tokenizer, skip_special_tokens)

    def push(self, state: DetokState, ids: Sequence[int]) -> str:
        """`state.push(ids)`."""
        return state.push(ids)

    def finish(self, state: DetokState) -> str:
        """`state.finish()`."""
        return state.finish()


class WholeTexts:
    """texts: [num_ids] text of each id, None where it is no whole characters.

    json: [num_ids] the same as it stands inside a JSON string.
    """

    __slots__ = ("json", "texts")

    def __init__(self, texts: list[str | None]) -> None:
        encode = msgspec.json.Encoder().encode
        self.texts = texts
        self.json = [None if text is None else encode(text)[1:-1] for text in texts]


class _ByteLevelTable:
    """raw: bytes of each id."""

    def __init__(self, table: TokenTable, skipped: frozenset[int]) -> None:
        self.raw = [b"" if i in skipped else raw for i, raw in enumerate(table.raw)]
        self.whole = WholeTexts([_text_or_none(raw) for raw in self.raw])


class _ByteFallbackTable:
    """raw: bytes of each id; byte tokens have no whole text."""

    def __init__(self, table: TokenTable, skipped: frozenset[int]) -> None:
        assert table.is_byte is not None
        self.strip_leading_space = table.strip_leading_space
        self.raw = table.raw
        self.whole = WholeTexts(
            [
                "" if i in skipped else None if is_byte else raw.decode("utf-8")
                for i, (raw, is_byte) in enumerate(zip(table.raw, table.is_byte, strict=True))
            ]
        )


def _text_or_none(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


class _ByteLevelState:
    __slots__ = ("_raw", "_texts", "held", "whole")

    def __init__(self, table: _ByteLevelTable) -> None:
        self.held: bytes = b""
        self.whole: WholeTexts | None = table.whole
        self._texts = table.whole.texts
        self._raw = table.raw

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and not self.held:
            text = self._texts[ids[0]]
            if text is not None:
                return text
        raw = self._raw
        data = self.held + b"".join([raw[i] for i in ids])
        text, used = utf_8_decode(data, "replace", False)
        self.held = data[used:]
        return text

    def finish(self) -> str:
        text = self.held.decode("utf-8", "replace")
        self.held = b""
        return text


class _ByteFallbackState:
    """Byte tokens are held until their run ends: only then is it known whether all of it is valid."""

    __slots__ = ("_raw", "_strip", "_table", "held", "whole")

    def __init__(self, table: _ByteFallbackTable) -> None:
        self.held: list[bytes] = []
        self._strip = table.strip_leading_space
        self.whole: WholeTexts | None = None if self._strip else table.whole
        self._table = table.whole
        self._raw = table.raw

    def push(self, ids: Sequence[int]) -> str:
        parts = []
        for i in ids:
            text = self._table.texts[i]
            if text is None:
                self.held.append(self._raw[i])
            elif text:
                if self.held:
                    parts.append(self._end_run())
                parts.append(text)
        return self._begin("".join(parts)) if self._strip else "".join(parts)

    def finish(self) -> str:
        return self._begin(self._end_run())

    def _end_run(self) -> str:
        text = decode_run(b"".join(self.held))
        self.held.clear()
        return text

    def _begin(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            self.whole = self._table
            return text.removeprefix(" ")
        return text


class _WindowState:
    """Any other decoder: the text since the last complete piece, decoded with that piece as its context.

    Text that ends in U+FFFD may be half a character and waits for more tokens, but not for more than
    _MAX_WINDOW_TOKENS: else a model that writes nothing but invalid bytes makes each token cost more than the
    one before.
    """

    __slots__ = ("_context_len", "_ids", "_skip", "_tokenizer", "held", "whole")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.held: bytes = b""
        self.whole: WholeTexts | None = None
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._context_len = 0

    def push(self, ids: Sequence[int]) -> str:
        self._ids += self._visible(ids)
        context, text = self._decode()
        waits = text.endswith(_REPLACEMENT) and len(self._ids) - self._context_len <= _MAX_WINDOW_TOKENS
        if waits or len(text) <= len(context):
            return ""
        self._ids = self._ids[self._context_len :]
        self._context_len = len(self._ids)
        return text[len(context) :]

    def finish(self) -> str:
        context, text = self._decode()
        self._ids, self._context_len = [], 0
        return text[len(context) :]

    def _visible(self, ids: Sequence[int]) -> list[int]:
        if not self._skip:
            return list(ids)
        special = self._tokenizer.special_ids
        return [i for i in ids if i not in special]

    def _decode(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        context = decode(self._ids[: self._context_len], skip_special_tokens=False)
        return context, decode(self._ids, skip_special_tokens=False)
