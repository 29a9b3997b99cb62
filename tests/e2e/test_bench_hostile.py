"""The load client against servers that break the rules on the wire."""

from __future__ import annotations

import argparse
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.bench.args import add_arguments
from phalanx.bench.backends import Flavor
from phalanx.bench.errors import BenchError
from phalanx.bench.parse import parse_record
from phalanx.bench.run import connect
from phalanx.bench.settle import check_arguments
from phalanx.bench.slots import Slots
from phalanx.bench.target import make_target
from phalanx.bench.worker import LoadResult, run_load
from tests.e2e.server_harness import PATIENCE_S
from tests.e2e.sse_server import DONE, Reply, Step, json_reply, native_event, serving, steady
from tests.e2e.test_bench_client import bench, stale_at_any_time  # noqa: F401


def settled(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--dataset-name", "random", *argv])
    check_arguments(args)
    return args


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [native_event("a", 1), native_event("a b", 2), DONE]
ANSWER = HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"
PLAIN = b"".join(EVENTS)

# Called with the peer and the number of its request; True ends the connection.
Handle = Callable[[socket.socket, int], bool]


@contextlib.contextmanager
def raw_server(handle: Handle) -> Iterator[int]:
    """Serve raw bytes, a thread per connection; yields the port."""

    def talk(peer: socket.socket) -> None:
        number, read = 0, b""
        with contextlib.suppress(OSError), peer:
            while data := peer.recv(65536):
                read += data
                while b"\r\n\r\n{}" in read:
                    read = read.partition(b"\r\n\r\n{}")[2]
                    number += 1
                    if handle(peer, number):
                        return

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def load(port: int, count: int = 1, timeout_s: float = PATIENCE_S) -> LoadResult:
    """Send `count` requests, one after the other."""
    target = make_target(None, "127.0.0.1", port, [])
    wire = target.wire_request("/generate", b"{}")
    return run_load(target, [wire] * count, np.zeros(count), Slots(1), timeout_s=timeout_s)


def failures(result: LoadResult) -> list[str | None]:
    return [parse_record(record, Flavor.NATIVE, True).failure for record in result.records]


@pytest.mark.parametrize("reset", [False, True])
def test_a_socket_cut_at_any_byte_is_a_failure(reset: bool) -> None:
    """Head, chunk size, event, separators and end: only the last byte makes it an answer."""
    cuts = iter(range(len(ANSWER) + 1))

    def cut(peer: socket.socket, number: int) -> bool:
        peer.sendall(ANSWER[: next(cuts)])
        if reset:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return True

    with raw_server(cut) as port:
        result = load(port, len(ANSWER) + 1)
    found = failures(result)
    assert None not in found[:-1]
    # A reset may overtake the bytes before it.
    assert reset or found[-1] is None


def test_a_dropped_request_is_not_sent_again() -> None:
    """The server had it for 1.2 s: that is no close which crossed the request on its way."""

    def drop_second(peer: socket.socket, number: int) -> bool:
        if number == 1:
            peer.sendall(ANSWER)
            return False
        time.sleep(1.2)
        return True

    with raw_server(drop_second) as port:
        result = load(port, 3)
    assert failures(result) == [None, "connection closed before the response was complete", None]
    assert [record.resent for record in result.records] == [False] * 3


@pytest.mark.usefixtures("stale_at_any_time")
def test_a_stale_connection_is_replaced_and_counted() -> None:
    def drop_second(peer: socket.socket, number: int) -> bool:
        if number == 1:
            peer.sendall(ANSWER)
        return number == 2

    with raw_server(drop_second) as port:
        result = load(port, 3)
    assert failures(result) == [None] * 3
    assert [record.resent for record in result.records] == [False, True, True]


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n" + PLAIN, None),
        (b"HTTP/1.0 200 OK\r\n\r\n" + PLAIN[:-30], "malformed event: Input data was truncated"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + EVENTS[0], "stream ended without [DONE]"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + PLAIN.replace(b"\n", b"\r\n"), None),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + ANSWER, None),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b",
            "the answer is compressed (gzip), which was not asked for",
        ),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://h/x\r\nContent-Length: 0\r\n\r\n",
            "HTTP 302: redirected to http://h/x (not followed: give that address)",
        ),
        (
            b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + ANSWER,
            "malformed HTTP response: protocol upgrade",
        ),
        (HEAD + b"zz\r\n", "malformed HTTP response: Invalid character in chunk size"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "HTTP 204"),
    ],
)
@pytest.mark.parametrize("step", [1, 10_000])
def test_odd_answers(reply: bytes, cause: str | None, step: int) -> None:
    def send(peer: socket.socket, number: int) -> bool:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(reply), step):
            peer.sendall(reply[start : start + step])
        return True

    with raw_server(send) as port:
        assert failures(load(port)) == [cause]


def test_a_slow_drip_ends_at_the_time_limit() -> None:
    gone = threading.Event()

    def drip(peer: socket.socket, number: int) -> bool:
        peer.sendall(HEAD)
        while not gone.wait(0.01):
            peer.sendall(chunk(b":"))
        return True

    with raw_server(drip) as port:
        result = load(port, timeout_s=0.3)
        gone.set()
    assert failures(result) == ["timeout after 0.3 s"]


@pytest.mark.parametrize(
    "info", [b'{"a": "\\ud800"}', b'{"a": 123456789012345678901234567890}', b"[" * 5000, b'{"a": NaN}']
)
def test_what_the_server_says_of_itself_cannot_cost_the_result(info: bytes, tmp_path: Path) -> None:
    with serving(lambda path, body, nth: steady(2, 0)) as server:
        server.info = info
        code, result = bench(server, tmp_path, "--num-prompts", "2")
    assert (code, result["completed"]) == (0, 2)


@pytest.mark.parametrize(
    "models", [{"data": {"a": 1}}, {"data": [5]}, {"data": [{}]}, {"data": [{"id": 5}]}, [1]]
)
def test_a_list_of_models_that_is_none(models: Any) -> None:
    with serving(lambda path, body, nth: json_reply({})) as server:
        server.models = models
        with pytest.raises(BenchError, match="names no model"):
            connect(settled("--base-url", server.url))


def test_why_a_server_is_not_ready_is_told() -> None:
    with serving(lambda path, body, nth: json_reply({})) as server:
        argv = ("--base-url", server.url + "/nowhere", "--ready-check-timeout-sec", "0.01")
        with pytest.raises(BenchError, match=r"is not ready after 0\.01 s: status 404"):
            connect(settled(*argv))
        argv = ("--host", "no.such.invalid", "--ready-check-timeout-sec", "0.01")
        with pytest.raises(BenchError, match=r"is not ready after 0\.01 s: \[Errno"):
            connect(settled(*argv))


@pytest.mark.usefixtures("stale_at_any_time")
def test_requests_sent_again_are_in_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def respond(path: str, body: dict, nth: int) -> Reply:
        return steady(2, 0) if nth != 1 else Reply([Step(0, b"", "close")], framing="silent")

    with serving(respond) as server:
        _, result = bench(server, tmp_path, "--max-concurrency", "1", "--num-prompts", "3")
    assert (result["completed"], result["requests_sent_again"]) == (3, 1)
    assert "Sent again (idle connection closed):     1 " in capsys.readouterr().out
