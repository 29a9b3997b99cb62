"""The engine process's loop between a real scheduler with the null engine and a channel in this process."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import numpy as np
import pytest

from phalanx.core.request import WORKER_SHIFT, EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepOutputs
from phalanx.messages import Abort, Control, ControlReply, EngineReady, Submit
from phalanx.runtime import engine_process, heartbeat
from phalanx.runtime.build import build_worker
from phalanx.runtime.engine_process import EngineLoop
from tests.e2e.server_harness import PATIENCE_S, make_settings
from tests.inproc_channel import InprocChannel

CONTEXT = 2048
LONG, SLOW_S, FAST_S = 600, 0.05, 0.0005  # half a minute in slow steps, a moment in fast ones


def settings():
    base = make_settings("dummy", api_workers=2)
    return msgspec.structs.replace(
        base,
        model=msgspec.structs.replace(base.model, max_position_embeddings=CONTEXT),
        cache=msgspec.structs.replace(base.cache, max_total_tokens=32 * CONTEXT),
        scheduler=msgspec.structs.replace(base.scheduler, context_length=CONTEXT),
        engine=msgspec.structs.replace(base.engine, device="null", null_step_ms=1.0),
    )


class Side:
    """One API worker's view: messages out, and what came back by stream."""

    def __init__(self, end):
        self.end = end
        self.replies = {}
        self.ready = []
        self.tokens: dict[int, int] = {}
        self.finish: dict[int, Finish] = {}
        self.errors: dict[int, tuple[int, str]] = {}

    def send(self, *messages):
        for message in messages:
            self.end.send(message)

    def submit(self, number, rid=None, tokens=3, prompt_len=2):
        stream = self.end.worker_id << WORKER_SHIFT | number
        sampling = SamplingParams(max_new_tokens=tokens, sampling_seed=number, ignore_eos=True)
        self.send(Submit((EngineRequest(stream, np.ones(prompt_len, np.int32), sampling, rid=rid),)))
        return stream

    def pump(self, timeout_ms=20):
        for message in self.end.recv(timeout_ms):
            if isinstance(message, StepOutputs):
                for stream, status, text in message.errors:
                    self.errors[stream] = status, text
                rows = zip(
                    message.stream_ids.tolist(), message.tokens.tolist(), message.finish.tolist(), strict=True
                )
                for stream, token, finish in rows:
                    assert stream not in self.finish, "a stream says something after its end"
                    self.tokens[stream] = self.tokens.get(stream, 0) + (token >= 0)
                    if finish:
                        self.finish[stream] = Finish(finish)
            elif isinstance(message, ControlReply):
                self.replies[message.id] = message
            elif isinstance(message, EngineReady):
                self.ready.append(message.info)

    def wait(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            self.pump()

    def ask(self, number, op, args=None):
        self.send(Control(number, op, args or {}))
        self.wait(lambda: number in self.replies)
        return self.replies[number]

    def pages_held(self, number):
        return self.ask(number, "stats").data["pages_held"]


class Running:
    def __init__(self):
        self.channel = InprocChannel(2)
        worker, info = build_worker(settings(), progress=False)
        self.scheduler, self.engine = worker.scheduler, worker._engine
        self.loop = EngineLoop(worker, self.channel.engine, settings(), info)
        self.sides = [Side(end) for end in self.channel.workers]
        self.thread = threading.Thread(target=self.loop.run, daemon=True)

    def start(self):
        self.thread.start()

    def pace(self, step_s):
        """How long the next steps take."""
        self.engine._step_s = step_s


@contextlib.contextmanager
def running(start=True):
    one = Running()
    if start:
        one.start()
    try:
        yield one
    finally:
        one.loop.stop()
        one.thread.join(PATIENCE_S)
        assert not one.thread.is_alive()
        one.scheduler.check()


def test_hello_is_answered_with_the_facts():
    with running() as one:
        a, b = one.sides
        b.send(Control(5, "hello"))
        b.wait(lambda: 5 in b.replies)
        assert b.ask(6, "ping").ok and not b.ready  # not before all the first workers are there
        a.send(Control(0, "hello"))
        for side in (a, b):
            side.wait(lambda side=side: side.ready)
            assert side.ready[0]["max_request_tokens"] == CONTEXT
            assert side.ready[0]["started_at_s"] <= time.time()
        b.send(Control(7, "hello"))
        b.wait(lambda: len(b.ready) == 2)
        a.pump()
        assert len(a.ready) == 1


def test_a_worker_that_dies_before_its_hello_is_not_waited_for():
    with running() as one:
        _, b = one.sides
        b.send(Control(5, "hello"))
        b.wait(lambda: 5 in b.replies)
        assert not b.ready
        b.send(Control(0, "worker_ended", {"worker": 0}))
        b.wait(lambda: b.ready)


def test_a_name_in_use_is_refused_whichever_worker_has_it_and_free_again_afterwards():
    with running() as one:
        a, b = one.sides
        one.pace(SLOW_S)
        first = a.submit(1, rid="x", tokens=LONG)
        a.wait(lambda: a.tokens.get(first))
        second = b.submit(1, rid="x")
        third = a.submit(2, rid="x")
        other = b.submit(2, rid="y")
        b.wait(lambda: second in b.finish and other in b.finish)
        a.wait(lambda: third in a.finish)
        assert b.errors[second] == a.errors[third] == (400, "the request id 'x' is in use")
        assert b.finish[other] == Finish.LENGTH and other not in b.errors
        one.pace(FAST_S)
        a.wait(lambda: first in a.finish)
        assert a.tokens[first] == LONG and a.finish[first] == Finish.LENGTH
        again = b.submit(3, rid="x")
        b.wait(lambda: again in b.finish)
        assert b.finish[again] == Finish.LENGTH and b.tokens[again] == 3


def test_a_name_is_free_after_every_kind_of_end():
    with running() as one:
        a, _ = one.sides
        one.pace(SLOW_S)
        for number in range(3):  # aborted while it runs
            stream = a.submit(number, rid="x", tokens=LONG)
            a.wait(lambda stream=stream: a.tokens.get(stream))
            a.send(Abort((stream,)))
            a.wait(lambda stream=stream: stream in a.finish)
            assert a.finish[stream] == Finish.ABORT
        stream = a.submit(10, rid="x", prompt_len=CONTEXT + 5)  # refused by the scheduler
        a.wait(lambda: stream in a.finish)
        assert a.errors[stream][0] == 400 and "in use" not in a.errors[stream][1]
        stream = a.submit(11, rid="x")
        a.wait(lambda: stream in a.finish)
        assert a.finish[stream] == Finish.LENGTH


def test_an_end_that_is_read_after_the_next_request_of_that_name_counts():
    """Two workers' messages are read in any order."""
    with running(start=False) as one:
        a, b = one.sides
        first, second = 1, 1 << WORKER_SHIFT | 1
        a.send(Submit((request(first, "x"),)))
        b.send(Submit((request(second, "x"),)))
        third = b.submit(2, rid="x")
        a.send(Abort((first,)))
        one.start()
        b.wait(lambda: second in b.finish and third in b.finish)
        a.wait(lambda: first in a.finish)
        assert a.finish[first] == Finish.ABORT
        assert b.finish[second] == Finish.LENGTH and second not in b.errors
        assert b.errors[third] == (400, "the request id 'x' is in use")


def request(stream, rid):
    sampling = SamplingParams(max_new_tokens=3, sampling_seed=0, ignore_eos=True)
    return EngineRequest(stream, np.array([1], np.int32), sampling, rid=rid)


def test_a_workers_end_aborts_its_requests_alone():
    with running() as one:
        a, b = one.sides
        one.pace(SLOW_S)
        mine = [a.submit(i, rid=f"a{i}", tokens=LONG) for i in range(5)]
        other = b.submit(0, tokens=LONG)
        a.wait(lambda: all(a.tokens.get(s) for s in mine))
        b.send(Control(0, "worker_ended", {"worker": 0}))
        a.wait(lambda: all(s in a.finish for s in mine))
        one.pace(FAST_S)
        b.wait(lambda: other in b.finish)
        assert {a.finish[s] for s in mine} == {Finish.ABORT}
        assert b.finish[other] == Finish.LENGTH and b.tokens[other] == LONG
        assert b.pages_held(1) == 0
        again = b.submit(1, rid="a0")
        b.wait(lambda: again in b.finish)
        assert b.finish[again] == Finish.LENGTH


class Clock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s


def test_a_worker_that_is_not_heard_of_loses_its_requests(monkeypatch):
    """It was stopped, and what waits for it must not grow for ever; another's requests go on."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    with running() as one:
        stopped, other = one.sides
        assert other.ask(1, "pause", {"mode": "in_place"}).ok
        lost, kept = stopped.submit(1, tokens=50), other.submit(1, tokens=50)
        other.wait(lambda: one.scheduler.stream_ids() == [lost, kept])
        number = 10
        while lost in one.scheduler.stream_ids():
            number += 1
            clock.now_s += 0.5
            other.ask(number, "ping")
            assert clock.now_s <= 2 * engine_process._SILENCE_S
        assert clock.now_s > engine_process._SILENCE_S
        assert other.ask(2, "stats").data["aborted_worker_lost_total"] == 1
        other.ask(3, "continue")
        other.wait(lambda: kept in other.finish)
        assert other.finish[kept] is Finish.LENGTH and other.tokens[kept] == 50
        stopped.wait(lambda: lost in stopped.finish)  # it is told when it goes on
        assert stopped.finish[lost] is Finish.ABORT
        # Nobody asked for that end: it is an error, not an abort that a client could take for success.
        assert stopped.errors[lost] == (503, "the API worker did not answer for too long")
        again = stopped.submit(2)
        stopped.wait(lambda: again in stopped.finish)
        assert stopped.finish[again] is Finish.LENGTH and other.pages_held(4) == 0


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_pause(mode):
    with running() as one:
        a, b = one.sides
        one.pace(SLOW_S)
        before = a.submit(1, tokens=LONG)
        a.wait(lambda: a.tokens.get(before, 0) > 3)
        assert b.ask(1, "pause", {"mode": mode}).ok
        a.pump()
        told = a.tokens[before]
        during = b.submit(2)
        gone = b.submit(3, rid="gone")
        stats = b.ask(2, "stats").data
        assert stats["paused"] and stats["queued"] == 2 and stats["steps_in_flight"] == 0
        assert stats["running"] == (mode == "in_place")
        b.send(Abort((gone,)))
        b.wait(lambda: gone in b.finish)
        assert b.ask(3, "ping").ok and not b.ask(4, "flush_cache").ok
        for _ in range(5):
            a.pump()
            b.pump()
        assert a.tokens[before] == told and during not in b.tokens
        if mode == "abort":
            assert a.finish[before] == Finish.ABORT
        one.pace(FAST_S)
        assert a.ask(5, "continue").ok
        b.wait(lambda: during in b.finish)
        assert b.finish[during] == Finish.LENGTH and b.tokens[during] == 3
        a.wait(lambda: before in a.finish)
        assert a.tokens[before] == (LONG if mode == "in_place" else told)
        assert not b.ask(6, "stats").data["paused"]


def test_unknown_modes_and_operations_are_refused():
    with running() as one:
        a, _ = one.sides
        assert a.ask(1, "pause", {"mode": "retract"}).data == {"message": "unknown mode 'retract'"}
        assert not a.ask(2, "dance").ok
        stream = a.submit(1)
        a.wait(lambda: stream in a.finish)  # and it does not pause
