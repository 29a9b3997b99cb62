"""A scripted HTTP server with known times, for tests of the load client.

In a test, `with serving(respond) as server:` runs it in a thread; `respond(path, body, nth)` gives a `Reply`.
As a program (`python tests/e2e/sse_server.py --num-tokens 16 --interval-ms 5`) it streams SGLang-style
answers of fixed length, prints its port on the first line, and ends when its stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Step:
    """At `at_ms` after the request: write `data` as one chunk, then do `then` ("", "close" or "reset")."""

    at_ms: float
    data: bytes = b""
    then: str = ""


@dataclass(frozen=True)
class Reply:
    """A status, the timed pieces of its body, and how the body is framed.

    framing: "chunked", "length", "close" (the body ends with the connection) or "silent" (not even a head).
    hold: the answer waits until this many requests have come.
    """

    steps: list[Step]
    status: int = 200
    framing: str = "chunked"
    keep_alive: bool = True
    hold: int = 0


Respond = Callable[[str, dict, int], Reply]


def native_event(text: str, num_tokens: int, **meta: object) -> bytes:
    """SGLang's event: the text so far and the number of tokens so far."""
    body = {"text": text, "meta_info": {"completion_tokens": num_tokens, "prompt_tokens": 5, **meta}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chat_event(delta: dict, usage: dict | None = None) -> bytes:
    body: dict = {"choices": [{"index": 0, "delta": delta}]}
    if usage is not None:
        body["usage"] = usage
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def json_reply(value: object, status: int = 200) -> Reply:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Reply([Step(0, body)], status=status, framing="length")


def steady(num_tokens: int, interval_ms: float, first_ms: float | None = None) -> Reply:
    """`num_tokens` events of one word each, `interval_ms` apart, then [DONE].

    The first comes after `first_ms` (None: one interval).
    """
    first_ms = interval_ms if first_ms is None else first_ms
    events = [native_event("w " * n, n) for n in range(1, num_tokens + 1)]
    steps = [Step(first_ms + interval_ms * n, event) for n, event in enumerate(events)]
    return Reply([*steps, Step(steps[-1].at_ms, DONE)])


@dataclass
class Server:
    """A running server. `requests` holds (path, body) of every POST; `num_open` connections are open now.

    `answered` holds (request read, first piece written) of every reply of several pieces, in seconds of
    `time.perf_counter`'s clock.

    With `gauges` (running, queued) there is a /metrics page.
    """

    respond: Respond
    port: int = 0
    requests: list[tuple[str, dict]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    held: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    next_hold: int = sys.maxsize
    gauges: tuple[int, int] | None = None
    info: dict | bytes = field(default_factory=lambda: {"version": "fake", "internal_states": [{}]})
    models: object = field(default_factory=lambda: {"data": [{"id": "fake-model"}]})
    answered: list[tuple[float, float]] = field(default_factory=list)
    num_open: int = 0
    num_accepted: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._server.num_open += 1
        self._server.num_accepted += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.num_open -= 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-l")
            ),
            0,
        )
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        method, path = head.split(b" ", 2)[:2]
        self._answer(method.decode(), path.decode(), head, rest[:length])

    def _answer(self, method: str, path: str, head: bytes, body: bytes) -> None:
        server = self._server
        if path == "/v1/models":
            return self._start(json_reply(server.models))
        if path == "/server_info":
            return self._start(json_reply(server.info))
        if path == "/metrics" and server.gauges is not None:
            running, queued = server.gauges
            page = f"sglang:num_running_reqs {running}\nsglang:num_queue_reqs {queued}\n"
            return self._start(Reply([Step(0, page.encode())], framing="length"))
        if method == "GET":
            return self._start(json_reply({"error": "no such route"}, status=404))
        parsed = json.loads(body) if body else {}
        server.requests.append((path, parsed))
        server.heads.append(head)
        reply = server.respond(path, parsed, len(server.requests) - 1)
        server.held.append((reply.hold, functools.partial(self._start, reply)))
        server.next_hold = min(server.next_hold, reply.hold)
        if len(server.requests) < server.next_hold:
            return
        due = [start for hold, start in server.held if hold <= len(server.requests)]
        server.held = [(hold, start) for hold, start in server.held if hold > len(server.requests)]
        server.next_hold = min((hold for hold, _ in server.held), default=sys.maxsize)
        for start in due:
            start()

    def _start(self, reply: Reply) -> None:
        head = [f"HTTP/1.1 {reply.status} X", "Content-Type: text/event-stream"]
        if reply.framing == "chunked":
            head.append("Transfer-Encoding: chunked")
        elif reply.framing == "length":
            head.append(f"Content-Length: {sum(len(step.data) for step in reply.steps)}")
        if not reply.keep_alive or reply.framing == "close":
            head.append("Connection: close")
        if reply.framing != "silent":
            self._transport.write("\r\n".join(head).encode() + b"\r\n\r\n")
        self._play(reply, 0, asyncio.get_running_loop().time())

    def _play(self, reply: Reply, number: int, asked: float) -> None:
        """Do the steps that are due; one timer for the rest, since timers of equal time have no order."""
        loop = asyncio.get_running_loop()
        while number < len(reply.steps):
            step = reply.steps[number]
            if asked + step.at_ms / 1e3 > loop.time():
                loop.call_at(asked + step.at_ms / 1e3, self._play, reply, number, asked)
                return
            number += 1
            self._do(reply, step, number == len(reply.steps))
            if number == 1 and len(reply.steps) > 1:
                self._server.answered.append((asked, loop.time()))

    def _do(self, reply: Reply, step: Step, last: bool) -> None:
        if self._transport.is_closing():
            return
        chunked = reply.framing == "chunked"
        out = step.data
        if chunked and out:
            out = b"%x\r\n%b\r\n" % (len(out), out)
        if chunked and last and not step.then:
            out += b"0\r\n\r\n"
        if out:
            self._transport.write(out)
        if step.then == "reset":
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        elif step.then == "close" or (last and (reply.framing == "close" or not reply.keep_alive)):
            self._transport.close()


def _listen() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen(4096)
    return sock


@contextlib.contextmanager
def serving(respond: Respond) -> Iterator[Server]:
    """Run a server in a thread until the block ends."""
    server = Server(respond)
    sock = _listen()
    server.port = sock.getsockname()[1]
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        listener = await loop.create_server(lambda: _Connection(server), sock=sock)
        await stop.wait()
        listener.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-tokens", type=int, default=16)
    parser.add_argument("--interval-ms", type=float, default=5.0)
    parser.add_argument("--first-ms", type=float, help="default: one interval")
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--times-file", help="JSON to write at the end: `Server.answered`")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reply = dataclasses.replace(steady(args.num_tokens, args.interval_ms, args.first_ms), hold=args.hold)
    with serving(lambda path, body, nth: reply) as server:
        print(server.port, flush=True)
        sys.stdin.read()
        if args.times_file:
            with open(args.times_file, "w") as file:
                json.dump(server.answered, file)


if __name__ == "__main__":
    _main()
