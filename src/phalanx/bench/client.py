"""One client process's share of a run: send, receive, and understand the answers when the load is over."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from phalanx.bench.backends import Flavor
from phalanx.bench.connection import RawRecord
from phalanx.bench.errors import BenchError
from phalanx.bench.parse import Outcome, parse_record
from phalanx.bench.slots import SlotPool, Slots
from phalanx.bench.target import Target
from phalanx.bench.worker import LoadResult, raise_descriptor_limit, resolve, run_load


@dataclass(frozen=True, slots=True)
class Job:
    """What one client process has to do.

    Attributes:
        target: the server.
        indices: [n] int64, positions of these requests in the whole run.
        requests: [n] whole HTTP requests.
        arrivals: [n] float64 seconds from the common start, ascending.
        num_own_slots: places for requests in flight that this process begins with; None for no limit.
        max_connections: most connections that it may come to hold.
        flavor, stream: shape of the answers.
        max_raw_bytes: raw answers kept for parsing after the run; past it, each is parsed when it ends.
    """

    target: Target
    indices: np.ndarray
    requests: list[bytes]
    arrivals: np.ndarray
    num_own_slots: int | None
    max_connections: int
    flavor: Flavor
    stream: bool
    max_raw_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessLoad:
    """What the run cost one client process.

    Attributes:
        num_requests: requests that it sent.
        cpu_s: its CPU seconds in the run.
        ticks: [num_ticks, 3] float64, as in `worker.LoadResult`.
        num_connections: connections opened.
        num_pieces: pieces in which bodies arrived.
        num_bytes: bytes of bodies.
        num_parsed_early: answers parsed during the run, since the raw bytes passed the limit.
        num_resent: requests sent a second time, since the server had closed the kept-alive connection.
    """

    num_requests: int
    cpu_s: float
    ticks: np.ndarray
    num_connections: int
    num_pieces: int
    num_bytes: int
    num_parsed_early: int
    num_resent: int = 0


@dataclass(frozen=True, slots=True)
class JobResult:
    """The answers to a job, in its order.

    Attributes:
        outcomes: n outcomes; their `index` is that of the whole run.
        due, sent: [n] float64 `time.perf_counter` seconds; NaN in `sent` where nothing reached a socket.
        slot_waits: [n] float64 seconds spent waiting for a place.
        began, ended: the common start, and the end of this process's last response.
        load: what it cost.
    """

    outcomes: list[Outcome]
    due: np.ndarray
    sent: np.ndarray
    slot_waits: np.ndarray
    began: float
    ended: float
    load: ProcessLoad


def run_job(
    job: Job,
    pool: SlotPool | None = None,
    begin_at: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> JobResult:
    """Send a job's requests, wait for all answers, then parse them.

    Raises:
        BenchError: too few file descriptors, or a host name that does not resolve.
    """
    raise_descriptor_limit(job.max_connections)
    slots = None if job.num_own_slots is None else Slots(job.num_own_slots, pool)
    early: dict[int, Outcome] = {}
    num_bytes = num_pieces = 0

    def count_and_maybe_parse(record: RawRecord) -> None:
        nonlocal num_bytes, num_pieces
        num_pieces += len(record.pieces)
        num_bytes += sum(map(len, record.pieces))
        if num_bytes > job.max_raw_bytes:
            early[record.index] = parse_record(record, job.flavor, job.stream)
            record.pieces, record.times = [], []

    load = run_load(
        job.target,
        job.requests,
        job.arrivals,
        slots,
        begin_at=begin_at,
        on_progress=on_progress,
        on_finished=count_and_maybe_parse,
    )
    spent = ProcessLoad(
        len(job.requests),
        load.cpu_s,
        load.ticks,
        load.num_connections,
        num_pieces,
        num_bytes,
        len(early),
        sum(record.resent for record in load.records),
    )
    return _understood(job, load, early, spent)


def _understood(job: Job, load: LoadResult, early: dict[int, Outcome], spent: ProcessLoad) -> JobResult:
    records, outcomes = load.records, []
    for record, index in zip(records, job.indices.tolist(), strict=True):
        outcome = early.get(record.index) or parse_record(record, job.flavor, job.stream)
        outcome.index = index
        outcomes.append(outcome)
        record.pieces, record.times = [], []
    return JobResult(
        outcomes,
        due=np.asarray([record.due for record in records], np.float64),
        sent=np.asarray([np.nan if r.sent is None else r.sent for r in records], np.float64),
        slot_waits=np.asarray([record.wait_for_slot for record in records], np.float64),
        began=load.began,
        ended=load.ended,
        load=spent,
    )


def child_main(connection: Connection, pool: SlotPool | None) -> None:
    """Run one job in a child process: job in, "ready" out, start in, progress and the result out.

    Messages are (kind, value). The parent's end closing at any time ends this process.
    """
    # The parent ends its children itself; a Ctrl-C reaches the whole group and would print a trace from each.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job: Job = connection.recv()
        try:
            raise_descriptor_limit(job.max_connections)
            resolve(job.target)
            connection.send(("ready", None))
            begin_at: float = connection.recv()
            _end_with_the_parent(connection)
            result = run_job(job, pool, begin_at, lambda *progress: connection.send(("progress", progress)))
            connection.send(("result", result))
        except BenchError as error:
            connection.send(("error", (str(error), error.exit_code)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The parent is gone: nobody wants the answer.
        return


def _end_with_the_parent(connection: Connection) -> None:
    """Watch for the parent's end: it sends nothing more, so its end closing is all that can happen."""

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
            return
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
