"""The measurements of `phalanx bench front`: each sends its load, checks every answer and returns figures."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from phalanx.microbench.front_check import ROUTES, Expected, Mismatch, check_stream, check_whole, split_answer
from phalanx.microbench.front_load import Exchange, StreamLoad, run_in_turn
from phalanx.microbench.front_server import NullServer

_MIN_CPU_S = 0.1  # a clock tick is 10 ms
_BEFORE_S, _AFTER_S = 1.0, 0.5
_ASKED_ONE_TOKEN = 2000.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out.

    Attributes:
        num_events: streamed events that brought tokens, or answers that were not streamed.
        per_cpu_s: num_events by CPU second of the API workers; per_cpu_s_steady: while all streams ran
            (role and finish events do not fall into that time); None if it was too short.
        worker_share, engine_share: CPU seconds by wall seconds.
        max_gap_ms: longest pause of the watched stream; quiet_gap_ms: the same before the big prompt came.
    """

    name: str
    num_streams: int
    num_events: int
    per_cpu_s: float
    per_cpu_s_steady: float | None
    asked: str
    tokens_per_event: float
    wall_s: float
    worker_share: float
    engine_share: float
    max_gap_ms: float | None = None
    quiet_gap_ms: float | None = None


def _cpu_use(num_events: int, worker_s: float, engine_s: float, wall_s: float) -> dict[str, float]:
    """Figures' events by CPU second of the worker, and the shares of a core, from what a run took."""
    return {
        "per_cpu_s": num_events / max(worker_s, _MIN_CPU_S),
        "wall_s": wall_s,
        "worker_share": worker_s / wall_s,
        "engine_share": engine_s / wall_s,
    }


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams that all run at once. kind: as in front_check. asked: events by CPU second."""

    name: str
    kind: str
    expected: list[Expected]
    prompt: str
    asked: float | None


@dataclass(frozen=True, slots=True)
class OneToken:
    """Requests of one token each, not streamed."""

    num_requests: int
    concurrency: int
    expected: list[Expected]
    prompt: str


@dataclass(frozen=True, slots=True)
class BigPrompt:
    """One stream is watched while a big prompt comes. expected: of the stream."""

    prompt: str
    expected: Expected
    asked_gap_ms: float


def http_request(kind: str, prompt: str, *, seed: int, num_tokens: int, stream: bool) -> bytes:
    """The bytes of one request. kind: as in front_check."""
    body: dict[str, Any]
    if kind == "chat":
        body = {"messages": [{"role": "user", "content": prompt}]}
    elif kind == "completions":
        body = {"prompt": prompt}
    else:
        params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "sampling_seed": seed}
        body = {"text": prompt, "sampling_params": params}
    if kind in ("chat", "completions"):
        body |= {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "seed": seed}
    raw = json.dumps({**body, "stream": stream}).encode()
    head = f"POST {ROUTES[kind]} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def streams_of(case: Streams, server: NullServer, timeout_s: float) -> Figures:
    """Open all streams, read them to their ends.

    Raises:
        Mismatch: an answer is not what the engine said.
    """
    num_tokens = len(case.expected[0].ids)
    exchanges = [
        Exchange(http_request(case.kind, case.prompt, seed=seed, num_tokens=num_tokens, stream=True))
        for seed in range(len(case.expected))
    ]
    engine_before_s = server.engine_cpu_s()
    marks = StreamLoad(server.port, server.worker_cpu_s, timeout_s).run(exchanges)
    engine_s = server.engine_cpu_s() - engine_before_s
    num_events = _check_all(case.kind, exchanges, case.expected)
    first, last, begin, end = marks.first, marks.last, marks.all_started, marks.one_ended
    assert first is not None and last is not None
    steady = None
    if begin is not None and end is not None and end.probe - begin.probe > _MIN_CPU_S:
        steady = (end.num_events - begin.num_events) / (end.probe - begin.probe)
    wall_s, worker_s = last.time_s - first.time_s, last.probe - first.probe
    return Figures(
        name=case.name,
        num_streams=len(exchanges),
        num_events=num_events,
        per_cpu_s_steady=steady,
        asked="all finish" if case.asked is None else f"{case.asked:,.0f}",
        tokens_per_event=num_tokens * len(exchanges) / num_events,
        **_cpu_use(num_events, worker_s, engine_s, wall_s),
    )


def _check_all(kind: str, exchanges: Sequence[Exchange], expected: Sequence[Expected]) -> int:
    """Events with tokens, of all answers."""
    num_events = 0
    for number, (exchange, wanted) in enumerate(zip(exchanges, expected, strict=True)):
        if exchange.failure is not None:
            raise Mismatch(f"stream {number}: {exchange.failure}")
        try:
            num_events += check_stream(kind, exchange.answer, wanted)
        except Mismatch as error:
            raise Mismatch(f"stream {number}: {error}") from None
        exchange.pieces.clear()
    return num_events


def one_token_of(case: OneToken, server: NullServer, timeout_s: float) -> Figures:
    """/generate, one token, whole answers.

    Raises:
        Mismatch: an answer is not what the engine said.
    """
    requests = [
        http_request("incremental", case.prompt, seed=seed, num_tokens=1, stream=False)
        for seed in range(case.num_requests)
    ]
    worker_s, engine_s, wall_s = server.worker_cpu_s(), server.engine_cpu_s(), time.monotonic()
    try:
        answers = run_in_turn(server.port, requests, case.concurrency, timeout_s)
    except RuntimeError as error:
        raise Mismatch(str(error)) from None
    worker_s, engine_s = server.worker_cpu_s() - worker_s, server.engine_cpu_s() - engine_s
    wall_s = time.monotonic() - wall_s
    for answer, expected in zip(answers, case.expected, strict=True):
        check_whole("incremental", answer, expected)
    return Figures(
        name="one-token",
        num_streams=case.concurrency,
        num_events=case.num_requests,
        per_cpu_s_steady=None,
        asked=f"{_ASKED_ONE_TOKEN:,.0f}",
        tokens_per_event=1.0,
        **_cpu_use(case.num_requests, worker_s, engine_s, wall_s),
    )


def gap_of(case: BigPrompt, server: NullServer, timeout_s: float) -> Figures:
    """The longest pause of a stream while a big prompt is read, tokenized and sent to the engine.

    Raises:
        Mismatch: the big prompt is refused, or the stream is not what the engine said.
    """
    num_tokens = len(case.expected.ids)
    watched = Exchange(
        http_request("incremental", "a b c", seed=0, num_tokens=num_tokens, stream=True), times=[]
    )
    big = Exchange(http_request("incremental", case.prompt, seed=1, num_tokens=1, stream=False))
    load = StreamLoad(server.port, server.worker_cpu_s, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    worker_s, engine_s, begin_s = server.worker_cpu_s(), server.engine_cpu_s(), time.monotonic()
    load.open(watched)
    times = watched.times
    assert times is not None
    while not times or time.monotonic() < times[0] + _BEFORE_S:
        load.turn(0.05)
    sent_s = time.monotonic()
    load.open(big)
    while big.done_s is None or time.monotonic() < big.done_s + _AFTER_S:
        load.turn(0.05)
        if watched.done_s is not None or time.monotonic() > deadline_s:
            raise Mismatch("the watched stream was over before the big prompt was")
    worker_s, engine_s = server.worker_cpu_s() - worker_s, server.engine_cpu_s() - engine_s
    wall_s = time.monotonic() - begin_s
    status, body = split_answer(big.answer)
    if big.failure is not None or status != 200:
        raise Mismatch(f"the big prompt: {big.failure or status}: {body[:200]!r}")
    load.close()
    gaps = [(b, 1000 * (b - a)) for a, b in pairwise(times)]
    return Figures(
        name="big-prompt",
        num_streams=2,
        num_events=watched.num_events,
        per_cpu_s_steady=None,
        asked=f"{case.asked_gap_ms:.0f} ms",
        tokens_per_event=1.0,
        **_cpu_use(watched.num_events, worker_s, engine_s, wall_s),
        max_gap_ms=max((gap for at, gap in gaps if at > sent_s), default=0.0),
        quiet_gap_ms=max((gap for at, gap in gaps if at <= sent_s), default=0.0),
    )
