"""How API workers and the engine reach each other: ZeroMQ over ipc:// files.

Every direction is its own PUSH/PULL pair with an unbounded queue: the engine never waits for a worker. The
engine pulls from `engine.ipc`, worker i from `worker-i.ipc`, both in the server's private run directory.
Frame 0 of what a worker sends is its number. A worker that takes a dead one's place gets a new number, so
that nothing meant for the one can reach the other; it makes itself known with its first message, "hello".
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import zmq

from phalanx.core.errors import ConfigError
from phalanx.core.step import StepOutputs
from phalanx.messages import Control, ControlReply, Message, MessageError, decode, encode, split_outputs

logger = logging.getLogger(__name__)

_MAX_PATH_BYTES = 107  # sockaddr_un.sun_path
_LINGER_MS = 1000  # last words (an abort, an error) may still leave; a dead peer cannot hold an exit
RELAY, _HELLO, _WORKER_ENDED = "relay", "hello", "worker_ended"
_LAUNCHER = 2**32 - 1  # the number in the launcher's messages; workers count from 0


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
        self._ipc_dir = ipc_dir
        self._context = zmq.Context()
        self._pull = _socket(self._context, zmq.PULL)
        _bind(self._pull, _address(ipc_dir, "engine"))
        self._push: dict[int, zmq.Socket[bytes]] = {}
        self._ended: set[int] = set()
        for worker in range(num_workers):
            self._open(worker)

    def recv(self, timeout_ms: int) -> list[tuple[int, Message]]:
        """All that has come, as (worker, message); waits up to timeout_ms for the first."""
        received = []
        for frames in _drain(self._pull, timeout_ms):
            try:
                worker = int.from_bytes(frames[0], "little")
                message = decode(frames[1:])
                if not self._knows(worker, message):
                    continue
            except MessageError as error:
                logger.error("dropped a message to the engine: %s", error)
                continue
            if isinstance(message, Control) and message.op == RELAY:
                relay(self, tuple(self._push), worker, message)
            else:
                received.append((worker, message))
        return received

    def _knows(self, sender: int, message: Message) -> bool:
        """Whether a message counts: not if its sender has ended. Opens and closes the way to workers."""
        is_control = isinstance(message, Control)
        if sender == _LAUNCHER:
            if is_control and message.op == _WORKER_ENDED and isinstance(message.args.get("worker"), int):
                self._close(message.args["worker"])
                return True
            raise MessageError("the launcher sends nothing of this kind")
        if is_control and message.op == _WORKER_ENDED:
            raise MessageError("the launcher alone knows who has ended")
        if sender in self._ended:
            return False  # what was still under way when it ended
        if sender not in self._push:
            if not (is_control and message.op == _HELLO):
                raise MessageError(f"no worker has number {sender}")
            self._open(sender)
        return True

    def _open(self, worker: int) -> None:
        push = _socket(self._context, zmq.PUSH)
        push.connect(_address(self._ipc_dir, f"worker-{worker}"))
        self._push[worker] = push

    def _close(self, worker: int) -> None:
        self._ended.add(worker)
        push = self._push.pop(worker, None)
        if push is not None:
            push.close(linger=0)  # nobody will read what is queued

    def send(self, worker: int, message: Message) -> None:
        """Hand a message to one worker, if it lives; never waits."""
        push = self._push.get(worker)
        if push is not None:
            push.send_multipart(encode(message), zmq.NOBLOCK)

    def send_outputs(self, outputs: StepOutputs) -> None:
        """Hand each worker its part of a step, one message each."""
        for worker, part in split_outputs(outputs, self._push):
            self.send(worker, part)

    def close(self) -> None:
        """Let go of the sockets."""
        _close(self._context, [self._pull, *self._push.values()])


class LauncherChannel:
    """The launcher's way to the engine: it tells which workers have ended."""

    def __init__(self, ipc_dir: str) -> None:
        self._context = zmq.Context()
        self._push = _socket(self._context, zmq.PUSH)
        self._push.connect(_address(ipc_dir, "engine"))

    def worker_ended(self, worker: int) -> None:
        """Tell the engine that worker `worker` is no more; never waits."""
        frames = encode(Control(0, _WORKER_ENDED, {"worker": worker}))
        self._push.send_multipart([_LAUNCHER.to_bytes(4, "little"), *frames], zmq.NOBLOCK)

    def close(self) -> None:
        """Let go of the socket."""
        self._push.setsockopt(zmq.LINGER, 0)  # the engine may be gone
        _close(self._context, [self._push])


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
        self.send(Control(0, _HELLO))
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


def relay(engine: EngineEnd, workers: Iterable[int], worker: int, message: Control) -> None:
    """Hand a worker's order to every worker: they reach each other through the engine's channel only."""
    op = message.args.get("op")
    if not isinstance(op, str):
        engine.send(worker, ControlReply(message.id, False, {"message": "relay needs an op"}))
        return
    for other in workers:
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
