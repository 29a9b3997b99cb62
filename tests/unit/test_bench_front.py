"""The check of `bench front` sees every kind of wrong answer; its client keeps what comes in any pieces."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from phalanx.microbench.front_check import Expected, Mismatch, check_stream, check_whole, split_answer
from phalanx.microbench.front_load import Exchange, StreamLoad, run_in_turn
from phalanx.microbench.front_runs import http_request

EXPECTED = Expected([5, 6, 7], " a b c")
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def event(item: object) -> bytes:
    return b"data: " + json.dumps(item).encode() + b"\n\n"


def chunked(parts: list[bytes]) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


def item(text: str, ids: list[int], count: int, reason: str | None = None) -> bytes:
    meta = {"completion_tokens": count, "finish_reason": None if reason is None else {"type": reason}}
    return event({"text": text, "output_ids": ids, "meta_info": meta})


def chat(text: str | None, reason: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


DONE = b"data: [DONE]\n\n"
INCREMENTAL = [item(" a", [5], 1), item(" b", [6], 2), item(" c", [7], 3, "length"), DONE]
CUMULATIVE = [item(" a", [5], 1), item(" a b", [5, 6], 2), item(" a b c", [5, 6, 7], 3, "length"), DONE]
CHAT = [chat(""), chat(" a"), chat(" b"), chat(" c"), chat(None, "length"), DONE]
STREAMS = {"incremental": INCREMENTAL, "cumulative": CUMULATIVE, "chat": CHAT}


@pytest.mark.parametrize("kind", STREAMS)
def test_right_streams_pass_and_their_token_events_are_counted(kind: str) -> None:
    assert check_stream(kind, chunked(STREAMS[kind]), EXPECTED) == 3
    assert check_stream(kind, chunked([b"".join(STREAMS[kind])]), EXPECTED) == 3


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("fault", ["lost", "doubled", "swapped", "cut", "no end", "after end", "stop"])
def test_wrong_streams_are_seen(kind: str, fault: str) -> None:
    parts = list(STREAMS[kind])
    first = parts.index(chat(" a")) if kind == "chat" else 0
    match fault:
        case "lost" if kind == "cumulative":
            parts[2] = item(" a c", [5, 7], 2, "length")
        case "lost":
            del parts[first + 1]
        case "doubled" if kind == "cumulative":
            parts[1] = item(" a a b", [5, 5, 6], 3)
        case "doubled":
            parts.insert(first, parts[first])
        case "swapped":
            parts[first], parts[first + 1] = parts[first + 1], parts[first]
        case "cut":
            del parts[-2]
        case "no end":
            del parts[-1]
        case "after end":
            parts.append(parts[0])
        case "stop":
            parts[-2] = parts[-2].replace(b"length", b"stop")
    with pytest.raises(Mismatch):
        check_stream(kind, chunked(parts), EXPECTED)


def test_wrong_chunks_and_statuses_are_seen() -> None:
    good = chunked(INCREMENTAL)
    assert split_answer(good) == (200, b"".join(INCREMENTAL))
    for bad in (good[:-1], good + b"x", good[:-5], good.replace(b"\r\ndata: [D", b"\r\n data: [D", 1), b"no"):
        with pytest.raises(Mismatch):
            split_answer(bad)
    with pytest.raises(Mismatch, match="503"):
        check_stream("chat", b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\n{}", EXPECTED)


def test_whole_answers() -> None:
    def answer(ids: list[int], text: str = " a b c") -> bytes:
        body = {"text": text, "output_ids": ids, "meta_info": {"finish_reason": {"type": "length"}}}
        return b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps(body).encode()

    check_whole("incremental", answer([5, 6, 7]), EXPECTED)
    for ids, text in (([5, 7, 6], " a b c"), ([5, 6, 7], " a b"), ([5, 6], " a b c")):
        with pytest.raises(Mismatch):
            check_whole("incremental", answer(ids, text), EXPECTED)


def serve(answers: list[list[bytes]]) -> tuple[int, threading.Thread]:
    """Answers one request per connection in the given pieces; an empty list closes at once."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener:
            for pieces in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.recv(65536)
                    for piece in pieces:
                        connection.sendall(piece)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread


def test_the_client_keeps_all_bytes_and_counts_events() -> None:
    whole = chunked(INCREMENTAL)
    pieces = [[whole], [whole[:-3], whole[-3:]], [whole[i : i + 50] for i in range(0, len(whole), 50)], []]
    port, thread = serve(pieces)
    request = http_request("incremental", "x", seed=1, num_tokens=3, stream=True)
    exchanges = [Exchange(request) for _ in pieces]
    marks = StreamLoad(port, lambda: 0.0, 120.0).run(exchanges)
    thread.join(120)
    assert [e.answer for e in exchanges].count(whole) == 3
    failed = [e for e in exchanges if e.failure is not None]
    assert len(failed) == 1 and failed[0].answer == b""
    assert marks.first is not None and marks.last is not None and marks.one_ended is not None


def test_requests_in_turn() -> None:
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab%d" % i for i in range(2)]
    port, thread = serve([[answers[0][:20], answers[0][20:]], [answers[1]]])
    got = run_in_turn(port, [b"a", b"b"], 2, 120.0)
    thread.join(120)
    assert sorted(got) == answers
    port, thread = serve([[]])
    with pytest.raises(RuntimeError, match="closed"):
        run_in_turn(port, [b"a"], 1, 120.0)
    thread.join(120)
