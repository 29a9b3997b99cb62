"""Event cutting, parsing and figures of the load client, with given time stamps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.bench.backends import Flavor
from phalanx.bench.check import check_possible
from phalanx.bench.connection import RawRecord
from phalanx.bench.distribution import Distribution
from phalanx.bench.errors import BenchError
from phalanx.bench.metrics import Asked, Metrics, compute_metrics
from phalanx.bench.parse import Outcome, parse_record
from phalanx.bench.report import json_line, series_fields
from phalanx.bench.sse import parse_events

DONE = b"data: [DONE]\n\n"


class Words:
    """A tokenizer for which each whitespace-separated word is one token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


def native(text: str, count: int, **fields: object) -> bytes:
    body = {"text": text, "meta_info": {"completion_tokens": count, "prompt_tokens": 3}, **fields}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def completion(text: str, usage: int | None = None) -> bytes:
    body: dict = {"choices": [{"index": 0, "text": text}]}
    if usage is not None:
        body["usage"] = {"completion_tokens": usage, "prompt_tokens": 3}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chat(delta: dict) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


def usage_only(count: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode() + b"\n\n"


def record(*timed: tuple[float, bytes], start: float = 100.0, index: int = 0, **fields: object) -> RawRecord:
    """A record whose pieces arrived at `start + ms / 1000`."""
    times = [start + ms / 1e3 for ms, _ in timed]
    pieces = [piece for _, piece in timed]
    end = times[-1] if times else start
    made = RawRecord(index, start, start, start, end, 200, times, pieces)
    return dataclasses.replace(made, **fields)


def figures(*outcomes: Outcome, duration_s: float = 1.0, **kwargs: object) -> Metrics:
    n = len(outcomes)
    ones = np.ones(n, np.int64)
    asked = Asked(3 * ones, 2 * ones, np.zeros(n), np.zeros(n), np.empty(0))
    return compute_metrics(outcomes, asked, duration_s, Words(), **kwargs)


# ---- events


def test_one_event_per_blank_line_with_the_time_of_its_last_byte() -> None:
    events = parse_events([1.0, 2.0, 3.0], [b"data: a\n\ndata:", b" b", b"\n\ndata: c\n\n"])
    assert [(event.time, event.data) for event in events] == [(1.0, b"a"), (3.0, b"b"), (3.0, b"c")]


def test_crlf_cr_comments_names_and_multi_line_data() -> None:
    body = b": ping\r\n\r\nevent: error\r\ndata: x\r\ndata: y\r\nid: 7\r\n\r\ndata: z\r\rdata:last"
    events = parse_events([1.0], [body])
    assert [(event.name, event.data) for event in events] == [("error", b"x\ny"), ("", b"z"), ("", b"last")]


def test_no_bytes_and_no_events() -> None:
    assert parse_events([], []) == []
    assert parse_events([1.0], [b": only a comment\n\n"]) == []


def test_a_byte_order_mark_is_skipped_and_keeps_the_times_right() -> None:
    events = parse_events([1.0, 2.0], [b"\xef\xbb\xbfdata: a\n", b"\ndata: b\n\n"])
    assert [(event.time, event.data) for event in events] == [(1.0, b"a"), (2.0, b"b")]


@pytest.mark.fuzz
@given(
    texts=st.lists(st.text(alphabet='ab é:"\\', max_size=6), min_size=1, max_size=6),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_cuts_anywhere_change_nothing_but_the_time(texts: list[str], ending: str, cuts: list[int]) -> None:
    lines = [json.dumps(text).encode() for text in texts]
    end = ending.encode()
    body = b"".join(b"data: " + line + end + end for line in lines)
    bounds = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(bounds)]
    times = [float(i) for i in range(len(pieces))]
    events = parse_events(times, pieces)
    assert [event.data for event in events] == lines
    # The time is that of the piece holding the first byte after the data.
    position = 0
    for event, line in zip(events, lines, strict=True):
        stop = position + len(b"data: ") + len(line)
        position = stop + 2 * len(end)
        expected = next(i for i, bound in enumerate(bounds[1:]) if stop < bound)
        assert event.time == expected


# ---- parsing and figures of one stream


def b53() -> RawRecord:
    return record(
        (0, native("a", 1)),
        (100, native("a b c d e", 5)),
        (200, native("a b c d e f g h i", 9) + DONE),
    )


def test_b53_chunks_of_several_tokens() -> None:
    outcome = parse_record(b53(), Flavor.NATIVE, True)
    metrics = figures(outcome)
    assert outcome.text == "a b c d e f g h i"
    assert metrics.ttft.mean == pytest.approx(0.0, abs=1e-6)
    assert metrics.itl.count == 8
    assert metrics.itl.mean == pytest.approx(25.0)
    assert metrics.itl.max == pytest.approx(25.0)
    assert metrics.tpot.mean == pytest.approx(200 / 8)
    assert metrics.e2e.mean == pytest.approx(200.0)
    assert (metrics.total_output, metrics.total_output_retokenized) == (9, 9)
    assert metrics.total_input_server == 3


def test_b53_over_the_openai_route_with_usage_in_every_chunk() -> None:
    raw = record(
        (0, completion("a ", 1)), (100, completion("b c d e ", 5)), (200, completion("f g h i", 9) + DONE)
    )
    metrics = figures(parse_record(raw, Flavor.COMPLETIONS, True))
    assert metrics.itl.mean == pytest.approx(25.0)
    assert metrics.num_retokenized_itl == 0


def test_chunks_without_counts_are_weighted_by_their_own_tokens() -> None:
    raw = record(
        (0, completion("a ")),
        (100, completion("b c d e ")),
        (200, completion("f g h i") + usage_only(9) + DONE),
    )
    metrics = figures(parse_record(raw, Flavor.COMPLETIONS, True))
    assert metrics.itl.mean == pytest.approx(25.0)
    assert (metrics.num_retokenized_itl, metrics.total_output) == (1, 9)
    assert metrics.count_sources == {"server": 1, "retokenized": 0}


def test_retokenized_chunks_add_up_to_the_whole_answers_length() -> None:
    """A word cut over chunks is a token in each: eight chunks here, but four tokens in the whole text."""
    pieces = ["a", "b c", "d", " e", "f", "g ", "h", "i"]  # abc def g hi
    assert len(Words().encode("".join(pieces))) == 4
    raw = record(*((100 * n, completion(text)) for n, text in enumerate(pieces)), (700, DONE))
    outcome = parse_record(raw, Flavor.COMPLETIONS, True)
    metrics = figures(outcome)
    assert (metrics.total_output, metrics.count_sources["retokenized"]) == (4, 1)
    assert metrics.peak_output_tokens_per_s == 4.0
    assert metrics.timeline.token_counts.sum() == 4
    assert (metrics.itl.count, metrics.ttft.max) == (3, pytest.approx(0.0, abs=1e-6))
    assert metrics.itl.mean == pytest.approx(200.0)


@pytest.mark.fuzz
@given(
    texts=st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), min_size=1, max_size=12),
    usage=st.none() | st.integers(1, 40),
)
def test_tokens_over_time_are_never_more_than_tokens_in_all(texts: list[str], usage: int | None) -> None:
    end = DONE if usage is None else usage_only(usage) + DONE
    raw = record(*((10 * n, completion(text)) for n, text in enumerate(texts)), (500, end))
    metrics = figures(parse_record(raw, Flavor.COMPLETIONS, True))
    # Blank text is no word, yet something was shown: it counts as one token over time.
    assert metrics.timeline.token_counts.sum() == max(metrics.total_output, 1)
    check_possible(metrics)


def test_one_chunk_per_token_needs_no_retokenizing() -> None:
    # The server's total settles it: as many chunks as tokens.
    raw = record(
        (0, completion("ab")), (50, completion("cd")), (150, completion(" e") + usage_only(3) + DONE)
    )
    metrics = figures(parse_record(raw, Flavor.COMPLETIONS, True))
    assert metrics.num_retokenized_itl == 0
    assert (metrics.itl.min, metrics.itl.max) == (pytest.approx(50.0), pytest.approx(100.0))


def test_output_length_is_retokenized_when_the_server_says_nothing() -> None:
    raw = record((10, completion("a b ")), (20, completion("c") + DONE))
    metrics = figures(parse_record(raw, Flavor.COMPLETIONS, True))
    assert metrics.total_output == 3
    assert metrics.count_sources == {"server": 0, "retokenized": 1}
    assert metrics.tpot.mean == pytest.approx(10 / 2)


def test_role_only_and_empty_chunks_are_no_tokens() -> None:
    raw = record(
        (5, chat({"role": "assistant", "content": ""})),
        (30, chat({"content": None, "reasoning_content": "hm "})),
        (40, chat({"content": "a"})),
        (50, chat({}) + usage_only(2) + DONE),
    )
    outcome = parse_record(raw, Flavor.CHAT, True)
    assert outcome.ttft == pytest.approx(0.030)
    metrics = figures(outcome)
    assert (metrics.itl.count, metrics.itl.mean) == (1, pytest.approx(10.0))
    assert outcome.text == "hm a"


def test_tokens_without_text_join_the_next_text() -> None:
    # 1 token held back (half a character), then 3 at once; the last event repeats the text with its reason.
    raw = record(
        (10, native("", 1)), (20, native("é", 2)), (50, native("é x", 5)), (60, native("é x", 5) + DONE)
    )
    outcome = parse_record(raw, Flavor.NATIVE, True)
    assert outcome.ttft == pytest.approx(0.020)
    assert outcome.event_tokens is not None
    assert outcome.event_tokens.tolist() == [2, 3]
    assert figures(outcome).itl.mean == pytest.approx(10.0)


def test_incremental_native_output_is_told_from_cumulative() -> None:
    by_ids = record(
        (0, native("a", 1, output_ids=[1])),
        (5, native("ab", 2, output_ids=[2])),
        (9, native("c", 3, output_ids=[3]) + DONE),
    )
    assert parse_record(by_ids, Flavor.NATIVE, True).text == "aabc"
    by_text = record((0, native("x", 1)), (5, native("y", 2) + DONE))
    assert parse_record(by_text, Flavor.NATIVE, True).text == "xy"
    cumulative = record((0, native("a", 1, output_ids=[1])), (5, native("ab", 2, output_ids=[1, 2]) + DONE))
    assert parse_record(cumulative, Flavor.NATIVE, True).text == "ab"


# ---- B54: what was not measured is left out and counted


def test_b54_streams_without_text_one_token_usage_only() -> None:
    no_text = parse_record(record((10, DONE)), Flavor.NATIVE, True)
    one = parse_record(record((10, native("a", 1) + DONE), index=1), Flavor.NATIVE, True)
    usage = parse_record(record((10, usage_only(7) + DONE), index=2), Flavor.COMPLETIONS, True)
    metrics = figures(no_text, one, usage)
    assert metrics.num_completed == 3
    assert [no_text.ttft, usage.ttft] == [None, None]
    assert metrics.ttft.count == 1
    assert metrics.ttft.mean == pytest.approx(10.0)
    assert (metrics.tpot.count, metrics.tpot.mean, metrics.itl.p99) == (0, None, None)
    assert metrics.unmeasured == {"ttft": 2, "tpot": 3, "itl": 3}
    assert metrics.total_output == 8
    # Seven tokens that no text showed came, at the latest, with the end.
    assert metrics.peak_output_tokens_per_s == 8.0
    check_possible(metrics)


def test_whole_answers_measure_only_their_end() -> None:
    body = json.dumps(
        {"text": "a b", "meta_info": {"completion_tokens": 2, "prompt_tokens": 4, "cached_tokens": 1}}
    )
    outcome = parse_record(record((40, body.encode())), Flavor.NATIVE, False)
    metrics = figures(outcome)
    assert (outcome.success, outcome.text, metrics.total_output, metrics.total_cached) == (True, "a b", 2, 1)
    assert metrics.e2e.mean == pytest.approx(40.0)
    assert (metrics.ttft.count, metrics.tpot.count) == (0, 0)
    message = {"choices": [{"message": {"content": "x y z"}}], "usage": {"completion_tokens": 3}}
    answer = parse_record(record((40, json.dumps(message).encode())), Flavor.CHAT, False)
    assert (answer.text, answer.num_output_tokens) == ("x y z", 3)


@pytest.mark.parametrize(
    "pieces",
    [
        [(40, native("a b c d", 4)), (41, DONE)],  # one chunk
        [(40, native("a", 1) + native("a b", 2) + native("a b c d", 4)), (41, DONE)],  # three in one read
    ],
)
def test_what_comes_in_one_piece_has_no_tpot(pieces: list[tuple[float, bytes]]) -> None:
    whole = parse_record(record(*pieces), Flavor.NATIVE, True)
    paced = parse_record(
        record((10, native("a", 1)), (30, native("a b", 2) + DONE), index=1), Flavor.NATIVE, True
    )
    one = parse_record(record((10, native("a", 1) + DONE), index=2), Flavor.NATIVE, True)
    metrics = figures(whole, paced, one, goodput_slos_ms={"tpot": 14.0})
    assert whole.ttft == pytest.approx(0.040)
    assert (metrics.tpot.count, metrics.tpot.min) == (1, pytest.approx(20.0))
    assert (metrics.unmeasured["tpot"], metrics.num_in_one_piece) == (2, 1)
    assert (metrics.unmeasured["ttft"], metrics.total_output) == (0, 7)
    assert (metrics.unmeasured["itl"], metrics.itl.count, metrics.itl.min) == (2, 1, pytest.approx(20.0))
    # Three tokens within the 41 ms of the whole are at most 13.7 ms each; one token has no TPOT to miss.
    assert metrics.goodput is not None
    assert metrics.goodput.attainment == pytest.approx(2 / 3)
    strict = figures(whole, paced, one, goodput_slos_ms={"tpot": 13.0}).goodput
    assert strict is not None
    assert strict.attainment == pytest.approx(1 / 3)


def test_chunks_of_one_read_share_the_gap_before_them() -> None:
    """Ten milliseconds for three tokens are no gaps of 10, 0 and 0: the reads were 10 ms apart, no more."""
    three = native("a b", 2) + native("a b c", 3) + native("a b c d", 4)
    outcome = parse_record(record((5, native("a", 1)), (15, three), (25, DONE)), Flavor.NATIVE, True)
    metrics = figures(outcome)
    assert (metrics.itl.count, metrics.itl.mean) == (3, pytest.approx(10 / 3))
    assert (metrics.itl.min, metrics.itl.max) == (pytest.approx(10 / 3), pytest.approx(10 / 3))
    assert metrics.tpot.mean == pytest.approx(20 / 3)
    # Nothing is known of the tokens that came with the first.
    first = parse_record(
        record((5, native("a", 1) + native("a b", 2)), (15, native("a b c", 3) + DONE)), Flavor.NATIVE, True
    )
    metrics = figures(first)
    assert (metrics.itl.count, metrics.itl.mean, metrics.total_output) == (1, pytest.approx(10.0), 3)
    assert metrics.timeline.token_counts.sum() == 3


# ---- B56: failures


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (
            record((0, native("a", 1)), (9, b'data: {"error": {"message": "out of\\nmemory"}}\n\n' + DONE)),
            "error event: out of memory",
        ),
        (record((0, b"event: error\ndata: {}\n\n" + DONE)), "error event: {}"),
        (record((0, b'data: {"object": "error", "message": "old style"}\n\n')), "error event: old style"),
        (record((0, b'{"error": {"message": "busy"}}'), status=503), "HTTP 503: busy"),
        (record((0, b"<html>bad gateway"), status=502), "HTTP 502: <html>bad gateway"),
        (record((0, native("a", 1))), "stream ended without [DONE]"),
        (record(), "stream ended without [DONE]"),
        (
            record((0, native("a", 1)), failure="connection reset by the server"),
            "connection reset by the server",
        ),
        (record((0, b'data: {"tex'), failure="connection cut"), "connection cut"),
        (
            record((0, b'data: {"error": {"message": "oom"}}\n\n'), failure="connection cut"),
            "error event: oom",
        ),
        (
            record((0, b"data: {oops\n\n" + DONE)),
            "malformed event: JSON is malformed: object keys must be strings (byte 1)",
        ),
        (record((0, b"data: [1]\n\n" + DONE)), "malformed event: Expected `object`, got `array`"),
        (record((0, native("a", 3) + native("ab", 2) + DONE)), "malformed event: token count went down"),
        (
            record((0, native("a", -1) + DONE)),
            "malformed event: Expected `int` >= 0 - at `$.meta_info.completion_tokens`",
        ),
        (
            record(
                (0, b'data: {"meta_info": {"finish_reason": {"type": "abort", "message": "queue full"}}}\n\n')
            ),
            "aborted by the server: queue full",
        ),
    ],
)
def test_b56_failures_are_named_and_excluded(raw: RawRecord, cause: str) -> None:
    failed = parse_record(raw, Flavor.NATIVE, True)
    assert failed.failure == cause
    good = parse_record(dataclasses.replace(b53(), index=1), Flavor.NATIVE, True)
    metrics = figures(failed, good)
    assert metrics.failures == {cause: 1}
    assert (metrics.num_sent, metrics.num_completed, metrics.total_output, metrics.itl.count) == (2, 1, 9, 8)
    assert metrics.output_lens == [0, 9]
    check_possible(metrics)


OPENAI = "choices with text (is --backend right?)"
NATIVE = "text, output_ids or meta_info (is --backend right?)"


@pytest.mark.parametrize(
    ("body", "flavor", "cause"),
    [
        ({"text": "a b", "meta_info": {"completion_tokens": 2}}, Flavor.COMPLETIONS, OPENAI),
        ({"text": "a b", "meta_info": {"completion_tokens": 2}}, Flavor.CHAT, OPENAI),
        ({"choices": [{"text": "a b"}], "usage": {"completion_tokens": 2}}, Flavor.NATIVE, NATIVE),
        ({"choices": [{"index": 0, "token": "a"}]}, Flavor.CHAT, OPENAI),
        ({"choices": []}, Flavor.CHAT, OPENAI),
        ({"usage": {"completion_tokens": 5}}, Flavor.COMPLETIONS, OPENAI),
        ({"generated_text": "a"}, Flavor.NATIVE, NATIVE),
        ({}, Flavor.NATIVE, NATIVE),
    ],
)
def test_another_apis_answer_is_a_failure_not_an_answer_of_no_tokens(
    body: dict, flavor: Flavor, cause: str
) -> None:
    line = json.dumps(body).encode()
    streamed = parse_record(record((5, b"data: " + line + b"\n\n"), (9, DONE)), flavor, True)
    whole = parse_record(record((5, line)), flavor, False)
    assert streamed.failure == f"malformed event: no {cause}"
    assert whole.failure == f"malformed answer: no {cause}"


@pytest.mark.parametrize(
    ("body", "flavor"),
    [
        ({"text": "", "meta_info": {"completion_tokens": 0}}, Flavor.NATIVE),
        ({"output_ids": [5], "meta_info": {"completion_tokens": 1}}, Flavor.NATIVE),
        ({"choices": [{"text": ""}]}, Flavor.COMPLETIONS),
        ({"choices": [{"delta": {}}]}, Flavor.CHAT),
    ],
)
def test_an_answer_without_text_in_the_right_shape_is_none(body: dict, flavor: Flavor) -> None:
    line = json.dumps(body).encode()
    # A ping that says nothing may come before it.
    raw = record((1, b"data: {}\n\n"), (5, b"data: " + line + b"\n\n"), (9, DONE))
    assert (parse_record(raw, flavor, True).failure, parse_record(raw, flavor, True).ttft) == (None, None)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.sampled_from([10**6, 10**8, 2**63, 10**40, 1e308, "abort", "error"])
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                "text meta_info completion_tokens prompt_tokens finish_reason type output_ids choices delta"
                " content usage error message prompt_tokens_details".split()
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
ANY_EVENT = JSON.map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n") | st.binary()


@pytest.mark.fuzz
@given(
    events=st.lists(ANY_EVENT, max_size=4),
    flavor=st.sampled_from(Flavor),
    stream=st.booleans(),
    done=st.booleans(),
)
def test_whatever_a_server_sends_becomes_an_outcome(
    events: list[bytes], flavor: Flavor, stream: bool, done: bool
) -> None:
    pieces = [*events, DONE] if done else events
    if not stream and events:
        pieces = [events[0].removeprefix(b"data: ")]
    outcome = parse_record(record(*enumerate(pieces)), flavor, stream)
    metrics = figures(outcome)
    check_possible(metrics)
    assert metrics.num_completed == outcome.success
    assert json.loads(json_line(series_fields(metrics) | {"failures": metrics.failures}))


def test_all_failed_gives_no_figures_and_no_division() -> None:
    failed = parse_record(record(status=500), Flavor.NATIVE, True)
    metrics = figures(failed, failed, duration_s=0.0)
    assert metrics.failures == {"HTTP 500": 2}
    assert (metrics.e2e.mean, metrics.concurrency, metrics.rate(5), metrics.peak_concurrent_requests) == (
        None,
        0.0,
        0.0,
        0,
    )
    check_possible(metrics)
    check_possible(figures())


# ---- totals, peaks, goodput


def stream_outcome(index: int, start: float, token_ms: list[float], end_ms: float) -> Outcome:
    pieces = [(ms, native("w " * n, n)) for n, ms in enumerate(token_ms, 1)]
    raw = record(*pieces, (end_ms, DONE), start=start, index=index)
    return parse_record(raw, Flavor.NATIVE, True)


def test_throughput_concurrency_and_peaks() -> None:
    first = stream_outcome(0, 100.0, [100, 600, 1100], 1500)
    second = stream_outcome(1, 101.2, [100, 200], 300)
    third = stream_outcome(2, 101.6, [100, 200], 400)
    metrics = figures(first, second, third, duration_s=2.0)
    assert metrics.rate(metrics.num_completed) == 1.5
    assert metrics.rate(metrics.total_output) == 3.5
    assert metrics.concurrency == pytest.approx((1.5 + 0.3 + 0.4) / 2.0)
    # Second [1, 2) holds one token of the first and two each of the others.
    assert metrics.peak_output_tokens_per_s == 5.0
    # All three touch it, but second and third never overlap, and the first ends before the third starts.
    assert metrics.peak_concurrent_requests == 3
    assert metrics.peak_in_flight == 2


def test_schedule_delay_is_of_every_request_that_was_sent() -> None:
    outcomes = [stream_outcome(i, 10.0, [100], 200) for i in range(3)]
    outcomes.append(Outcome(3, 10.0, 10.0, failure="connection refused"))
    due, sent = np.asarray([1.0, 1.0, 2.0, 3.0]), np.asarray([1.002, 1.004, 2.012, np.nan])
    ones = np.ones(4, np.int64)
    metrics = compute_metrics(
        outcomes, Asked(ones, ones, due, sent, np.asarray([0.0, 0.001, 0.01, 0.5])), 1.0, Words()
    )
    delay = metrics.schedule_delay
    assert (delay.count, delay.p50, delay.max) == (3, pytest.approx(4.0), pytest.approx(12.0))
    assert delay.p99 == pytest.approx(4.0 + 0.98 * 8.0)
    assert metrics.slot_wait.max == pytest.approx(500.0)


def test_input_totals_are_of_successful_requests_only() -> None:
    metrics = figures(Outcome(0, 0.0, 1.0, failure="x"), stream_outcome(1, 0.0, [10], 20))
    assert (metrics.total_input, metrics.total_input_asked) == (3, 2)


def test_goodput_counts_all_sent_and_needs_every_target() -> None:
    fast = stream_outcome(0, 0.0, [10, 20], 20)
    slow_start = stream_outcome(1, 0.0, [500, 510], 510)
    one_token = stream_outcome(2, 0.0, [10], 20)
    failed = Outcome(3, 0.0, 1.0, failure="x")
    goodput = figures(
        fast, slow_start, one_token, failed, duration_s=2.0, goodput_slos_ms={"ttft": 100.0, "tpot": 15.0}
    ).goodput
    assert goodput is not None
    assert goodput.requests_per_s == 1.0
    assert goodput.attainment == 0.5
    assert goodput.attainment_by_metric == {"ttft": 0.5, "tpot": 0.75}


@pytest.mark.fuzz
@given(
    streams=st.lists(
        st.tuples(st.floats(0, 50), st.lists(st.floats(0, 500), max_size=8), st.booleans()), max_size=8
    )
)
def test_any_run_passes_its_own_check_and_matches_plain_loops(
    streams: list[tuple[float, list[float], bool]],
) -> None:
    outcomes = []
    for index, (start, gaps, ok) in enumerate(streams):
        made = stream_outcome(index, start, np.cumsum(gaps).tolist(), float(sum(gaps)) + 1)
        outcomes.append(made if ok else Outcome(index, start, start, failure="no"))
    metrics = figures(*outcomes)
    check_possible(metrics)
    expected: list[float] = []
    for start, gaps, ok in streams:
        # Tokens of one instant share the gap before them; those of the first have none.
        came = Counter(start + ms / 1e3 for ms in np.cumsum(gaps).tolist()) if ok else Counter()
        for before, instant in itertools.pairwise(sorted(came)):
            expected += [(instant - before) * 1e3 / came[instant]] * came[instant]
    assert metrics.itl.count == len(expected)
    if expected:
        assert metrics.itl.mean == pytest.approx(float(np.mean(expected)), abs=1e-3)
    assert metrics.total_output == sum(len(gaps) for _, gaps, ok in streams if ok)


# ---- B59: an impossible set is refused


def possible() -> Metrics:
    return figures(parse_record(b53(), Flavor.NATIVE, True))


@pytest.mark.parametrize(
    "change",
    [
        {"p50": 33951.94, "p99": 66.38},
        {"p90": 5.0, "p95": 4.0},
        {"max": -1.0},
        {"min": -5.0},
        {"mean": 1e9},
        {"p95": math.nan},
        {"max": math.inf},
    ],
)
@pytest.mark.parametrize("name", ["e2e", "ttft", "tpot", "itl", "schedule_delay"])
def test_b59_disordered_figures_are_refused(name: str, change: dict[str, float]) -> None:
    metrics = possible()
    check_possible(metrics)
    broken = dataclasses.replace(metrics, **{name: dataclasses.replace(getattr(metrics, name), **change)})
    with pytest.raises(BenchError, match=f"impossible result: {name}") as caught:
        check_possible(broken)
    assert caught.value.exit_code == 1


def test_b59_ttft_above_e2e_and_lost_requests_are_refused() -> None:
    metrics = possible()
    late = Distribution.of_seconds(np.full(3, 9.0))
    with pytest.raises(BenchError, match="P99 TTFT"):
        check_possible(dataclasses.replace(metrics, ttft=late))
    with pytest.raises(BenchError, match="add up"):
        check_possible(dataclasses.replace(metrics, num_sent=2))


def test_distribution_is_numpys_percentiles_in_ms() -> None:
    values = np.random.RandomState(0).gamma(2.0, 0.01, size=1001)
    d = Distribution.of_seconds(values)
    assert d.p95 == pytest.approx(1e3 * np.percentile(values, 95))
    assert (d.count, d.std) == (1001, pytest.approx(1e3 * values.std()))
    assert Distribution.of_seconds(np.empty(0)) == Distribution(0)


def test_ttft_above_e2e_is_refused_below_the_maximum_too() -> None:
    metrics = possible()
    e2e = Distribution.of_seconds(np.array([0.01, 0.02, 0.2]))
    for ttft in ([0.19, 0.19, 0.19], [0.005, 0.03, 0.1], [0.001, 0.002, 0.21]):
        late = Distribution.of_seconds(np.array(ttft))
        with pytest.raises(BenchError, match=r"TTFT .* above the E2E latency"):
            check_possible(dataclasses.replace(metrics, e2e=e2e, ttft=late))
    fewer = Distribution.of_seconds(np.array([0.19, 0.19]))  # of the slow ones alone, perhaps
    check_possible(dataclasses.replace(metrics, e2e=e2e, ttft=fewer))
