"""Limits of a request's head, which Uvicorn and its parser lack: its bytes, and the time it takes to come."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phalanx.core.errors import RequestError
from phalanx.server.response import encode_json

MAX_HEAD_BYTES = 65536  # URL and headers together, names, values and a little for each
HEAD_TIMEOUT_S = 30.0
_HEADER_BYTES = 32  # what a header costs in memory beside its own bytes, so that many empty ones count too


class LimitedProtocol(HttpToolsProtocol):
    """One connection whose requests cannot begin without end.

    A client that sends nothing at all is disconnected after the keep-alive time, one whose head does not come
    to its end after HEAD_TIMEOUT_S, and one whose head is too large gets a 431.
    """

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first byte."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes; those that come after the end was decided are of no interest."""
        if not self.transport.is_closing():
            super().data_received(data)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._head_bytes = 0
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        if self._fits(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; the trailers of a chunked body come here too."""
        if self._fits(len(name) + len(value) + _HEADER_BYTES):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._stop_timer()
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().on_message_complete()

    def _fits(self, num_bytes: int) -> bool:
        before = self._head_bytes
        self._head_bytes += num_bytes
        if before <= MAX_HEAD_BYTES < self._head_bytes:
            self._refuse()
        return self._head_bytes <= MAX_HEAD_BYTES

    def _refuse(self) -> None:
        """Answer, if nothing else is being answered on the connection, and close it."""
        self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            message = f"the headers are larger than {MAX_HEAD_BYTES} bytes"
            body = encode_json(RequestError(message, status=431, code="headers_too_large").body())
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
            head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(head + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
