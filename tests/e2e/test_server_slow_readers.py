"""Clients that stop reading: their streams are joined, then cut off and aborted; nobody waits for them."""

from __future__ import annotations

import json
import select
import socket

import httpx
import msgspec
import pytest

from tests.e2e.server_harness import changed, make_settings, running, wait_until, write_byte_tokenizer

NUM_TOKENS = 60_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow")
    settings = make_settings(write_byte_tokenizer(folder))
    scheduler = msgspec.structs.replace(settings.scheduler, context_length=2 * NUM_TOKENS)
    settings = msgspec.structs.replace(settings, scheduler=scheduler)
    with running(folder, settings, wrapper=changed(folder, "response", STALL_S=0.3)) as server:
        server.engine.step_s = 0.001
        yield server


def post_and_read_nothing(port: int, path: str, body: dict) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    client.sendall(f"{head}\r\n\r\n".encode() + data)
    return client


def test_a_client_that_reads_nothing_is_cut_off_and_others_go_on(server):
    """Cumulative events fill any buffer; its sequence ends in the engine long before it is complete."""
    engine = server.engine
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": NUM_TOKENS}}
    with post_and_read_nothing(server.port, "/generate", body) as client:
        wait_until(lambda: len(engine.running) == 1, "the request in the engine")
        (stream_id,) = engine.running
        while stream_id in engine.running:  # others are answered meanwhile, at any moment
            short = {"text": "y", "sampling_params": {"max_new_tokens": 5}}
            answer = httpx.post(f"{server.url}/generate", json=short)
            assert answer.json()["text"] == "abcde"
        assert engine.aborted == [stream_id]
        wait_until(lambda: is_reset(client), "the end of the connection")


def test_an_answer_that_nobody_reads_is_not_kept(server):
    """Not streamed, and larger than the kernel takes: the connection is closed."""
    engine = server.engine
    engine.step_s, engine.reply = 0.0, lambda request: [1] * 1000  # "\\u0001" in JSON
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1000, "n": 1024}}
    with post_and_read_nothing(server.port, "/generate", body) as client:
        wait_until(lambda: is_reset(client), "the end of the connection")
        assert len(engine.seen) >= 1024 and not engine.running
    answer = httpx.post(f"{server.url}/generate", json={"text": "x"})
    assert answer.status_code == 200


def is_reset(client: socket.socket) -> bool:
    """Whether the server has cut the connection off, without reading from it."""
    poll = select.poll()
    poll.register(client, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))
