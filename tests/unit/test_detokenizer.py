"""Incremental decoding equals decoding everything at once, for every family of decoders and every split."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from phalanx.text.detokenizer import Detokenizer, _WindowState
from phalanx.text.parts import TokenizerParts
from phalanx.text.token_table import build_token_table, decode_run
from phalanx.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit import tiny_tokenizers

TABLE_FAMILIES = {"byte_level": tiny_tokenizers.byte_level, "byte_fallback": tiny_tokenizers.byte_fallback}
WINDOW_FAMILIES = {"metaspace": tiny_tokenizers.metaspace, "wordpiece": tiny_tokenizers.wordpiece}
FAMILIES = TABLE_FAMILIES | WINDOW_FAMILIES


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    state = tiny_tokenizers.detokenizer(tokenizer).new_state(skip_special_tokens=skip)
    bounds = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    return [*(state.push(ids[a:b]) for a, b in pairwise(bounds)), state.finish()]


def fragments(tokenizer: Tokenizer) -> list[int]:
    """Ids that are no whole characters by themselves."""
    assert tokenizer.table is not None
    return [i for i, raw in enumerate(tokenizer.table.raw) if len(raw) == 1 and raw[0] >= 0x80]


def test_which_decoders_get_a_table() -> None:
    for build in TABLE_FAMILIES.values():
        assert Detokenizer(build()).uses_table
    for build in WINDOW_FAMILIES.values():
        assert not Detokenizer(build()).uses_table
    assert Detokenizer(load_tokenizer("dummy", vocab_size=30)).uses_table


@pytest.mark.fuzz
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_random_ids_in_any_split(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    if tokenizer.table is not None:  # half of them pieces of characters, where the traps are
        any_id = (
            any_id | st.sampled_from(fragments(tokenizer)) | st.sampled_from(sorted(tokenizer.special_ids))
        )
    ids = data.draw(st.lists(any_id, max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(stream(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.fuzz
@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(max_size=30) | st.text("世界👩‍👧é aé́", max_size=30))
def test_texts_token_by_token(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    ids = tokenizer.encode(text)
    said = stream(tokenizer, ids, list(range(len(ids))), skip=False)
    assert "".join(said) == tokenizer.decode(ids, skip_special_tokens=False)
    if family == "byte_level":
        assert "".join(said) == text


@pytest.mark.parametrize("family", TABLE_FAMILIES)
def test_no_character_is_ever_split(family: str) -> None:
    """B39, id by id."""
    tokenizer = TABLE_FAMILIES[family]()
    ids = tokenizer.encode(tiny_tokenizers.MULTI_BYTE)
    assert len(ids) > len(tiny_tokenizers.MULTI_BYTE)
    said = stream(tokenizer, ids, list(range(len(ids))), skip=True)
    assert "".join(said) == tiny_tokenizers.MULTI_BYTE
    assert not any("\ufffd" in part for part in said)


@pytest.mark.parametrize("family", TABLE_FAMILIES)
def test_cut_inside_a_character(family: str) -> None:
    """B39: the replacement character stands at the cut alone."""
    tokenizer = TABLE_FAMILIES[family]()
    ids = tokenizer.encode("x 👩")
    for length in range(len(ids)):
        said = stream(tokenizer, ids[:length], list(range(length)), skip=True)
        assert "\ufffd" not in "".join(said[:-1])
        assert "".join(said) == tokenizer.decode(ids[:length])
    assert "\ufffd" in said[-1]


def test_invalid_bytes_are_shown_at_once_in_byte_level() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    assert tokenizer.table is not None
    lone = tokenizer.table.raw.index(b"\xff")
    letter = tokenizer.encode("a")
    assert stream(tokenizer, [lone, lone, *letter], [0, 1, 2], skip=True) == ["", "\ufffd", "\ufffd", "a", ""]


def test_byte_fallback_runs_are_valid_or_one_replacement_per_byte() -> None:
    assert decode_run("é世".encode()) == "é世"
    assert decode_run(b"\xe4\xb8\x96\xff") == "\ufffd" * 4
    assert decode_run(b"") == ""


def test_byte_fallback_drops_only_the_first_space_of_the_text() -> None:
    tokenizer = tiny_tokenizers.byte_fallback()
    ids = tokenizer.encode("the fox  the")
    assert "".join(stream(tokenizer, ids, list(range(len(ids))), skip=True)) == "the fox  the"


def test_ids_without_a_token_say_nothing() -> None:
    padded = load_tokenizer("dummy", vocab_size=10)
    assert stream(padded, [], [], skip=True) == ["", ""]
    parts_owner = tiny_tokenizers.byte_level()
    wide = Tokenizer(TokenizerParts(backend=parts_owner._backend), vocab_size=1000)
    ids = [*wide.encode("ab"), 999, *wide.encode("c")]
    assert "".join(stream(wide, ids, [1, 2, 3], skip=True)) == wide.decode(ids) == "abc"


def test_endless_invalid_text_is_not_held_forever_without_a_table() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    assert tokenizer.table is not None
    lone = tokenizer.table.raw.index(b"\xff")
    state = _WindowState(tokenizer, False)
    shown = sum(len(state.push([lone])) for _ in range(200))
    assert 130 <= shown <= 200
    assert shown + len(state.finish()) == 200


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("he", "she"), decoders.ByteLevel()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.BPEDecoder(),
    ],
)
def test_other_decoders_get_no_table(decoder: decoders.Decoder) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.decoder = decoder
    assert build_token_table(backend, backend.get_vocab_size()) is None


def test_the_decoder_that_smollm2_ships_with_gets_a_table() -> None:
    backend = tokenizers.Tokenizer(tiny_tokenizers.byte_level()._backend.model)
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    backend.decoder = decoders.Sequence(parts)
    assert build_token_table(backend, backend.get_vocab_size()) is not None


@pytest.mark.parametrize("odd", ["<0x41>", "a▁b", "世界", "two words"])
def test_added_tokens_that_smollm2s_decoder_treats_in_its_own_way(odd: str) -> None:
    backend = tokenizers.Tokenizer(tiny_tokenizers.byte_level()._backend.model)
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    backend.decoder = decoders.Sequence(parts)
    backend.add_tokens([odd])
    assert build_token_table(backend, backend.get_vocab_size()) is None


@pytest.mark.smollm2
@pytest.mark.fuzz
@given(ids=st.lists(st.integers(0, 49151), max_size=60), skip=st.booleans())
def test_smollm2_random_ids(ids: list[int], skip: bool) -> None:
    tokenizer = tiny_tokenizers.smollm2()
    assert "".join(stream(tokenizer, ids, list(range(60)), skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.smollm2
def test_smollm2_every_id_alone() -> None:
    tokenizer = tiny_tokenizers.smollm2()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.uses_table
    for i in range(tokenizer.vocab_size):
        state = detokenizer.new_state(skip_special_tokens=False)
        assert state.push([i]) + state.finish() == tokenizer.id_to_token(i)
