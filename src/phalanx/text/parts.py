"""What every kind of tokenizer file is read into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers import processors


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer before it is put to use.

    Attributes:
        backend: the library's tokenizer: vocabulary, splitting, decoder, and what it adds around a text.
        bos_token_id, eos_token_ids: as the file says.
        chat_template: Jinja source, or None.
        special_tokens: named tokens for the template: {"bos_token": "<s>", ...}.
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def surround(backend: tokenizers.Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Make `backend` add these (token, id) before and after a text. Mutates `backend`."""
    before = [bos[0]] if bos else []
    after = [eos[0]] if eos else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B:1", *after],
        special_tokens=list({token for token in (bos, eos) if token}),
    )
