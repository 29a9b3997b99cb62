"""The load worker: sends prepared requests at their times over raw sockets, returns answers unparsed.

One call of `run_load` is one measured run in this process. It takes bytes and returns `RawRecord`s: it knows
nothing of models, tokens or event formats, so that several workers can share a run and `parse` can work
afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.bench.connection import ClientConnection, RawRecord, StaleConnection
from phalanx.bench.errors import BenchError
from phalanx.bench.slots import Slots
from phalanx.bench.target import Target

REQUEST_TIMEOUT_S = 6 * 3600.0
# Descriptors that are not connections: standard streams, epoll, event-loop pipes, the result file, imports.
_SPARE_DESCRIPTORS = 64
# Requests started between two turns of the event loop. A larger burst at rate inf would let the first answers
# wait in the kernel, unstamped, while the last requests are still being sent.
_START_BURST = 16
_LAG_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one worker saw.

    Attributes:
        records: one per request, in the order of the requests.
        began: `time.perf_counter` seconds at the start of the run.
        ended: the end of the last response.
        cpu_s: CPU seconds that this process spent in the run.
        ticks: [num_ticks, 3] float64, one row for each 20 ms tick of the event loop: `time.perf_counter`
            seconds; seconds by which the tick was late (a byte may have waited that long for its time stamp);
            CPU seconds of the process so far.
        num_connections: connections opened.
    """

    records: list[RawRecord]
    began: float
    ended: float
    cpu_s: float
    ticks: np.ndarray
    num_connections: int


def raise_descriptor_limit(num_connections: int) -> None:
    """Make sure that this process may hold `num_connections` sockets, raising the soft limit if needed.

    Raises:
        BenchError: the hard limit is too low.
    """
    need = num_connections + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise BenchError(
            f"{num_connections} connections need {need} file descriptors, but the hard limit is {hard}: "
            "raise it (ulimit -Hn) or lower --max-concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def run_load(
    target: Target,
    requests: Sequence[bytes],
    arrivals: np.ndarray,
    slots: Slots | None = None,
    *,
    begin_at: float | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S,
    on_progress: Callable[[int, int], None] | None = None,
    on_finished: Callable[[RawRecord], None] | None = None,
) -> LoadResult:
    """Send every request at its time, wait for all answers.

    Args:
        target: the server.
        requests: whole HTTP requests, head and body.
        arrivals: [len(requests)] float64 seconds, ascending.
        slots: places for requests in flight, or None for no limit.
        begin_at: `time.perf_counter` instant from which arrivals count, common to several processes; None:
            now.
        timeout_s: limit of one request, connecting included.
        on_progress: called twice a second with (finished, failed in transport).
        on_finished: called with each record as it ends, in this process's event loop: keep it short.

    Raises:
        BenchError: a host name that does not resolve.
    """
    load = _Load(target, resolve(target), requests, slots, timeout_s, on_finished)
    with asyncio.Runner(loop_factory=loop_factory()) as runner, _paused_gc():
        return runner.run(load.run(begin_at, arrivals, on_progress))


class _Load:
    """One run: the idle connections, the slots and the records."""

    def __init__(
        self,
        target: Target,
        address: str,
        requests: Sequence[bytes],
        slots: Slots | None,
        timeout_s: float,
        on_finished: Callable[[RawRecord], None] | None,
    ) -> None:
        self._target = target
        self._address = address
        self._requests = requests
        self._slots = slots
        self._tls = target.tls_context()
        self._timeout_s = timeout_s
        self._on_finished = on_finished
        self._idle: list[ClientConnection] = []
        self._records: list[RawRecord] = []
        self._num_finished = 0
        self._num_failed = 0
        self._num_connections = 0

    async def run(
        self, begin_at: float | None, arrivals: np.ndarray, on_progress: Callable[[int, int], None] | None
    ) -> LoadResult:
        ticks: list[tuple[float, float, float]] = []
        helpers = [asyncio.create_task(_watch_lag(ticks))]
        if on_progress is not None:
            helpers.append(asyncio.create_task(self._show(on_progress)))
        began, cpu = time.perf_counter() if begin_at is None else begin_at, time.process_time()
        try:
            tasks = await self._start_all(began, arrivals.tolist())
            await asyncio.gather(*tasks)
        finally:
            cpu = time.process_time() - cpu
            for helper in helpers:
                helper.cancel()
            for connection in self._idle:
                connection.close()
            if self._slots is not None:
                self._slots.close()
        if on_progress is not None:
            on_progress(self._num_finished, self._num_failed)
        ended = max((record.end for record in self._records), default=began)
        seen = np.asarray(ticks, np.float64).reshape(-1, 3)
        return LoadResult(self._records, began, ended, cpu, seen, self._num_connections)

    async def _start_all(self, began: float, arrivals: list[float]) -> list[asyncio.Task[None]]:
        tasks = []
        for index, arrival in enumerate(arrivals):
            due = began + arrival
            if index % _START_BURST == 0:
                await asyncio.sleep(0)
            # More than once: libuv counts in whole milliseconds, so a timer may fire early.
            while (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            record = RawRecord(index, due)
            self._records.append(record)
            tasks.append(asyncio.create_task(self._serve(record)))
        return tasks

    async def _serve(self, record: RawRecord) -> None:
        if self._slots is None:
            await self._exchange(record)
        else:
            asked = time.perf_counter()
            await self._slots.acquire()
            try:
                record.wait_for_slot = time.perf_counter() - asked
                await self._exchange(record)
            finally:
                self._slots.release()
        self._num_finished += 1
        self._num_failed += record.failure is not None or record.status != 200
        if self._on_finished is not None:
            self._on_finished(record)

    async def _exchange(self, record: RawRecord) -> None:
        record.start = time.perf_counter()
        connection = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._take_idle() or await self._connect()
                try:
                    await connection.send(self._requests[record.index], record)
                except StaleConnection:
                    # The server closed a kept-alive connection while it was idle; no answer has begun.
                    record.failure, record.resent = None, True
                    connection = await self._connect()
                    await connection.send(self._requests[record.index], record)
        except TimeoutError:
            _give_up(record, f"timeout after {self._timeout_s:g} s")
        except ConnectionRefusedError:
            _give_up(record, "connection refused")
        except OSError as error:
            _give_up(record, f"cannot connect: {error.strerror or error}")
        if connection is not None:
            self._put_back(connection)

    def _take_idle(self) -> ClientConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            connection.close()
        return None

    def _put_back(self, connection: ClientConnection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> ClientConnection:
        self._num_connections += 1
        _, connection = await asyncio.get_running_loop().create_connection(
            ClientConnection,
            self._address,
            self._target.port,
            ssl=self._tls,
            server_hostname=self._target.host if self._tls else None,
        )
        return connection

    async def _show(self, on_progress: Callable[[int, int], None]) -> None:
        while True:
            on_progress(self._num_finished, self._num_failed)
            await asyncio.sleep(0.5)


def _give_up(record: RawRecord, cause: str) -> None:
    record.failure, record.end = cause, time.perf_counter()


async def _watch_lag(ticks: list[tuple[float, float, float]]) -> None:
    """Note how late the event loop runs a timer: the error that a time stamp of this process may have."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(_LAG_PERIOD_S)
        now = time.perf_counter()
        ticks.append((now, max(0.0, now - asked - _LAG_PERIOD_S), time.process_time()))


def resolve(target: Target) -> str:
    """Return the first address of the host that accepts a connection: one look-up for all requests.

    Raises:
        BenchError: exit code 2; the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BenchError(f"cannot resolve {target.host}: {reason}", exit_code=2) from None
    addresses = [str(info[4][0]) for info in found]
    for address in addresses if len(addresses) > 1 else []:
        with contextlib.suppress(OSError), socket.create_connection((address, target.port), timeout=5):
            return address
    return addresses[0]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory where uvloop is installed, else None (asyncio's own)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@contextlib.contextmanager
def _paused_gc() -> Iterator[None]:
    """Keep the collector out of the run: a full collection stops every stream for a tenth of a second."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
