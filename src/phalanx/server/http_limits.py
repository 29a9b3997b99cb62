"""Limits that Uvicorn and its parser lack: bytes and time of a request's head, and gaps in its body."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phalanx.core.errors import RequestError
from phalanx.server.response import encode_json

MAX_HEAD_BYTES = 65536  # URL and headers together, names, values and a little for each
HEAD_TIMEOUT_S = 30.0
BODY_GAP_S = 30.0
_HEADER_BYTES = 32  # what a header costs in memory beside its own bytes, so that many empty ones count too


class LimitedProtocol(HttpToolsProtocol):
    """One connection whose requests cannot begin without end.

    A client that sends nothing at all is disconnected after the keep-alive time, one whose head does not come
    to its end after HEAD_TIMEOUT_S, and one whose head is too large gets a 431. One that sends nothing of its
    body for BODY_GAP_S gets a 408: what it has sent would be kept for ever.
    """

    _head_bytes = 0
    _timer: asyncio.TimerHandle | None = None  # of the head, then of the body
    _body_came_s = 0.0

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
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

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
            self._body_came_s = self.loop.time()
            self._timer = self.loop.call_later(BODY_GAP_S, self._look_at_body)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_came_s = self.loop.time()
        if self._head_bytes <= MAX_HEAD_BYTES:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._stop_timer()
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
            error = RequestError(message, status=431, code="headers_too_large")
            self._write_error(b"431 Request Header Fields Too Large", error)
        self.transport.close()

    def _look_at_body(self) -> None:
        """End the connection if its client has sent nothing for long, though it could."""
        self._timer = None
        if self.transport.is_closing():
            return
        now_s = self.loop.time()
        if self.flow.read_paused or self.pipeline:  # the latter: an earlier request is still answered
            self._body_came_s = now_s
        rest_s = self._body_came_s + BODY_GAP_S - now_s
        if rest_s > 0:
            self._timer = self.loop.call_later(rest_s, self._look_at_body)
            return
        if not self.cycle.response_started:
            error = RequestError(f"nothing of the body came for {BODY_GAP_S:g} s", status=408)
            self._write_error(b"408 Request Timeout", error)
        self.transport.close()

    def _write_error(self, status: bytes, error: RequestError) -> None:
        body = encode_json(error.body())
        head = b"HTTP/1.1 %b\r\nconnection: close\r\n" % status
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
