from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from phalanx.core.errors import RequestError
from phalanx.server import app as app_module
from phalanx.server.response import Response, read_body


class Transport:
    """An ASGI send that can be made to wait or to fail."""

    def __init__(self):
        self.sent = []
        self.open = asyncio.Event()
        self.open.set()
        self.fails = False

    async def send(self, message):
        await self.open.wait() if not self.open.is_set() else None
        if self.fails:
            raise RuntimeError("broken")
        self.sent.append(message)

    @property
    def body(self):
        return b"".join(m.get("body", b"") for m in self.sent)


def test_write_that_need_not_wait_is_done_at_once():
    async def scenario():
        transport = Transport()
        response = Response(transport.send)
        response.write_event(b"a", more=True)
        response.write_event(b"b", more=False)
        assert transport.body == b"ab" and response.ended and not response.blocked
        assert [m["type"] for m in transport.sent] == ["http.response.start"] + ["http.response.body"] * 2
        assert transport.sent[-1]["more_body"] is False and transport.sent[1]["more_body"] is True
        response.write_event(b"c", more=True)
        response.write_whole(200, b"{}")
        assert transport.body == b"ab"

    asyncio.run(scenario())


@pytest.mark.parametrize("started", [False, True])
def test_write_that_waits_blocks_and_goes_on(started):
    async def scenario():
        transport = Transport()
        response = Response(transport.send)
        woken = []
        response.on_writable = lambda: woken.append(response.blocked)
        if started:
            response.write_event(b"0", more=True)
        transport.open.clear()
        response.write_event(b"1", more=True)
        assert response.blocked and b"1" not in transport.body
        await asyncio.sleep(0)
        assert response.blocked and not woken
        transport.open.set()
        await response.finished()
        assert woken == [False] and transport.body.endswith(b"1")
        response.write_event(b"2", more=False)
        assert transport.body == (b"012" if started else b"12")

    asyncio.run(scenario())


def test_failing_send_ends_the_response(caplog):
    async def scenario(waits):
        transport = Transport()
        response = Response(transport.send)
        transport.fails = True
        if waits:
            transport.open.clear()
        response.write_event(b"1", more=True)
        transport.open.set()
        await response.finished()
        assert response.ended and not response.blocked
        response.write_event(b"2", more=True)
        assert transport.sent == []

    asyncio.run(scenario(False))
    asyncio.run(scenario(True))
    assert caplog.text.count("could not be written") == 2


def test_error_body():
    async def scenario():
        transport = Transport()
        response = Response(transport.send)
        response.write_error(RequestError("no", status=404, param="x"))
        assert transport.sent[0]["status"] == 404
        assert (
            transport.body == b'{"error":{"message":"no","type":"not_found_error","param":"x","code":null}}'
        )
        assert dict(transport.sent[0]["headers"])[b"content-length"] == str(len(transport.body)).encode()

    asyncio.run(scenario())


def test_read_body():
    def receiver(*messages):
        queue = list(messages)

        async def receive():
            return queue.pop(0)

        return receive

    def part(body, more):
        return {"type": "http.request", "body": body, "more_body": more}

    run = asyncio.run
    assert run(read_body(receiver(part(b"a", True), part(b"b", False)), 2)) == b"ab"
    assert run(read_body(receiver(part(b"a", True), {"type": "http.disconnect"}), 2)) is None
    with pytest.raises(RequestError) as caught:
        run(read_body(receiver(part(b"a", True), part(b"bc", True)), 2))
    assert caught.value.status == 413


@pytest.mark.parametrize("how", ["whole", "stream", "half", "nothing"])
def test_a_request_that_is_answered_when_its_time_is_over_is_not_answered_again(how, monkeypatch):
    """Its handler only waits for the client then; an ASGI server takes no second response."""

    async def handler(worker, body, receive, response):
        if how == "whole":
            response.write_whole(200, b"{}")
        elif how != "nothing":
            response.write_event(b"data: 1\n\n", more=how == "half")
        try:
            await asyncio.Event().wait()
        finally:
            response.ended = True  # as the dispatcher has it when it drops a call

    async def scenario():
        transport = Transport()
        worker = SimpleNamespace(
            settings=SimpleNamespace(
                server=SimpleNamespace(
                    request_timeout_s=0.01, max_body_bytes=100, api_key=None, cors_allow_origins=("*",)
                )
            ),
            engine=SimpleNamespace(require_alive=lambda: None),
            metrics=SimpleNamespace(opened=lambda: None, closed=lambda endpoint, status: told.append(status)),
        )
        monkeypatch.setattr(app_module, "_build_fastapi", lambda worker: None)
        monkeypatch.setattr(
            app_module, "Access", lambda server: SimpleNamespace(cors_headers=lambda s: [], **checks)
        )
        monkeypatch.setitem(app_module._GENERATING, "/generate", (handler, ("POST",)))

        async def receive():
            return {"type": "http.request", "body": b"{}"}

        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        await app_module.Application(worker)(scope, receive, transport.send)
        return transport

    told, checks = [], {f"check_{name}": lambda scope: None for name in ("origin", "key", "size")}
    transport = asyncio.run(scenario())
    assert told == [504 if how == "nothing" else 200]
    assert [m["type"] for m in transport.sent].count("http.response.start") == 1
    assert [m.get("more_body", True) for m in transport.sent].count(False) == 1
    assert transport.sent[-1]["more_body"] is False
    assert (b"within 0.01 s" in transport.body) == (how in ("half", "nothing"))
