"""TextStream: stop strings, stop tokens and held text, against a plain reference and for every split."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RequestError
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish
from phalanx.text.detokenizer import Detokenizer
from phalanx.text.output import FinishReason, TextDelta, TextStream
from phalanx.text.stop_strings import StopMatcher, _Progress
from phalanx.text.tokenizer import Tokenizer
from tests.unit import tiny_tokenizers

FAMILIES = {
    "byte_level": tiny_tokenizers.byte_level,
    "byte_fallback": tiny_tokenizers.byte_fallback,
    "metaspace": tiny_tokenizers.metaspace,
}


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """The plain definition: the first stop to complete, the longest of those that complete there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending)), end
    return None


def reference(
    tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams, finish: Finish
) -> tuple[str, int, FinishReason]:
    """Text, number of ids and reason, by decoding every prefix anew."""
    stop_token = ids[-1] if finish == Finish.STOP and ids else None
    shown = ids[:-1] if stop_token is not None and not sampling.no_stop_trim else ids
    detokenizer = tiny_tokenizers.detokenizer(tokenizer)
    skip = sampling.skip_special_tokens
    complete = [(detokenizer.new_state(skip).push(shown[:k]), k) for k in range(len(shown) + 1)]
    whole = tokenizer.decode(shown, skip_special_tokens=skip)
    for text, num_ids in [*complete, (whole, len(ids))]:
        match = first_match(text, sampling.stop)
        if match is not None:
            start, end = match
            shown_text = text[: end if sampling.no_stop_trim else start]
            return shown_text, num_ids, FinishReason("stop", text[start:end])
    kinds = {Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}
    reason = FinishReason("stop", stop_token) if finish == Finish.STOP else FinishReason(kinds[finish])
    return whole, len(ids), reason


def run(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], sampling: SamplingParams, finish: Finish
) -> tuple[TextStream, list[TextDelta]]:
    stream = TextStream(tiny_tokenizers.detokenizer(tokenizer), sampling)
    bounds = [0, *sorted(c for c in set(cuts) if 0 < c < len(ids)), len(ids)]
    deltas = []
    for n in range(len(bounds) - 1):
        is_last = n == len(bounds) - 2
        deltas.append(stream.push(ids[bounds[n] : bounds[n + 1]], finish if is_last else Finish.NONE))
    return stream, deltas


FINISHES = st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.ABORT, Finish.ERROR])
STOPS = st.lists(st.text("abe th世\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)


@pytest.mark.fuzz
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_stream_equals_reference(family: str, data: st.DataObject) -> None:
    tokenizer = FAMILIES[family]()
    words = data.draw(st.text("abe th世👩", max_size=25))
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8)
    ids = data.draw(random_ids) + tokenizer.encode(words) + data.draw(random_ids)
    sampling = SamplingParams(
        stop=data.draw(STOPS),
        no_stop_trim=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
    )
    finish = data.draw(FINISHES)
    stream, deltas = run(tokenizer, ids, data.draw(st.lists(st.integers(0, 40))), sampling, finish)
    text, num_ids, reason = reference(tokenizer, ids, sampling, finish)
    assert "".join(d.text or "" for d in deltas) == text == stream.output_text
    assert sum(d.num_tokens for d in deltas) == num_ids
    assert stream.output_ids == ids[:num_ids]
    assert [d.finish_reason for d in deltas if d.finish_reason is not None] == [reason]
    assert stream.finish_reason == reason


@pytest.mark.fuzz
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple),
    cuts=st.lists(st.integers(1, 29)),
    keep=st.booleans(),
)
def test_matcher_equals_definition_and_holds_no_more_than_needed(
    text: str, stops: tuple[str, ...], cuts: list[int], keep: bool
) -> None:
    matcher = StopMatcher(stops, keep_match=keep)
    shown, matched = "", None
    bounds = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for a, b in pairwise(bounds):
        more, matched = matcher.feed(text[a:b])
        shown += more
        if matched is not None:
            break
        read = text[:b]
        longest = max(k for k in range(b + 1) if k == 0 or any(s.startswith(read[-k:]) for s in stops))
        assert shown == read[: b - longest]
    match = first_match(text, stops)
    if match is None:
        assert matched is None
        assert shown + matcher.flush() == text
    else:
        assert matched == text[match[0] : match[1]]
        assert shown == text[: match[1] if keep else match[0]]
        assert matcher.flush() == ""


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """One id per piece."""
    assert tokenizer.table is not None
    return [tokenizer.table.raw.index(piece.encode()) for piece in pieces]


def stream_of(tokenizer: Tokenizer | None = None, **sampling: object) -> TextStream:
    tokenizer = tokenizer or tiny_tokenizers.byte_level()
    return TextStream(tiny_tokenizers.detokenizer(tokenizer), SamplingParams(**sampling))


def spell(text: str) -> list[int]:
    return ids_of(tiny_tokenizers.byte_level(), *text)


def test_stop_over_several_tokens_never_leaks() -> None:
    stream = stream_of(stop=("DEFGHIJ",))
    deltas = [stream.push([i]) for i in spell("ABCDEFGHIJKLM")]
    assert [d.text for d in deltas] == ["A", "B", "C", *[""] * 10]
    assert [d.num_tokens for d in deltas] == [1] * 10 + [0] * 3
    assert [n for n, d in enumerate(deltas) if d.finish_reason] == [9]
    assert stream.output_text == "ABC"
    assert stream.output_ids == spell("ABCDEFGHIJ")
    assert stream.finish_reason == FinishReason("stop", "DEFGHIJ")


@pytest.mark.parametrize(
    ("finish", "kind"), [(Finish.LENGTH, "length"), (Finish.ABORT, "abort"), (Finish.ERROR, "error")]
)
def test_text_that_almost_matched_is_not_lost_at_the_end(finish: Finish, kind: str) -> None:
    stream = stream_of(stop=("DEFGHIJ",))
    assert stream.push(spell("ABCDEFGH")).text == "ABC"
    assert stream.push([], finish) == TextDelta("DEFGH", 0, FinishReason(kind))


def test_text_that_stops_to_match_is_shown_again() -> None:
    stream = stream_of(stop=("aab", "abc"))
    assert [stream.push([i]).text for i in spell("aaaabx")] == ["", "", "a", "a", "", ""]
    assert stream.finish_reason == FinishReason("stop", "aab")
    assert stream.output_text == "aa"


def test_stop_inside_a_token() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    ids = ids_of(tokenizer, "x", " the", "y")
    for keep, text in ((False, "x t"), (True, "x th")):
        stream = stream_of(stop=("h",), no_stop_trim=keep)
        assert stream.push(ids) == TextDelta(text, 2, FinishReason("stop", "h"))
        assert stream.output_ids == ids[:2]
        assert stream.push(ids, Finish.LENGTH) == TextDelta("", 0)
        assert stream.output_ids == ids[:2]


def test_stop_wins_over_length_at_the_same_token() -> None:
    stream = stream_of(stop=("c",))
    assert stream.push(spell("abc"), Finish.LENGTH) == TextDelta("ab", 3, FinishReason("stop", "c"))


def test_the_longest_of_the_stops_that_complete_together() -> None:
    stream = stream_of(stop=("END", "THE END"))
    assert stream.push(spell("x THE END")).finish_reason == FinishReason("stop", "THE END")
    assert stream.output_text == "x "


@pytest.mark.parametrize(
    ("keep", "skip", "text"),
    [(False, True, "hi"), (False, False, "hi"), (True, True, "hi"), (True, False, "hi</s>")],
)
def test_stop_token_counts_but_is_not_shown(keep: bool, skip: bool, text: str) -> None:
    (eos,) = tiny_tokenizers.byte_level().eos_token_ids
    stream = stream_of(no_stop_trim=keep, skip_special_tokens=skip)
    assert stream.push([*spell("hi"), eos], Finish.STOP) == TextDelta(text, 3, FinishReason("stop", eos))
    assert stream.output_ids == [*spell("hi"), eos]


def test_ordinary_token_as_stop_token() -> None:
    for keep, text in ((False, "hi"), (True, "hi!")):
        stream = stream_of(no_stop_trim=keep)
        stream.push(spell("hi"))
        stream.push(spell("!"), Finish.STOP)
        assert stream.output_text == text
        assert stream.finish_reason == FinishReason("stop", spell("!")[0])


def test_half_a_character_before_a_stop_token() -> None:
    (eos,) = tiny_tokenizers.byte_level().eos_token_ids
    half = tiny_tokenizers.byte_level().encode("👩")[:-1]
    stream = stream_of()
    assert stream.push([*spell("a"), *half]).text == "a"
    assert stream.push([eos], Finish.STOP) == TextDelta("\ufffd", 1, FinishReason("stop", eos))


def test_no_token_at_all() -> None:
    stream = stream_of()
    assert stream.output_text == ""
    assert stream.push([], Finish.LENGTH) == TextDelta("", 0, FinishReason("length"))
    assert stream.output_text == "" and stream.output_ids == []


def test_arrays_and_tuples() -> None:
    stream = stream_of()
    assert stream.push(np.array(spell("ab"), np.int32)).text == "ab"
    assert stream.push(tuple(spell("c"))).text == "c"
    assert stream.output_ids == spell("abc")
    assert all(type(i) is int for i in stream.output_ids)


def test_without_a_tokenizer() -> None:
    stream = TextStream(None, SamplingParams())
    assert stream.push([5, 6]) == TextDelta(None, 2)
    assert stream.push([7], Finish.STOP) == TextDelta(None, 1, FinishReason("stop", 7))
    assert stream.push([8]) == TextDelta(None, 0)
    assert stream.output_ids == [5, 6, 7]
    assert stream.output_text is None
    with pytest.raises(RequestError, match="tokenizer") as error:
        TextStream(None, SamplingParams(stop=("x",)))
    assert error.value.status == 400 and error.value.param == "stop"


def test_unknown_finish_is_refused() -> None:
    with pytest.raises(ValueError, match="9"):
        stream_of().push([1], 9)


def test_streams_of_equal_stops_keep_their_own_progress() -> None:
    first, second = stream_of(stop=("ab",)), stream_of(stop=("ab",))
    assert first.push(spell("a")).text == ""
    assert second.push(spell("b")).text == "b"
    assert first.push(spell("b")).finish_reason == FinishReason("stop", "ab")
    assert second.finish_reason is None


def test_a_stop_given_twice_is_one() -> None:
    matcher = StopMatcher(("ab", "ab", "b!"), keep_match=False)
    assert [matcher.feed(text) for text in ("x", "a", "c", "ab")] == [
        ("x", None),
        ("", None),
        ("ac", None),
        ("", "ab"),
    ]


def test_no_stops_and_empty_stops_are_refused() -> None:
    for stops in ((), ("",), ("a", "")):
        with pytest.raises(ValueError, match="non-empty"):
            StopMatcher(stops, keep_match=False)


def test_long_stops_cost_memory_only_as_far_as_the_text_follows_them() -> None:
    """Thousands of requests, each with its own long stop strings, and all of them kept."""
    stops = [(f"{i:05}" * 800, "x" * 90) for i in range(10, 99)]  # all begin with three zeros
    tracemalloc.start()
    try:
        matchers = [StopMatcher(stop, keep_match=False) for stop in stops]
        assert all(matcher.feed("0" * 9) == ("0" * 6, None) for matcher in matchers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak / len(matchers) < 2_000


@pytest.mark.parametrize(
    "stop", ["[", "]", "^", "-", "\\", "[^a]", ".*", "a-z", "\n", "&&", "||", "~~", "--"]
)
def test_stops_are_not_patterns(stop: str) -> None:
    stream = stream_of(stop=(stop,))
    assert stream.push(spell(f"xyz{stop}w")) == TextDelta("xyz", 3 + len(stop), FinishReason("stop", stop))


@pytest.mark.parametrize("piece", ["a" * 1999 + "c", "a" * 2000, "a"])
def test_long_periodic_stop_is_linear(piece: str) -> None:
    """Many equal letters restart the match over and over; each letter still costs a step or two."""
    steps = 0

    class Counting(list[int]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def,override]
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    progress = _Progress("a" * 2000 + "b")
    progress.fail = Counting(progress.fail)
    text = piece * (20_000 // len(piece))
    assert progress.read(text, len(text)) == -1
    assert progress.matched == (0 if piece[-1] == "c" else 2000)
    assert steps <= 2 * len(text) + 2 * 2000  # of reading, and of growing the table


@pytest.mark.smollm2
def test_smollm2_conversation() -> None:
    tokenizer = tiny_tokenizers.smollm2()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("Sure: 世界 👩‍👩‍👧 é.\n\nUser: more?<|im_end|>")
    stream = TextStream(detokenizer, SamplingParams(stop=("\n\nUser:",)))
    texts = [stream.push([i], Finish.STOP if i == 2 else Finish.NONE).text for i in ids]
    assert "".join(t or "" for t in texts) == stream.output_text == "Sure: 世界 👩‍👩‍👧 é."
    assert stream.finish_reason == FinishReason("stop", "\n\nUser:")
    plain = TextStream(detokenizer, SamplingParams())
    plain.push(ids, Finish.STOP)
    assert plain.output_text == "Sure: 世界 👩‍👩‍👧 é.\n\nUser: more?"
    assert plain.finish_reason == FinishReason("stop", 2)


@pytest.mark.fuzz
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_whole_ids_may_go_by_the_table(family: str, data: st.DataObject) -> None:
    """`push_whole` where it agrees, `push` where not: the same ids and text, and JSON of that text."""
    tokenizer = FAMILIES[family]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    sampling = SamplingParams(skip_special_tokens=data.draw(st.booleans()))
    detokenizer = tiny_tokenizers.detokenizer(tokenizer)
    mixed, plain = TextStream(detokenizer, sampling), TextStream(detokenizer, sampling)
    for token in ids:
        wanted = plain.push([token]).text
        piece = mixed.push_whole(token) if data.draw(st.booleans()) else None
        if piece is None:
            assert mixed.push([token]).text == wanted
        else:
            assert msgspec.json.decode(b'"' + piece + b'"') == wanted
            assert b'"' + piece + b'"' == msgspec.json.encode(wanted)
    assert mixed.push([], Finish.LENGTH) == plain.push([], Finish.LENGTH)
    assert mixed.output_ids == plain.output_ids == ids
    assert mixed.output_text == plain.output_text
    assert mixed.push_whole(0) is None and mixed.output_ids == ids


def test_what_needs_more_does_not_go_by_the_table() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    detokenizer = tiny_tokenizers.detokenizer(tokenizer)
    (letter,) = tokenizer.encode("a")
    assert TextStream(detokenizer, SamplingParams()).push_whole(letter) == b"a"
    assert TextStream(detokenizer, SamplingParams(stop=("x",))).push_whole(letter) is None
    assert TextStream(None, SamplingParams()).push_whole(letter) is None
    half = TextStream(detokenizer, SamplingParams())
    half.push(tokenizer.encode("世")[:1])
    assert half.push_whole(letter) is None
