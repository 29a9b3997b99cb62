"""Writing an HTTP response without a task: to Uvicorn's transport, or by driving the ASGI `send` by hand.

Once a stream has begun, an event is one HTTP chunk in one transport.write. All else (the head, the end, a
client that does not keep up) goes through the ASGI `send` coroutine. A send that can finish at once costs one
call and wakes nobody; one that has to wait is finished by a task, and meanwhile the response says that it is
blocked. A client that takes nothing for STALL_S is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping, Sequence
from typing import Any, Protocol

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from phalanx.core.errors import RequestError
from phalanx.server.errors import body_too_large

logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero: closing sends a reset and drops what is unsent
STALL_S = 30.0  # the transport's buffer (64 KiB) must shrink to a quarter within this time
JSON_HEADERS = [(b"content-type", b"application/json")]
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Flow(Protocol):
    """Uvicorn's flow control of a connection."""

    write_paused: bool

    async def drain(self) -> None:
        """Wait until the client has taken most of what was written."""
        ...


class Connection(Protocol):
    """What is used of Uvicorn's cycle of one request.

    disconnected: the client is gone, and the transport may not be written to.
    """

    transport: asyncio.Transport
    flow: Flow
    disconnected: bool


class Response:
    """One response in the making.

    Args:
        headers: sent with it, whatever it becomes.

    Attributes:
        started: the status line is sent, so an error can only be told inside the body.
        blocked: the last write waits for the client; do not write before `on_writable` is called.
        complete: its last byte was written, or waits to be.
        ended: complete, or the client is gone or given up; writes do nothing.
        stalled: the client was cut off since it read nothing.
        status: the HTTP status sent, 0 before.
        received_s: when the request had come in full (`time.monotonic`).
        connection: where chunks of a response that has begun may be written to directly while the flow is not
            paused, nobody disconnected and the response not blocked; None under a server other than Uvicorn.
    """

    __slots__ = (
        "_headers",
        "_send",
        "_task",
        "blocked",
        "complete",
        "connection",
        "ended",
        "on_writable",
        "received_s",
        "stalled",
        "started",
        "status",
    )

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._send = send
        self._headers = headers
        self._task: asyncio.Task[None] | None = None
        self.started = False
        self.blocked = False
        self.complete = False
        self.ended = False
        self.stalled = False
        self.status = 0
        self.received_s = time.monotonic()
        cycle = getattr(send, "__self__", None)
        self.connection: Connection | None = cycle if isinstance(cycle, RequestResponseCycle) else None
        self.on_writable: Callable[[], None] | None = None

    def write_event(self, body: bytes, *, more: bool) -> None:
        """Append to an event stream; starts it if need be."""
        if self.ended:
            return
        self.complete = self.ended = not more
        connection = self.connection
        if connection is not None and more and self.started and body:
            if not (connection.flow.write_paused or connection.disconnected):
                connection.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
                return
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if self.started:
            self._drive(self._send(message))
        else:
            self.started, self.status = True, 200
            self._drive(self._send_both(200, [*SSE_HEADERS, *self._headers], message))

    def write_whole(self, status: int, body: bytes) -> None:
        """Send a complete JSON response, if none has been started."""
        if self.ended or self.started:
            return
        self.started = self.complete = self.ended = True
        self.status = status
        headers = [*JSON_HEADERS, *self._headers, (b"content-length", str(len(body)).encode())]
        message = {"type": "http.response.body", "body": body, "more_body": False}
        self._drive(self._send_both(status, headers, message))

    def write_error(self, error: RequestError) -> None:
        """Send an OpenAI error body."""
        self.write_whole(error.status, encode_json(error.body()))

    async def finished(self) -> None:
        """Wait until the last write has left, if it is waiting, and the client has taken most of it."""
        if self._task is not None:
            await self._task
        connection = self.connection
        if connection is not None and connection.flow.write_paused and not connection.disconnected:
            try:
                async with asyncio.timeout(STALL_S):
                    await connection.flow.drain()
            except TimeoutError:
                self._cut_off()

    async def _send_both(self, status: int, headers: list[tuple[bytes, bytes]], body: Message) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send(body)

    def _drive(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            return
        except Exception:
            self._on_failure()
            return
        self.blocked = True
        self._task = asyncio.get_running_loop().create_task(self._finish(coroutine, waits_for))

    async def _finish(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await _Resumed(coroutine, waits_for)
        except TimeoutError:
            self._cut_off()
        except Exception:
            self._on_failure()
        self.blocked = False
        self._task = None
        if self.on_writable is not None and not self.ended:
            self.on_writable()

    def _cut_off(self) -> None:
        """Close the connection of a client that does not read; its request is aborted with it."""
        self.ended = self.stalled = True
        logger.info("closed a connection whose client has read nothing for %g s", STALL_S)
        if self.connection is None:
            return
        transport = self.connection.transport
        sock = transport.get_extra_info("socket")
        if sock is not None:  # else the kernel would keep some megabytes for the client, for minutes
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()

    def _on_failure(self) -> None:
        # The server ends a connection whose response is broken; the request is aborted with it.
        logger.exception("a response could not be written")
        self.ended = True


class _Resumed:
    """Awaits a coroutine that was already run up to its first wait."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            failure: BaseException | None = None
            try:
                yield waits_for
            except BaseException as error:
                failure = error
            try:
                if failure is None:
                    waits_for = self._coroutine.send(None)
                else:
                    waits_for = self._coroutine.throw(failure)
            except StopIteration:
                return


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """The whole request body; None if the client left before it was whole.

    Raises:
        RequestError: 413 beyond max_bytes.
    """
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise body_too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_disconnect(receive: Receive) -> None:
    """Wait until the response is complete or the client is gone: ASGI tells both in the same way."""
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_json(value: Any) -> bytes:
    """JSON bytes; NaN and infinities become null."""
    return _encoder.encode(value)
