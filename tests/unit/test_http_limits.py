"""Bodies that do not come: their connections end, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvicorn
from uvicorn.server import ServerState

from phalanx.server import http_limits
from phalanx.server.http_limits import LimitedProtocol
from phalanx.server.response import read_body

GAP_S = 0.2
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def echo(scope, receive, send):
    """Answers with the length of the body; `/early` before it has come, `/late` long after."""
    body = b"" if scope["path"] == "/early" else await read_body(receive, 2**30)
    if body is None:
        return
    if scope["path"] == "/late":
        await asyncio.sleep(3 * GAP_S)
    answer = b"%d" % len(body)
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(answer))],
        }
    )
    await send({"type": "http.response.body", "body": answer})


async def talk(*parts: bytes, pause: Callable[[], None] = lambda: None, reads: int = -1) -> bytes:
    """What a server says to a client that sends these parts, each after the one before it was taken."""
    received: list[bytes] = []
    gone = asyncio.Event()

    class Protocol(LimitedProtocol):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            received.append(data)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            gone.set()

    config = uvicorn.Config(
        echo, http=LimitedProtocol, lifespan="off", log_config=None, timeout_keep_alive=3600
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: Protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for i, part in enumerate(parts):
        writer.write(part)
        while len(b"".join(received)) < len(b"".join(parts[: i + 1])) and not gone.is_set():
            await asyncio.sleep(0)
        pause()
    said = await asyncio.wait_for(reader.read() if reads < 0 else reader.readexactly(reads), 120)
    writer.close()
    server.close()
    return said


class HeldLoop(asyncio.SelectorEventLoop):
    """Its time passes only when it is told, whatever the machine does; sockets are as ever."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(http_limits, "BODY_GAP_S", GAP_S)


@pytest.mark.parametrize(
    "head", [b"content-length: 9\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
def test_a_body_that_stops_is_refused(head):
    said = asyncio.run(talk(HEAD + head))
    assert said.startswith(b"HTTP/1.1 408 ") and b"nothing of the body came for 0.2 s" in said


def test_an_answer_that_has_been_given_is_not_followed_by_an_error():
    said = asyncio.run(talk(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"))
    assert said.startswith(b"HTTP/1.1 200 ") and b"408" not in said


def test_a_slow_body_is_read_to_its_end():
    """Each part in time, and all of them together after three times as long."""
    parts = [HEAD + b"content-length: 9\r\n\r\n", *[b"x"] * 9]
    with asyncio.Runner(loop_factory=HeldLoop) as runner:
        loop = runner.get_loop()
        said = runner.run(talk(*parts, pause=lambda: loop.pass_s(GAP_S / 3), reads=39))
        assert loop.time() > 3 * GAP_S
    assert said.startswith(b"HTTP/1.1 200 ") and said.endswith(b"9")


def test_long_answers_are_waited_for_also_by_the_body_behind_them():
    """Nothing may be written between the bytes of the first answer."""
    late = b"POST /late HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx"
    said = asyncio.run(talk(late + HEAD + b"content-length: 5\r\n\r\nab"))
    assert said.count(b"HTTP/1.1 200 ") == 1 and said.count(b"HTTP/1.1 408 ") == 1
    assert said.index(b" 200 ") < said.index(b" 408 ")
