"""How many ids a text must have at least, so that one far too long is refused before it is tokenized."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tokenizers

from phalanx.text.token_table import TokenTable

_CONTINUATION = range(0x80, 0xC0)  # bytes of UTF-8 that follow the first one of a character


@dataclass(frozen=True, slots=True)
class TokenBound:
    """max_bytes: the most bytes of text that one id stands for. dropped: characters that give no id."""

    max_bytes: int
    dropped: str

    def min_ids(self, text: str) -> int:
        """A number of ids that `text` cannot have less of; far cheaper than tokenizing."""
        # Each character that is not dropped leaves one byte or more.
        return (len(text) - sum(map(text.count, self.dropped))) // self.max_bytes


def token_bound(backend: tokenizers.Tokenizer, table: TokenTable | None) -> TokenBound | None:
    """The tokenizer's bound, or None where it allows none.

    It does where every byte of a text that the vocabulary knows ends up in some token: byte-level BPE with no
    normalizer or pre-tokenizer that drops or rewrites text, no added token that swallows the spaces around,
    and no truncation. SmolLM2 is one that does not know all bytes: it drops some control characters.
    """
    if table is None or table.is_byte is not None or backend.truncation is not None:
        return None
    if backend.normalizer is not None or not _keeps_text(_state(backend.pre_tokenizer)):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    known = {raw[0] for raw in table.raw if len(raw) == 1}
    if not known.issuperset(_CONTINUATION):
        return None
    return TokenBound(max(map(len, table.raw)), "".join(chr(b) for b in range(0x80) if b not in known))


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps_text, pre_tokenizer["pretokenizers"]))
    if kind == "Split":
        return pre_tokenizer.get("behavior") != "Removed"
    return kind in ("ByteLevel", "Digits")
