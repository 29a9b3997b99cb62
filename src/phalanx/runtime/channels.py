"""How API workers and the engine reach each other: ZeroMQ over ipc:// files, or in process.

Every direction is its own PUSH/PULL pair with an unbounded queue: the engine never waits for a worker. The
engine pulls from `engine.ipc`, worker i from `worker-i.ipc`, both in the server's private run directory.
Frame 0 of what a worker sends is its number.
"""

from __future__ import annotations

import logging
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import zmq

from phalanx.core.errors import ConfigError
from phalanx.core.step import StepOutputs
from phalanx.messages import Control, ControlReply, Message, MessageError, decode, encode, split_outputs

logger = logging.getLogger(__name__)

_MAX_PATH_BYTES = 107  # sockaddr_un.sun_path
_LINGER_MS = 1000  # last words (an abort, an error) may still leave; a dead peer cannot hold an exit
_RELAY = "relay"

T = TypeVar("T")


class EngineEnd(Protocol):
    """The engine's side of a channel."""

    def recv(self, timeout_ms: int) -> list[tuple[int, Message]]:
        """All that has come, as (worker, message); waits up to timeout_ms for the first."""
        ...

    def send(self, worker: int, message: Message) -> None:
        """Hand a message to one worker; never waits."""
        ...

    def send_outputs(self, outputs: StepOutputs) -> None:
        """Hand each worker its part of a step, one message each."""
        ...

    def close(self) -> None:
        """Let go of the sockets."""
        ...


class WorkerEnd(Protocol):
    """An API worker's side of a channel."""

    worker_id: int

    def send(self, message: Message) -> None:
        """Hand a message to the engine; never waits."""
        ...

    def recv(self, timeout_ms: int = 0) -> list[Message]:
        """All that has come; waits up to timeout_ms for the first."""
        ...

    def attach(self, loop: AbstractEventLoop, callback: Callable[[list[Message]], None]) -> None:
        """Call back from the event loop with all that has come, each time something has."""
        ...

    def close(self) -> None:
        """Let go of the sockets."""
        ...


class EngineChannel:
    """The engine's side over ZeroMQ.

    Raises:
        ConfigError: the run directory's path is too long for a socket, or is not writable.
    """

    def __init__(self, ipc_dir: str, num_workers: int) -> None:
        self._context = zmq.Context()
        self._pull = _socket(self._context, zmq.PULL)
        _bind(self._pull, _address(ipc_dir, "engine"))
        self._push = []
        for worker in range(num_workers):
            push = _socket(self._context, zmq.PUSH)
            push.connect(_address(ipc_dir, f"worker-{worker}"))
            self._push.append(push)

    def recv(self, timeout_ms: int) -> list[tuple[int, Message]]:
        """All that has come, as (worker, message); waits up to timeout_ms for the first."""
        received = []
        for frames in _drain(self._pull, timeout_ms):
            try:
                worker = int.from_bytes(frames[0], "little")
                message = decode(frames[1:])
                if worker >= len(self._push):
                    raise MessageError(f"no worker has number {worker}")
            except MessageError as error:
                logger.error("dropped a message to the engine: %s", error)
                continue
            if isinstance(message, Control) and message.op == _RELAY:
                _relay(self, len(self._push), worker, message)
            else:
                received.append((worker, message))
        return received

    def send(self, worker: int, message: Message) -> None:
        """Hand a message to one worker; never waits."""
        self._push[worker].send_multipart(encode(message), zmq.NOBLOCK)

    def send_outputs(self, outputs: StepOutputs) -> None:
        """Hand each worker its part of a step, one message each."""
        for worker, part in split_outputs(outputs, len(self._push)):
            self.send(worker, part)

    def close(self) -> None:
        """Let go of the sockets."""
        _close(self._context, [self._pull, *self._push])


class WorkerChannel:
    """One API worker's side over ZeroMQ. Use it from one thread only."""

    def __init__(self, ipc_dir: str, worker_id: int) -> None:
        self.worker_id = worker_id
        self._context = zmq.Context()
        self._pull = _socket(self._context, zmq.PULL)
        _bind(self._pull, _address(ipc_dir, f"worker-{worker_id}"))
        self._push = _socket(self._context, zmq.PUSH)
        self._push.connect(_address(ipc_dir, "engine"))
        self._fd = int(self._pull.getsockopt(zmq.FD))
        self._prefix = worker_id.to_bytes(4, "little")
        self._loop: AbstractEventLoop | None = None
        self._callback: Callable[[list[Message]], None] | None = None

    def send(self, message: Message) -> None:
        """Hand a message to the engine; never waits."""
        self._push.send_multipart([self._prefix, *encode(message)], zmq.NOBLOCK)

    def recv(self, timeout_ms: int = 0) -> list[Message]:
        """All that has come; waits up to timeout_ms for the first."""
        messages = []
        for frames in _drain(self._pull, timeout_ms):
            try:
                messages.append(decode(frames))
            except MessageError as error:
                logger.error("dropped a message to API worker %d: %s", self.worker_id, error)
        return messages

    def attach(self, loop: AbstractEventLoop, callback: Callable[[list[Message]], None]) -> None:
        """Call back from the event loop with all that has come, each time something has."""
        self._loop, self._callback = loop, callback
        loop.add_reader(self._fd, self._on_readable)
        loop.call_soon(self._on_readable)  # what came before the reader was set up raises no event

    def _on_readable(self) -> None:
        if self._loop is None or self._callback is None:
            return
        messages = self.recv()
        if messages:
            # The descriptor is edge-triggered: what arrives while the callback runs may raise no event.
            self._loop.call_soon(self._on_readable)
            self._callback(messages)

    def close(self) -> None:
        """Let go of the sockets; the callback is not called any more."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None
        _close(self._context, [self._pull, self._push])


class InprocChannel:
    """Both sides in one process, thread-safe, for `LLM` and tests: `engine`, and `workers[i]`."""

    def __init__(self, num_workers: int = 1) -> None:
        inbox: _Inbox[tuple[int, Message]] = _Inbox()
        self.workers = tuple(_InprocWorker(i, inbox) for i in range(num_workers))
        self.engine = _InprocEngine(inbox, self.workers)


class _Inbox(Generic[T]):
    """A queue that is drained whole."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = threading.Condition()

    def put(self, item: T) -> None:
        with self._filled:
            self._items.append(item)
            self._filled.notify()

    def drain(self, timeout_ms: int) -> list[T]:
        with self._filled:
            if not self._items and timeout_ms:
                self._filled.wait(timeout_ms / 1000)
            items = list(self._items)
            self._items.clear()
            return items


class _InprocEngine:
    def __init__(self, inbox: _Inbox[tuple[int, Message]], workers: tuple[_InprocWorker, ...]) -> None:
        self._inbox = inbox
        self._workers = workers

    def recv(self, timeout_ms: int) -> list[tuple[int, Message]]:
        received = []
        for worker, message in self._inbox.drain(timeout_ms):
            if isinstance(message, Control) and message.op == _RELAY:
                _relay(self, len(self._workers), worker, message)
            else:
                received.append((worker, message))
        return received

    def send(self, worker: int, message: Message) -> None:
        self._workers[worker].deliver(message)

    def send_outputs(self, outputs: StepOutputs) -> None:
        for worker, part in split_outputs(outputs, len(self._workers)):
            self.send(worker, part)

    def close(self) -> None:
        """Nothing to let go of."""


class _InprocWorker:
    def __init__(self, worker_id: int, engine_inbox: _Inbox[tuple[int, Message]]) -> None:
        self.worker_id = worker_id
        self._engine_inbox = engine_inbox
        self._inbox: _Inbox[Message] = _Inbox()
        self._loop: AbstractEventLoop | None = None
        self._callback: Callable[[list[Message]], None] | None = None

    def send(self, message: Message) -> None:
        self._engine_inbox.put((self.worker_id, message))

    def recv(self, timeout_ms: int = 0) -> list[Message]:
        return self._inbox.drain(timeout_ms)

    def deliver(self, message: Message) -> None:
        self._inbox.put(message)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_readable)

    def attach(self, loop: AbstractEventLoop, callback: Callable[[list[Message]], None]) -> None:
        self._loop, self._callback = loop, callback
        loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        messages = self.recv()
        if messages and self._callback is not None:
            self._callback(messages)

    def close(self) -> None:
        self._loop = self._callback = None


def _relay(engine: EngineEnd, num_workers: int, worker: int, message: Control) -> None:
    """Only the engine reaches all workers, so they speak to each other through its channel."""
    op = message.args.get("op")
    if not isinstance(op, str):
        engine.send(worker, ControlReply(message.id, False, {"message": "relay needs an op"}))
        return
    for other in range(num_workers):
        engine.send(other, Control(message.id, op, message.args))
    engine.send(worker, ControlReply(message.id, True))


def _address(ipc_dir: str, name: str) -> str:
    path = str(Path(ipc_dir).absolute() / f"{name}.ipc")
    if len(path.encode()) > _MAX_PATH_BYTES:
        raise ConfigError(f"the run directory's path is too long for a socket: {path}")
    return f"ipc://{path}"


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    return socket


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot open {address}: {error}") from error


def _drain(socket: zmq.Socket[bytes], timeout_ms: int) -> list[list[bytes]]:
    """Every message that is there; waits for the first at most timeout_ms."""
    messages: list[list[bytes]] = []
    if timeout_ms and not socket.poll(timeout_ms):
        return messages
    while True:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return messages


def _close(context: zmq.Context[zmq.Socket[bytes]], sockets: list[zmq.Socket[bytes]]) -> None:
    for socket in sockets:
        socket.close()
    context.term()
