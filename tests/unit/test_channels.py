from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial

import numpy as np
import pytest
import zmq

from phalanx.core.errors import ConfigError
from phalanx.core.request import WORKER_SHIFT
from phalanx.core.step import StepOutputs
from phalanx.messages import Abort, Control, ControlReply, EngineReady, encode
from phalanx.runtime.channels import EngineChannel, LauncherChannel, WorkerChannel
from tests.e2e.server_harness import PATIENCE_S, wait_until
from tests.inproc_channel import InprocChannel


@contextlib.contextmanager
def channel(kind, tmp_path, num_workers):
    if kind == "inproc":
        both = InprocChannel(num_workers)
        engine, workers = both.engine, both.workers
    else:
        engine = EngineChannel(str(tmp_path), num_workers)
        workers = [WorkerChannel(str(tmp_path), i) for i in range(num_workers)]
    try:
        yield engine, workers
    finally:
        for end in (*workers, engine):
            end.close()


def take(end, count, timeout_ms=60_000):
    """Receive until `count` messages have come (they may come in parts)."""
    got = []
    while len(got) < count:
        part = end.recv(timeout_ms)
        assert part, f"only {len(got)} of {count} came"
        got += part
    return got


def outputs(stream_ids, step_id=0):
    n = len(stream_ids)
    return StepOutputs(
        step_id, np.array(stream_ids, np.int64), np.arange(n, dtype=np.int32), np.zeros(n, np.uint8)
    )


KINDS = pytest.mark.parametrize("kind", ["inproc", "ipc"])


@KINDS
def test_messages_cross_both_ways_in_order(kind, tmp_path):
    with channel(kind, tmp_path, 2) as (engine, workers):
        for i in range(50):
            workers[1].send(Abort((i,)))
        assert take(engine, 50) == [(1, Abort((i,))) for i in range(50)]
        for i in range(50):
            engine.send(0, ControlReply(i, True))
        assert take(workers[0], 50) == [ControlReply(i, True) for i in range(50)]
        assert workers[1].recv() == [] and engine.recv(0) == [] and engine.recv(1) == []


@KINDS
def test_outputs_go_to_their_workers_one_message_each(kind, tmp_path):
    with channel(kind, tmp_path, 3) as (engine, workers):
        mine = [5, 2 << WORKER_SHIFT | 5, 6, 2 << WORKER_SHIFT | 9, 7 << WORKER_SHIFT]
        engine.send_outputs(outputs(mine, step_id=3))
        engine.send_outputs(outputs([]))
        engine.send(1, EngineReady({"last": True}))
        (first,), (third,) = take(workers[0], 1), take(workers[2], 1)
        assert take(workers[1], 1) == [EngineReady({"last": True})]
        assert first.step_id == 3 and first.stream_ids.tolist() == [5, 6] and first.tokens.tolist() == [0, 2]
        assert third.tokens.tolist() == [1, 3]
        assert workers[0].recv() == [] and workers[2].recv() == []


@KINDS
def test_relay_reaches_every_worker(kind, tmp_path):
    with channel(kind, tmp_path, 2) as (engine, workers):
        workers[1].send(Control(9, "relay", {"op": "abort", "rid": "x"}))
        workers[1].send(Control(10, "relay", {}))
        workers[1].send(Control(11, "ping"))
        assert take(engine, 1) == [(1, Control(11, "ping"))]
        asked = Control(9, "abort", {"op": "abort", "rid": "x"})
        assert take(workers[0], 1) == [asked]
        assert take(workers[1], 3) == [
            asked,
            ControlReply(9, True),
            ControlReply(10, False, {"message": "relay needs an op"}),
        ]


@KINDS
@pytest.mark.parametrize("uvloop", [False, True])
def test_event_loop_gets_everything(kind, uvloop, tmp_path):
    """A sender in another thread, bursts and pauses: nothing is lost to the edge-triggered descriptor."""
    total = 3000

    async def receive(worker):
        got, done = [], asyncio.Event()

        def on_messages(messages):
            assert messages
            got.extend(messages)
            if len(got) >= total:
                done.set()

        worker.attach(asyncio.get_running_loop(), on_messages)
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        return got

    with channel(kind, tmp_path, 1) as (engine, workers):

        def send():
            for i in range(total):
                engine.send(0, ControlReply(i, True))
                if i % 100 == 0:
                    threading.Event().wait(0.001)

        engine.send(0, ControlReply(-1, True))  # before the reader is there
        sender = threading.Thread(target=send)
        sender.start()
        run = __import__("uvloop").run if uvloop else asyncio.run
        got = run(receive(workers[0]))
        sender.join()
        assert [m.id for m in got] == list(range(-1, len(got) - 1)) and len(got) >= total


def test_engine_may_speak_before_the_worker_is_there(tmp_path):
    engine = EngineChannel(str(tmp_path), 1)
    engine.send(0, EngineReady({"pid": 1}))
    worker = WorkerChannel(str(tmp_path), 0)
    assert take(worker, 1) == [EngineReady({"pid": 1})]
    worker.close()
    engine.close()


def test_garbage_is_dropped_and_the_rest_goes_on(tmp_path, caplog):
    with channel("ipc", tmp_path, 1) as (engine, workers):
        context = zmq.Context()
        for name in ("engine", "worker-0"):
            push = context.socket(zmq.PUSH)
            push.connect(f"ipc://{tmp_path}/{name}.ipc")
            for frames in ([b""], [b"garbage"], [b"\x09", b"\xc1", b"x"], [b"\0" * 4, b"\x80"]):
                push.send_multipart(frames)
            push.close(linger=60_000)
        context.term()
        workers[0].send(Abort((1,)))
        engine.send(0, ControlReply(1, True))
        got_engine, got_worker = [], []

        def is_all() -> bool:
            got_engine.extend(engine.recv(10))
            got_worker.extend(workers[0].recv(10))
            return len(caplog.records) == 8 and bool(got_engine) and bool(got_worker)

        wait_until(is_all, "both messages, and what is said of the others")
        assert got_engine == [(0, Abort((1,)))]
        assert got_worker == [ControlReply(1, True)]
    assert "dropped a message" in caplog.text


def test_path_too_long_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="too long"):
        EngineChannel(str(tmp_path / ("x" * 120)), 1)
    with pytest.raises(ConfigError, match="cannot open"):
        WorkerChannel(str(tmp_path / "missing"), 0)


def test_a_new_worker_says_hello_and_an_ended_one_is_heard_no_more(tmp_path, caplog):
    engine = EngineChannel(str(tmp_path), 2)
    launcher = LauncherChannel(str(tmp_path))
    old, other = (WorkerChannel(str(tmp_path), i) for i in range(2))
    ends = [engine, launcher, old, other]
    try:
        old.send(Abort((1,)))
        assert take(engine, 1) == [(0, Abort((1,)))]
        launcher.worker_ended(0)
        ((_, message),) = take(engine, 1)
        assert message == Control(0, "worker_ended", {"worker": 0})
        engine.send(0, EngineReady({}))  # to nobody, which is no error
        old.send(Abort((2,)))  # was still under way
        new = WorkerChannel(str(tmp_path), 2)
        ends.append(new)
        new.send(Abort((3,)))  # unknown as yet
        new.send(Control(0, "hello"))
        new.send(Abort((4,)))
        got = []
        while len(got) < 2:  # a wait may end with what is dropped alone
            got += engine.recv(60_000)
        assert got == [(2, Control(0, "hello")), (2, Abort((4,)))]
        engine.send_outputs(outputs([1, 1 << WORKER_SHIFT | 1, 2 << WORKER_SHIFT | 7]))
        assert [m.stream_ids.tolist() for m in take(new, 1)] == [[2 << WORKER_SHIFT | 7]]
        assert [m.stream_ids.tolist() for m in take(other, 1)] == [[1 << WORKER_SHIFT | 1]]
        new.send(Control(3, "relay", {"op": "abort"}))
        heard = []

        def is_heard() -> bool:
            assert engine.recv(10) == []
            heard.extend(other.recv())
            return bool(heard)

        wait_until(is_heard, "the relayed order")
        assert heard == [Control(3, "abort", {"op": "abort"})] and len(take(new, 2)) == 2
        assert old.recv(50) == [] and "no worker has number 2" in caplog.text
    finally:
        for end in ends:
            end.close()


def test_workers_greet_when_they_attach(tmp_path):
    engine = EngineChannel(str(tmp_path), 1)
    worker = WorkerChannel(str(tmp_path), 5)

    async def attach():
        worker.attach(asyncio.get_running_loop(), lambda messages: None)

    asyncio.run(attach())
    assert take(engine, 1) == [(5, Control(0, "hello"))]
    worker.close()
    engine.close()


def test_the_launchers_number_is_good_for_nothing_else(tmp_path, caplog):
    engine = EngineChannel(str(tmp_path), 1)

    def is_told(text: str, count: int) -> bool:
        assert engine.recv(10) == []
        return caplog.text.count(text) == count

    messages = (Abort((1,)), Control(1, "ping"), Control(0, "worker_ended", {"worker": "all"}))
    for count, message in enumerate(messages, 1):
        launcher = LauncherChannel(str(tmp_path))
        launcher._push.send_multipart([b"\xff" * 4, *encode(message)])
        wait_until(partial(is_told, "the launcher sends nothing of this kind", count), "a refusal")
        launcher.close()
    worker = WorkerChannel(str(tmp_path), 0)
    worker.send(Control(0, "worker_ended", {"worker": 0}))
    wait_until(partial(is_told, "the launcher alone knows", 1), "a refusal")
    worker.send(Abort((1,)))
    assert take(engine, 1) == [(0, Abort((1,)))]
    worker.close()
    engine.close()
