"""Places for requests in flight (--max-concurrency), within one client process or over several."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import os
from collections import deque
from multiprocessing.connection import Connection

from phalanx.bench.errors import BenchError

# What a pipe holds at least, in bytes, on Linux and macOS. One host has fewer ports than that for one server.
_PIPE_BYTES = 65536


class SlotPool:
    """Free places that several processes share: each is one byte in a pipe.

    Taking and giving are single system calls, and a process that waits sleeps in its event loop until the
    pipe is readable. It can be sent to a child process that is being started.
    """

    def __init__(self, num_slots: int) -> None:
        """Open a pipe with `num_slots` places in it.

        Raises:
            BenchError: more places than a pipe holds.
        """
        if num_slots > _PIPE_BYTES:
            raise BenchError(
                f"--max-concurrency {num_slots} with several client processes: {_PIPE_BYTES} at most",
                exit_code=2,
            )
        self._reader: Connection
        self._writer: Connection
        self._reader, self._writer = mp.Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)
        os.write(self._writer.fileno(), b"." * num_slots)

    def take(self) -> bool:
        """Take one place; False when there is none now."""
        try:
            return len(os.read(self._reader.fileno(), 1)) == 1
        except BlockingIOError:
            return False

    def give(self) -> None:
        """Put one place back."""
        os.write(self._writer.fileno(), b".")

    def fileno(self) -> int:
        """File descriptor that is readable while a place is free."""
        return self._reader.fileno()

    def close(self) -> None:
        """Close this process's ends."""
        self._reader.close()
        self._writer.close()


class Slots:
    """The places of one process. Its waiting requests get them first come, first served.

    With a pool, a place that nobody here waits for goes back to the pool, where another process finds it:
    never more than all places together are in use, and none is idle while a request waits in any process.
    """

    def __init__(self, num_own: int, pool: SlotPool | None = None) -> None:
        """Begin with `num_own` free places of this process; further ones come from `pool`."""
        self._num_free = num_own
        self._pool = pool
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Wait for a place and take it."""
        if not self._waiters:
            if self._num_free:
                self._num_free -= 1
                return
            if self._pool is not None and self._pool.take():
                return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        if self._pool is not None and len(self._waiters) == 1:
            loop.add_reader(self._pool.fileno(), self._on_pool)
        await waiter

    def release(self) -> None:
        """Give a place to the next request here, or back."""
        if self._waiters:
            self._waiters.popleft().set_result(None)
            if not self._waiters:
                self._stop_watching()
        elif self._pool is not None:
            self._pool.give()
        else:
            self._num_free += 1

    def close(self) -> None:
        """Stop watching the pool; to be called in the event loop that waited."""
        self._waiters.clear()
        self._stop_watching()

    def _on_pool(self) -> None:
        while self._waiters and self._pool is not None and self._pool.take():
            self._waiters.popleft().set_result(None)
        if not self._waiters:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._pool is not None:
            with contextlib.suppress(ValueError, OSError):
                asyncio.get_running_loop().remove_reader(self._pool.fileno())
