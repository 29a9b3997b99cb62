"""A light HTTP client for `phalanx bench front`: raw sockets, one epoll loop, bytes kept and read afterwards.

Nothing is decoded while it runs: an event costs one recv and one count, so that the load takes as little as
can be of the cores that it shares with the server.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_EVENT = b"data: {"
_LAST_CHUNK = b"0\r\n\r\n"
_RECV_BYTES = 2**18
_CONNECTS_AT_ONCE = 512  # beyond the listener's backlog a connect is only tried again after a second


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and what came back.

    Attributes:
        request: all bytes of the HTTP request.
        pieces: what came, as it came. times: when (time.monotonic, seconds), if asked for.
        num_events: events that came so far.
        failure: why there is no whole answer.
    """

    request: bytes
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] | None = None
    num_events: int = 0
    done_s: float | None = None
    failure: str | None = None
    num_sent: int = 0
    sock: socket.socket | None = None

    @property
    def answer(self) -> bytes:
        """All that came."""
        return b"".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the run: when, events received until then, and what `probe` gave."""

    time_s: float
    num_events: int
    probe: float


@dataclass(slots=True)
class Marks:
    """first: the first request is sent; all_started: every stream has an event; one_ended; last."""

    first: Mark | None = None
    all_started: Mark | None = None
    one_ended: Mark | None = None
    last: Mark | None = None


class StreamLoad:
    """Opens one connection per exchange, all at once, and reads until every stream has ended.

    Args:
        port: of the server on 127.0.0.1.
        probe: read at each mark (CPU seconds of the worker).
        timeout_s: for the whole run; what is unfinished then has failed.
    """

    def __init__(self, port: int, probe: Callable[[], float], timeout_s: float) -> None:
        self._address = ("127.0.0.1", port)
        self._probe = probe
        self._timeout_s = timeout_s
        self._poll = select.epoll()
        self._by_fd: dict[int, Exchange] = {}
        self._num_connecting = 0
        self._num_events = 0
        self._num_started = 0
        self.marks = Marks()

    def run(self, exchanges: Sequence[Exchange]) -> Marks:
        """Send all, read all."""
        self.marks = Marks(first=self._mark())
        waiting = list(reversed(exchanges))
        self._num_started = 0
        deadline_s = time.monotonic() + self._timeout_s
        while waiting or self._by_fd:
            while waiting and self._num_connecting < _CONNECTS_AT_ONCE:
                self.open(waiting.pop())
            if time.monotonic() > deadline_s:
                for exchange in [*self._by_fd.values(), *waiting]:
                    self._end(exchange, "no end within the time limit")
                break
            self.turn(0.5)
            if self.marks.all_started is None and self._num_started == len(exchanges):
                self.marks.all_started = self._mark()
        self.marks.last = self._mark()
        self._poll.close()
        return self.marks

    def open(self, exchange: Exchange) -> None:
        """Start one exchange."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        exchange.sock = sock
        sock.connect_ex(self._address)
        self._by_fd[sock.fileno()] = exchange
        self._num_connecting += 1
        self._poll.register(sock, select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """Leave what is still open."""
        for exchange in list(self._by_fd.values()):
            self._end(exchange, "left")
        self._poll.close()

    def turn(self, timeout_s: float) -> None:
        """Serve what is ready; waits up to timeout_s for the first."""
        for fd, mask in self._poll.poll(timeout_s):
            exchange = self._by_fd.get(fd)
            if exchange is None:
                continue
            try:
                if mask & select.EPOLLOUT:
                    self._send(exchange)
                if mask & ~select.EPOLLOUT:
                    self._receive(exchange)
            except BlockingIOError:
                continue
            except OSError as error:
                self._end(exchange, str(error))

    def _send(self, exchange: Exchange) -> None:
        sock = exchange.sock
        assert sock is not None
        if not exchange.num_sent:
            self._num_connecting -= 1
        exchange.num_sent += sock.send(memoryview(exchange.request)[exchange.num_sent :])
        if exchange.num_sent == len(exchange.request):
            self._poll.modify(sock, select.EPOLLIN)

    def _receive(self, exchange: Exchange) -> None:
        assert exchange.sock is not None
        data = exchange.sock.recv(_RECV_BYTES)
        if not data:
            self._end(exchange, "the connection was closed before the end")
            return
        exchange.pieces.append(data)
        if exchange.times is not None:
            exchange.times.append(time.monotonic())
        count = data.count(_EVENT)
        if count:
            self._num_events += count
            if not exchange.num_events:
                self._num_started += 1
            exchange.num_events += count
        if data.endswith(_LAST_CHUNK) or (len(data) < 5 and b"".join(exchange.pieces).endswith(_LAST_CHUNK)):
            self._end(exchange, None)
        elif not exchange.num_events and _whole_body(exchange.answer):
            self._end(exchange, None)

    def _end(self, exchange: Exchange, failure: str | None) -> None:
        exchange.failure = failure
        exchange.done_s = time.monotonic()
        if self.marks.one_ended is None:
            self.marks.one_ended = self._mark()
        if exchange.sock is not None:
            self._by_fd.pop(exchange.sock.fileno(), None)
            exchange.sock.close()
            exchange.sock = None

    def _mark(self) -> Mark:
        return Mark(time.monotonic(), self._num_events, self._probe())


def run_in_turn(port: int, requests: Sequence[bytes], concurrency: int, timeout_s: float) -> list[bytes]:
    """Answers (with Content-Length) to all requests, over `concurrency` kept-alive connections.

    Raises:
        RuntimeError: a connection failed, or the time is over.
    """
    answers: list[bytes] = [b""] * len(requests)
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(min(concurrency, len(requests)))]
    poll = select.epoll()
    active: dict[int, tuple[socket.socket, int]] = {}
    following = iter(range(len(requests)))
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = next(following)
        sock.sendall(requests[number])
        active[sock.fileno()] = (sock, number)
        poll.register(sock, select.EPOLLIN)
    deadline_s = time.monotonic() + timeout_s
    try:
        while active:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{len(active)} requests had no answer within {timeout_s:g} s")
            for fd, _ in poll.poll(0.5):
                sock, number = active[fd]
                data = sock.recv(_RECV_BYTES)
                if not data:
                    raise RuntimeError("the server closed a kept-alive connection")
                answers[number] += data
                if _whole_body(answers[number]):
                    number = next(following, -1)
                    if number < 0:
                        del active[fd]
                        poll.unregister(fd)
                    else:
                        active[fd] = (sock, number)
                        sock.sendall(requests[number])
    finally:
        for sock in socks:
            sock.close()
        poll.close()
    return answers


def _whole_body(answer: bytes) -> bool:
    """Whether a response with a Content-Length is complete."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    _, found, rest = head.lower().partition(b"content-length:")
    return bool(found) and len(body) >= int(rest.split(b"\r\n", 1)[0])
