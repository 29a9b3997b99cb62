"""One HTTP connection of the load client: a Protocol that stamps bytes as they arrive and keeps them.

Nothing is decoded here. Each piece of a response body is stored with the time (`time.perf_counter`, seconds)
at which its bytes reached the process; `parse` reads them when the run is over, so that the client's own work
does not delay the stamps of other streams.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

# A close that crossed our request on its way is seen within a round trip (and the lag of a busy event loop).
# Later, the server had the request and dropped it: sending it again would hide that.
_STALE_S = 1.0


@dataclass(slots=True)
class RawRecord:
    """What happened to one request. All times are `time.perf_counter` seconds.

    Attributes:
        index: position in the run's request list.
        due: when the arrival process wanted it sent.
        start: when the client began (a slot was free): the zero of TTFT and E2E latency.
        sent: when its bytes were handed to the socket, or None if that never happened.
        end: when the last body byte came, or the failure was seen.
        status: HTTP status, 0 before one came.
        times: arrival time of each body piece.
        pieces: the body pieces, transfer coding removed.
        failure: cause of a transport failure, or None when a whole response arrived.
        wait_for_slot: seconds spent waiting for --max-concurrency.
        resent: whether it was sent a second time, since the first kept-alive connection was closed by then.
        encoding, location: headers Content-Encoding and Location, "" when absent.
    """

    index: int
    due: float
    start: float = 0.0
    sent: float | None = None
    end: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    failure: str | None = None
    wait_for_slot: float = 0.0
    resent: bool = False
    encoding: str = ""
    location: str = ""


class StaleConnection(Exception):
    """A kept-alive connection was closed before it answered anything: send again on a new one."""


class ClientConnection(asyncio.Protocol):
    """An HTTP/1.1 client connection: one request at a time, reused while the server allows."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._record: RawRecord | None = None
        self._done: asyncio.Future[None] | None = None
        self._num_served = 0
        self._now = 0.0
        self._ends_at_close = True
        self._got_bytes = False
        self._keep_alive = False

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent on it now."""
        return self._transport is not None and self._record is None and self._keep_alive

    def send(self, request: bytes, record: RawRecord) -> asyncio.Future[None]:
        """Send `request`; the response is stored in `record`.

        Returns:
            A future that ends when the response is over, well or not (`record.failure`). It raises
            StaleConnection when a reused connection turns out to be closed.
        """
        assert self._record is None
        self._record = record
        self._done = self._loop.create_future()
        self._got_bytes = False
        self._ends_at_close = True
        done = self._done
        if self._transport is None or self._transport.is_closing():
            self._fail("connection closed by the server")
            return done
        record.sent = time.perf_counter()
        self._transport.write(request)
        return done

    def close(self) -> None:
        """Drop the connection. A request still in flight is forgotten: its record is no longer touched."""
        self._record = self._done = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; a parser per connection follows the messages on it."""
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Stamp `data` and let the HTTP parser cut the transfer coding away."""
        self._now = time.perf_counter()
        if self._record is None:
            # Bytes that nobody asked for: the connection cannot be trusted with another request.
            self.close()
            return
        self._got_bytes = True
        try:
            self._parser.feed_data(data)  # type: ignore[union-attr]
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._record is not None:
                upgrade = isinstance(error, httptools.HttpParserUpgrade)
                what = "protocol upgrade" if upgrade else str(error)
                self._fail(f"malformed HTTP response: {what}", may_retry=False)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request in flight: complete if its body ran until the close, failed otherwise."""
        record, self._transport, self._parser = self._record, None, None
        if record is None:
            return
        if exc is None and self._ends_at_close and record.status:
            self._finish()
        elif isinstance(exc, ConnectionResetError):
            self._fail("connection reset by the server")
        elif exc is not None:
            self._fail(f"connection lost: {exc}")
        else:
            self._fail("connection closed before the response was complete")

    # httptools' calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """Learn whether the body has an end of its own, and what makes it unreadable."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._ends_at_close = False
        elif name == b"content-encoding" and value.lower() != b"identity":
            self._record.encoding = value.decode("latin-1")  # type: ignore[union-attr]
        elif name == b"location":
            self._record.location = value.decode("latin-1")  # type: ignore[union-attr]

    def on_headers_complete(self) -> None:
        """Note the status."""
        self._record.status = self._parser.get_status_code()  # type: ignore[union-attr]

    def on_body(self, body: bytes) -> None:
        """Keep one piece with its time."""
        record = self._record
        record.times.append(self._now)  # type: ignore[union-attr]
        record.pieces.append(body)  # type: ignore[union-attr]

    def on_message_complete(self) -> None:
        """End the request, unless this was only an interim (1xx) response."""
        if self._record is None or 100 <= self._record.status < 200:
            return
        self._keep_alive = bool(self._parser.should_keep_alive())  # type: ignore[union-attr]
        self._finish()

    def _finish(self) -> None:
        record, done = self._record, self._done
        self._record = self._done = None
        self._num_served += 1
        record.end = record.times[-1] if record.times else self._now  # type: ignore[union-attr]
        if not done.done():  # type: ignore[union-attr]
            done.set_result(None)  # type: ignore[union-attr]

    def _fail(self, cause: str, may_retry: bool = True) -> None:
        record, done = self._record, self._done
        self._record = self._done = None
        now = time.perf_counter()
        waited = now - record.sent if record.sent is not None else 0.0  # type: ignore[union-attr]
        stale = may_retry and self._num_served > 0 and not self._got_bytes and waited < _STALE_S
        record.end, record.failure = now, cause  # type: ignore[union-attr]
        if not done.done():  # type: ignore[union-attr]
            if stale:
                done.set_exception(StaleConnection())  # type: ignore[union-attr]
            else:
                done.set_result(None)  # type: ignore[union-attr]
