"""A request leaves nothing behind for the cyclic collector, which runs at idle only."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from phalanx.server.app import Application
from phalanx.server.state import build_api_worker
from phalanx.server.uvicorn_server import DrainingServer, HttpProtocol
from phalanx.text.tokenizer import load_tokenizer
from tests.e2e.fake_engine import FakeEngine
from tests.e2e.server_harness import PATIENCE_S, VOCAB_SIZE, make_settings, wait_until, write_byte_tokenizer
from tests.inproc_channel import InprocChannel

NUM_REQUESTS = 16


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A worker and a fake engine in threads of this process, so that its heap can be looked at."""
    folder: Path = write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    channel = InprocChannel(1)
    engine = FakeEngine(channel.engine, step_s=0.003)  # so that tokens come one by one
    tokenizer = load_tokenizer(str(folder), vocab_size=VOCAB_SIZE, chat_template=None)
    worker = build_api_worker(make_settings(folder), 0, channel.workers[0], tokenizer)
    config = uvicorn.Config(
        Application(worker),
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=3600,  # a collection of a large heap on a slow machine lasts
    )
    server = DrainingServer(config, worker)
    listener = socket.create_server(("127.0.0.1", 0))
    threads = [
        threading.Thread(target=engine.run),
        threading.Thread(target=lambda: asyncio.run(server.serve([listener]))),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.started, "uvicorn")
    engine.announce()
    wait_until(lambda: worker.engine.is_ready, "the worker")
    yield listener.getsockname()[1]
    server.should_exit = True
    threads[1].join(PATIENCE_S)
    engine.stopping.set()
    threads[0].join(PATIENCE_S)


def request(path: str, fields: dict[str, object]) -> bytes:
    body = json.dumps(fields).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


STREAM = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 5}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}


@pytest.mark.parametrize(
    ("path", "fields", "end"),
    [
        ("/generate", {**STREAM, "stream": False}, b"}}"),
        ("/generate", STREAM, b"0\r\n\r\n"),
        ("/generate", {**STREAM, "return_logprob": True, "top_logprobs_num": 2}, b"0\r\n\r\n"),
        ("/generate", {**STREAM, "text": ["x", "y"], "rid": "a"}, b"0\r\n\r\n"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "n": 2}, b"0\r\n\r\n"),
        ("/v1/chat/completions", {**CHAT, "stop": "c"}, b"}}"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "stream": True}, b"0\r\n\r\n"),
    ],
)
def test_requests_leave_no_cycles(port: int, path: str, fields: dict[str, object], end: bytes) -> None:
    raw = request(path, fields)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(PATIENCE_S)

        def one() -> None:
            sock.sendall(raw)
            answer = b""
            while not answer.endswith(end):
                part = sock.recv(65536)
                assert part, f"the connection was closed after {answer!r}"
                answer += part
            assert answer.startswith(b"HTTP/1.1 200"), answer

        for _ in range(3):  # what is made once
            one()
        counts = garbage_of(one)
    # One request or two may still be held by the connection when the count is taken.
    many = {name: count for name, count in counts.items() if count >= NUM_REQUESTS // 2}
    assert not many, many


def garbage_of(one: object) -> Counter[str]:
    """Objects that only the collector finds after NUM_REQUESTS calls, by type."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM_REQUESTS):
            one()  # type: ignore[operator]
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(type(item).__qualname__ for item in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_the_count_sees_cycles() -> None:
    def one() -> None:
        cycle: list[object] = []
        cycle.append((cycle,))

    assert garbage_of(one)["tuple"] >= NUM_REQUESTS
