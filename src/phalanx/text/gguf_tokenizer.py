"""A tokenizer from the fields of a GGUF file.

A GGUF holds the vocabulary and merges, but only a name for its pre-tokenizer (`tokenizer.ggml.pre`); what the
names stand for is in llama.cpp (src/llama-vocab.cpp) and in each model's own tokenizer.json.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from phalanx.core.errors import ModelError, first_line
from phalanx.core.gguf_header import open_gguf
from phalanx.text.parts import TokenizerParts, surround
from phalanx.text.sentencepiece_bpe import sentencepiece_bpe

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # gguf.TokenType
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_SPLIT = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "llama3": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3")


def gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer of a GGUF file.

    Raises:
        ModelError: no such file, no GGUF, no tokenizer in it, or one of a kind that is not supported.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    return tokenizer_from_fields(open_gguf(path, strings=True).metadata, str(path))


def tokenizer_from_fields(values: dict[str, Any], where: str) -> TokenizerParts:
    """Build the tokenizer from GGUF fields (`tokenizer.ggml.*`, `tokenizer.chat_template`).

    Args:
        values: field name -> content.
        where: names the file in errors.

    Raises:
        ModelError: as `gguf_tokenizer`.
    """
    model = values.get("tokenizer.ggml.model")
    tokens = values.get("tokenizer.ggml.tokens")
    if model is None or not tokens:
        raise ModelError(f"{where}: holds no tokenizer (tokenizer.ggml.model, tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise ModelError(f"{where}: token {twice!r} is in the vocabulary twice")
    pre = values.get("tokenizer.ggml.pre", "default")
    if model == "gpt2":
        backend = _byte_level_bpe(values, tokens, pre, where)
    elif model == "llama":
        backend = _sentencepiece_bpe(values, tokens, where)
    else:
        raise ModelError(f"{where}: tokenizer model {model!r} is not supported; known: gpt2, llama")
    _mark_added(backend, tokens, values.get("tokenizer.ggml.token_type", ()))
    named = _named_tokens(values, tokens, where)
    bos, eos = named.get("bos"), named.get("eos")
    adds_bos = values.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in _LLAMA3_NAMES)
    adds_eos = values.get("tokenizer.ggml.add_eos_token", False)
    surround(backend, bos if adds_bos else None, eos if adds_eos else None)
    ends = [token[1] for name in ("eos", "eot", "eom") if (token := named.get(name))]
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos[1] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        chat_template=values.get("tokenizer.chat_template"),
        special_tokens={
            f"{name}_token": named[key][0]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if key in named
        },
    )


def _byte_level_bpe(values: dict[str, Any], tokens: list[str], pre: str, where: str) -> tokenizers.Tokenizer:
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(f"{where}: pre-tokenizer {pre!r} is not supported; known: {known}")
    if pre == "default":
        logger.warning("%s names no pre-tokenizer: GPT-2's is assumed", where)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges", ())]
    try:
        # Llama 3 takes a whole word from the vocabulary before it tries any merge.
        bpe = models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # the library raises a bare Exception
        raise ModelError(f"{where}: the merges do not fit the vocabulary ({first_line(error)})") from error
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(values: dict[str, Any], tokens: list[str], where: str) -> tokenizers.Tokenizer:
    scores = values.get("tokenizer.ggml.scores", ())
    kinds = values.get("tokenizer.ggml.token_type", ())
    if not len(tokens) == len(scores) == len(kinds):
        raise ModelError(
            f"{where}: {len(tokens)} tokens, but {len(scores)} scores and {len(kinds)} token types"
        )
    unknown = values.get("tokenizer.ggml.unknown_token_id", 0)
    return sentencepiece_bpe(
        tokens,
        scores,
        kinds,
        unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else tokens[0],
        add_space_prefix=values.get("tokenizer.ggml.add_space_prefix", True),
    )


def _mark_added(backend: tokenizers.Tokenizer, tokens: list[str], kinds: Sequence[int]) -> None:
    """Tokens that are recognised in a text as they are written; control tokens are special besides."""
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    user = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])


def _named_tokens(values: dict[str, Any], tokens: list[str], where: str) -> dict[str, tuple[str, int]]:
    named = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        i = values.get(f"tokenizer.ggml.{name}_token_id")
        if i is None:
            continue
        if not 0 <= i < len(tokens):
            raise ModelError(
                f"{where}: {name}_token_id {i} is outside the vocabulary of {len(tokens)} tokens"
            )
        named[name] = (tokens[i], int(i))
    return named
