"""A made-up tokenizer for models with dummy weights, so that they can be served and benchmarked over text."""

from __future__ import annotations

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from phalanx.core.errors import ModelError
from phalanx.text.parts import TokenizerParts

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_CHAT_TEMPLATE = (
    "{% for message in messages %} {{ message['role'] }}: {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant:{% endif %}"
)


def dummy_tokenizer(vocab_size: int) -> TokenizerParts:
    """One word per id: " a", " b", ... " aa", ...; unknown words are id 0. It has no special tokens.

    Decoding ids and encoding the text again gives the same ids.

    Raises:
        ModelError: vocab_size below 1.
    """
    if vocab_size < 1:
        raise ModelError(f"a dummy tokenizer needs at least one id, got a vocabulary of {vocab_size}")
    words = [" " + _word(i) for i in range(vocab_size)]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s*\S+"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return TokenizerParts(backend=backend, chat_template=_CHAT_TEMPLATE)


def _word(index: int) -> str:
    """Bijective base 26: a .. z, aa, ab, ..."""
    letters = []
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        letters.append(_LETTERS[digit])
    return "".join(reversed(letters))
