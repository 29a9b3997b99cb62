"""What a broken or hostile server says, and command lines that cannot be honoured: named, never a crash."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from phalanx.bench.args import add_arguments
from phalanx.bench.backends import Flavor
from phalanx.bench.connection import RawRecord
from phalanx.bench.errors import BenchError
from phalanx.bench.metrics import Asked, compute_metrics
from phalanx.bench.parse import Outcome, parse_record
from phalanx.bench.server_figures import read_server_figures
from phalanx.bench.server_metrics import read_gauges
from phalanx.bench.settle import check_arguments
from phalanx.bench.sse import parse_events
from phalanx.bench.target import Target, make_target
from phalanx.bench.worker import resolve

DONE = b"data: [DONE]\n\n"


def answer(body: bytes, status: int = 200, **fields: str) -> RawRecord:
    return RawRecord(0, 0.0, 0.0, 0.0, 1.0, status, [1.0], [body], **fields)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


# ---- answers


@pytest.mark.parametrize("count", [1_000_001, 10**12, 10**19, 10**30])
@pytest.mark.parametrize("where", ["chunk", "usage"])
def test_token_counts_that_no_answer_has_are_malformed(count: int, where: str) -> None:
    """An array of a number per token would not fit into memory; 10**30 would not even fit into an integer."""
    if where == "chunk":
        body, flavor = event({"text": "a", "meta_info": {"completion_tokens": count}}), Flavor.NATIVE
    else:
        body = event({"choices": [{"text": "a"}], "usage": {"completion_tokens": count}})
        flavor = Flavor.COMPLETIONS
    failure = parse_record(answer(body + DONE), flavor, True).failure
    assert failure is not None
    assert failure.startswith("malformed event: Expected `int` <= 1000000")


def test_prompt_counts_are_bounded_too() -> None:
    def body(count: int) -> bytes:
        return event({"text": "a", "meta_info": {"completion_tokens": 1, "prompt_tokens": count}}) + DONE

    assert parse_record(answer(body(10**8)), Flavor.NATIVE, True).num_prompt_tokens == 10**8
    assert "Expected `int` <= 100000000" in str(
        parse_record(answer(body(10**30)), Flavor.NATIVE, True).failure
    )


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("flavor", [Flavor.COMPLETIONS, Flavor.CHAT])
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_the_server_gave_up_is_a_failure(reason: str, flavor: Flavor, stream: bool) -> None:
    field = "text" if flavor is Flavor.COMPLETIONS else "delta" if stream else "message"
    said = "a" if flavor is Flavor.COMPLETIONS else {"content": "a"}

    def outcome(finish_reason: str) -> Outcome:
        value = {
            "choices": [{field: said, "finish_reason": finish_reason}],
            "usage": {"completion_tokens": 1},
        }
        return parse_record(
            answer(event(value) + DONE if stream else json.dumps(value).encode()), flavor, stream
        )

    assert outcome(reason).failure == f"given up by the server: finish_reason {reason}"
    assert outcome("length").failure is None


def test_events_without_data_are_none() -> None:
    body = b"data:\n\ndata\n\n: ping\n\ndata: x\n\ndata:\ndata:\n\n"
    assert [found.data for found in parse_events([1.0], [body])] == [b"x", b"\n"]


@pytest.mark.parametrize("stream", [True, False])
def test_compressed_answers_are_told(stream: bool) -> None:
    failure = parse_record(answer(b"\x1f\x8b\x08", encoding="gzip"), Flavor.NATIVE, stream).failure
    assert failure == "the answer is compressed (gzip), which was not asked for"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (answer(b"", 503), "HTTP 503"),
        (answer(b'{"error": {"message": "slow down"}}', 429), "HTTP 429: slow down"),
        (
            answer(b"<html>", 307, location="https://x/y"),
            "HTTP 307: redirected to https://x/y (not followed: give that address)",
        ),
        (answer(b"<html>log in</html>"), "answer without events: <html>log in</html>"),
        (answer(b'{"error": {"message": "nope"}}'), "answer without events: nope"),
        (answer(b": ping\n\n" + event({"text": "a"})), "stream ended without [DONE]"),
    ],
)
def test_what_is_no_stream_is_shown(raw: RawRecord, cause: str) -> None:
    assert parse_record(raw, Flavor.NATIVE, True).failure == cause


def test_a_servers_text_cannot_steer_the_terminal() -> None:
    raw = answer(event({"error": {"message": "a\x1b[2Jb\x07\u202ec"}}) + DONE)
    assert parse_record(raw, Flavor.NATIVE, True).failure == "error event: a\ufffd[2Jb\ufffd\ufffdc"
    long = parse_record(answer(event({"error": {"message": "\x1b" * 9000}})), Flavor.NATIVE, True).failure
    assert long is not None
    assert (len(long), long.endswith("...")) == (120, True)


def test_ids_of_requests_make_no_causes_and_the_rest_is_summed() -> None:
    def causes(*failures: str) -> dict[str, int]:
        n = len(failures)
        outcomes = [Outcome(i, 0.0, 1.0, failure=failure) for i, failure in enumerate(failures)]
        asked = Asked(np.ones(n, np.int64), np.ones(n, np.int64), np.zeros(n), np.zeros(n), np.empty(0))
        return compute_metrics(outcomes, asked, 1.0, None).failures  # type: ignore[arg-type]

    assert causes(
        "request 21517887cc7b4b649bcba970d6efc3a5 lost",
        "request 01517887cc7b4b649bcba970d6efc3a5 lost",
        "cmpl-0f8fad5b-d9cb-469f-a165-70867728950e lost",
        "prompt of 4097 tokens",
        "prompt of 5000 tokens",
    ) == {
        "request <id> lost": 2,
        "cmpl-<id> lost": 1,
        "prompt of 4097 tokens": 1,
        "prompt of 5000 tokens": 1,
    }
    many = causes(*(f"prompt of {i} tokens" for i in range(250)))
    assert (len(many), many["150 other causes"], sum(many.values())) == (101, 150, 250)


# ---- what a server says of itself


@pytest.mark.parametrize("value", ["abc", "NaN", "+Inf"])
def test_gauges_that_are_no_numbers_are_no_sample(value: str) -> None:
    assert read_gauges(f"sglang:num_running_reqs {value}\nsglang:num_queue_reqs 1\n") is None


def test_a_figure_that_is_not_finite_is_not_shown() -> None:
    info = {"internal_states": [{"avg_spec_accept_length": float("nan")}]}
    info["host_time_between_steps_ms"] = {"mean": float("inf"), "p99": 2}  # type: ignore[assignment]
    found = read_server_figures(info)
    assert (found.accept_length, found.host_mean_ms, found.host_p99_ms) == (None, None, 2.0)


# ---- command lines


def settle(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--dataset-name", "random", *argv])
    check_arguments(args)
    return args


def test_lists_given_twice_add_up() -> None:
    args = settle("--header", "A=1", "--header", "B=2", "C=3", "--goodput", "ttft:5", "--goodput", "e2el:9")
    assert args.header == [("A", "1"), ("B", "2"), ("C", "3")]
    assert args.goodput == {"ttft": 5.0, "e2el": 9.0}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--goodput", "ttft:5", "ttft:9"), "given twice"),
        (("--tag", "\udcff"), "--tag is not UTF-8"),
        (("--extra-request-body", '{"temperature": NaN}'), "is not JSON"),
        (("--extra-request-body", '{"stop": "\\ud800"}'), "is not JSON"),
    ],
)
def test_what_could_not_be_sent_or_written_is_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(BenchError, match=message) as caught:
        settle(*argv)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("url", ["http://u:secret@h:1", "http://h/a b", "http://h/\u00e9", "http://h\n/x"])
def test_urls_that_would_be_sent_otherwise_than_given_are_refused(url: str) -> None:
    with pytest.raises(BenchError) as caught:
        make_target(url, "", 0, [])
    assert caught.value.exit_code == 2
    assert "secret" not in str(caught.value)


def test_a_host_name_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(BenchError, match="cannot resolve aaaa") as caught:
        resolve(Target("a" * 70, 80))
    assert caught.value.exit_code == 2
