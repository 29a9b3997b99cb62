"""A run over one or several client processes: deal the requests, start together, join the answers."""

from __future__ import annotations

import contextlib
import math
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from phalanx.bench.backends import Flavor
from phalanx.bench.client import Job, JobResult, ProcessLoad, child_main, run_job
from phalanx.bench.errors import BenchError
from phalanx.bench.parse import Outcome
from phalanx.bench.slots import SlotPool
from phalanx.bench.target import Target

# Raw answers kept for parsing after the run, over all processes. SGLang's native stream repeats the whole
# text in every event, so long answers would fill the memory.
_MAX_RAW_BYTES = 2 << 30
# One process per this many requests in flight: it drains a burst of 1024 events in about 8 ms.
_STREAMS_PER_PROCESS = 1024
_START_TIMEOUT_S = 60.0
# From the start message to the common start: a child builds its event loop and collects garbage in between.
_START_MARGIN_S = 0.3


@dataclass(frozen=True, slots=True)
class Load:
    """What a run sends, in the order of its requests.

    Attributes:
        target: the server.
        requests: [n] whole HTTP requests.
        arrivals: [n] float64 seconds from the start, ascending.
        max_concurrency: most requests in flight over all processes, or None.
        flavor, stream: shape of the answers.
    """

    target: Target
    requests: list[bytes]
    arrivals: np.ndarray
    max_concurrency: int | None
    flavor: Flavor
    stream: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What came back, in the order of the requests. Times are `time.perf_counter` seconds.

    Attributes:
        outcomes: n outcomes.
        due, sent, slot_waits: [n] float64; see `client.JobResult`.
        began: the common start.
        ended: the end of the last response.
        processes: what each client process spent.
    """

    outcomes: list[Outcome]
    due: np.ndarray
    sent: np.ndarray
    slot_waits: np.ndarray
    began: float
    ended: float
    processes: list[ProcessLoad]


def settle_num_processes(asked: int | None, num_requests: int, max_concurrency: int | None) -> int:
    """Return how many client processes to use; `asked` None means auto.

    Auto: one per 1024 requests that can be in flight, and at most half of the cores that this process may
    use, since a server on the same machine needs the rest.
    """
    most = min(num_requests, max_concurrency or num_requests)
    if asked is not None:
        return max(1, min(asked, num_requests))
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    return max(1, min(half, math.ceil(most / _STREAMS_PER_PROCESS)))


def run_fleet(
    load: Load, num_processes: int, on_progress: Callable[[int, int], None] | None = None
) -> RunRecord:
    """Send every request at its time from `num_processes` client processes, wait for all answers.

    One process is this one; more are started, warmed, and begin at one instant.

    Raises:
        BenchError: too few file descriptors, an unknown host, or a client process that died.
    """
    if num_processes == 1:
        return join_results([run_job(_deal(load, 1)[0], on_progress=on_progress)])
    jobs = _deal(load, num_processes)
    pool = None
    if load.max_concurrency is not None:
        own = sum(job.num_own_slots or 0 for job in jobs)
        pool = SlotPool(min(load.max_concurrency, len(load.requests)) - own)
    with _children(jobs, pool) as children:
        connections = [connection for _, connection in children]
        _gather(children, "ready", time.monotonic() + _START_TIMEOUT_S, None)
        begin_at = time.perf_counter() + _START_MARGIN_S
        for connection in connections:
            connection.send(begin_at)
        results = _gather(children, "result", math.inf, on_progress)
    return join_results(results)


def join_results(results: list[JobResult]) -> RunRecord:
    """Put the results of all processes back into the order of the requests."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    order = np.argsort([outcome.index for outcome in outcomes], kind="stable")
    return RunRecord(
        [outcomes[i] for i in order.tolist()],
        due=np.concatenate([result.due for result in results])[order],
        sent=np.concatenate([result.sent for result in results])[order],
        slot_waits=np.concatenate([result.slot_waits for result in results])[order],
        began=min(result.began for result in results),
        ended=max(result.ended for result in results),
        processes=[result.load for result in results],
    )


def _deal(load: Load, num_processes: int) -> list[Job]:
    """Deal requests out round-robin, each with its own arrival time.

    Each process begins with its even share of the places, as far as its requests are due at once; all other
    places lie in the common pool, so that none waits in a process that has no use for it.
    """
    n = len(load.requests)
    jobs = []
    for number in range(num_processes):
        indices = np.arange(number, n, num_processes)
        arrivals = load.arrivals[indices]
        own = None
        if load.max_concurrency is not None:
            share = len(range(number, load.max_concurrency, num_processes))
            due_now = int(np.count_nonzero(arrivals <= 0))
            own = min(share, due_now) if num_processes > 1 else load.max_concurrency
        jobs.append(
            Job(
                load.target,
                indices,
                [load.requests[i] for i in indices.tolist()],
                arrivals,
                own,
                min(len(indices), load.max_concurrency or n),
                load.flavor,
                load.stream,
                _MAX_RAW_BYTES // num_processes,
            )
        )
    return jobs


_Child = tuple[BaseProcess, Connection]


@contextlib.contextmanager
def _children(jobs: list[Job], pool: SlotPool | None) -> Iterator[list[_Child]]:
    """Start a process per job and hand it over; end whatever still runs when the block ends."""
    # Spawned, not forked: a copy of this process would carry its threads' locks and its tokenizer.
    context = mp.get_context("spawn")
    children: list[_Child] = []
    try:
        for job in jobs:
            here, there = context.Pipe()
            process: BaseProcess = context.Process(target=child_main, args=(there, pool), daemon=True)
            process.start()
            there.close()
            children.append((process, here))
            here.send(job)
        yield children
    finally:
        for process, connection in children:
            connection.close()
            process.terminate()
            process.join()
        if pool is not None:
            pool.close()


def _gather(
    children: list[_Child], kind: str, deadline: float, on_progress: Callable[[int, int], None] | None
) -> list[Any]:
    """Return each child's message of this kind; progress is summed over the children and shown."""
    values: list[Any] = [None] * len(children)
    progress = np.zeros((len(children), 2), np.int64)
    open_ones = {connection: number for number, (_, connection) in enumerate(children)}
    while open_ones:
        timeout = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        ready = wait(list(open_ones), timeout)
        if not ready:
            raise BenchError(f"client processes not ready after {_START_TIMEOUT_S:g} s")
        for connection in ready:
            number = open_ones[connection]  # type: ignore[index]
            got, value = _receive(children[number], number)
            if got == kind:
                del open_ones[connection]  # type: ignore[arg-type]
                values[number] = value
            elif got == "error":
                raise BenchError(value[0], exit_code=value[1])
            elif on_progress is not None:
                progress[number] = value
                on_progress(*progress.sum(0).tolist())
    return values


def _receive(child: _Child, number: int) -> tuple[str, Any]:
    process, connection = child
    try:
        message: tuple[str, Any] = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join(5)
        raise BenchError(f"client process {number} died (exit code {process.exitcode})") from None
    return message
