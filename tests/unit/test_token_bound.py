"""The least number of ids of a text is never more than it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phalanx.text.dummy_tokenizer import dummy_tokenizer
from phalanx.text.token_bound import token_bound
from phalanx.text.token_table import build_token_table


def byte_level(*, missing: bytes = b"") -> Tokenizer:
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {b: chr(b) for b in printing}
    names |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printing)}
    tokens = [names[b] for b in range(256) if b not in missing]
    merges = [("a", "b"), ("ab", "c"), ("abc", "abc")]
    tokens += ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bound_of(tokenizer: Tokenizer):
    return token_bound(tokenizer, build_token_table(tokenizer, tokenizer.get_vocab_size()))


@pytest.mark.fuzz
@pytest.mark.parametrize("missing", [b"", b"\x00\x04\xf1"])
@given(text=st.one_of(st.text(), st.text("abc"), st.text("\x00\x04a"), st.text("\U00050000é")))
def test_no_text_has_less(missing, text):
    tokenizer = TOKENIZERS[missing]
    bound = bound_of(tokenizer)
    assert bound.max_bytes == 6 and bound.dropped == "".join(chr(b) for b in missing if b < 128)
    assert bound.min_ids(text) <= len(tokenizer.encode(text).ids)


TOKENIZERS = {missing: byte_level(missing=missing) for missing in (b"", b"\x00\x04\xf1")}


def test_it_is_near_where_tokens_are_long():
    bound = bound_of(byte_level())
    assert bound.min_ids("abcabc" * 1000) == 1000


@pytest.mark.parametrize("what", ["normalizer", "removed", "strip", "continuation", "truncation"])
def test_tokenizers_that_can_lose_text_have_none(what):
    tokenizer = byte_level(missing=b"\x80" if what == "continuation" else b"")
    if what == "normalizer":
        tokenizer.normalizer = normalizers.Strip()
    elif what == "removed":
        split = pre_tokenizers.Split(" ", behavior="removed")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    elif what == "strip":
        tokenizer.add_special_tokens([AddedToken("<s>", rstrip=True)])
    elif what == "truncation":
        tokenizer.enable_truncation(8)
    assert bound_of(tokenizer) is None
    assert bound_of(dummy_tokenizer(512).backend) is None
