"""The channel of `runtime.channels` within one process, for tests of what lies on either side of it."""

from __future__ import annotations

import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from phalanx.core.step import StepOutputs
from phalanx.messages import Control, Message, split_outputs
from phalanx.runtime.channels import RELAY, relay

T = TypeVar("T")


class InprocChannel:
    """Both sides in one process, thread-safe: `engine`, and `workers[i]`."""

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
            if isinstance(message, Control) and message.op == RELAY:
                relay(self, range(len(self._workers)), worker, message)
            else:
                received.append((worker, message))
        return received

    def send(self, worker: int, message: Message) -> None:
        self._workers[worker].deliver(message)

    def send_outputs(self, outputs: StepOutputs) -> None:
        for worker, part in split_outputs(outputs, range(len(self._workers))):
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
