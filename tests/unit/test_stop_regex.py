"""Expressions that end a text: what they match, and what a client may cost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import RequestError
from phalanx.core.sampling_params import SamplingParams
from phalanx.text.output import TextStream
from phalanx.text.stop_regex import MAX_WEIGHT, WINDOW, RegexStops, _weight


@pytest.mark.parametrize(
    ("pattern", "weight"),
    [
        ("abc", 3),
        ("a{3}", 3),
        ("a{2,5}", 5),
        ("a{4,}", 5),
        ("(ab){3}", 9),
        ("((a{9}){9}){9}", 819),
        (r"\d{4}-\d{2}", 16 * 6 + 1),
        (r"[a-z]{3}", 3),
        (r"[^\w\s]{2}", 62),
        (r"\p{Greek}{2}", 32),
        (r"\{3}", 18),
        ("a{99999999999}", 10**8),
        ("[]{9}]{2}", 2),
        ("", 0),
    ],
)
def test_weights(pattern, weight):
    assert _weight(pattern) == weight


@given(st.text(max_size=20))
def test_any_text_is_weighed(pattern):
    try:
        assert _weight(pattern) >= 0
    except RequestError as error:
        assert "flag x" in error.message


def test_too_large_together():
    RegexStops(("a" * MAX_WEIGHT,))
    with pytest.raises(RequestError, match="too large"):
        RegexStops(("a" * MAX_WEIGHT, "b"))


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", "[z-a]", "(?x)a"])
def test_what_does_not_compile(pattern):
    with pytest.raises(RequestError) as caught:
        RegexStops((pattern,))
    assert caught.value.param == "stop_regex" and "\n" not in caught.value.message


@pytest.mark.fuzz
@given(st.sampled_from(["a+b", "ab|ba", "^ab", "b$", "[^a]{2}", "(ab){2}"]), st.text("abc", max_size=30))
def test_ends_where_the_shortest_matching_prefix_ends(pattern, text):
    stops = RegexStops((pattern,))
    found = next((i for i, char in enumerate(text, 1) if stops.feed(char)), None)
    assert found == next((i for i in range(1, len(text) + 1) if re.search(pattern, text[:i])), None)


def test_a_match_may_be_as_long_as_the_window():
    for gap, found in ((WINDOW - 2, "a[^a]*b"), (WINDOW - 1, None)):
        stops = RegexStops(("a[^a]*b",))
        assert stops.feed("a") is None and stops.feed("." * gap) is None
        assert stops.feed("b") == found


def test_without_a_tokenizer():
    with pytest.raises(RequestError) as caught:
        TextStream(None, SamplingParams(stop_regex=("a",)))
    assert caught.value.param == "stop_regex"
