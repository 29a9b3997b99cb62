"""The engine process: `python -m phalanx.runtime.engine_process`, started by `launch`.

One loop: take what the API workers sent, run a step, send each worker its arrays. Tokens are never waited for
by anyone else; a worker that does not read cannot slow it (its pipe is unbounded). One that was not heard of
for half a minute has its sequences ended, so that what waits in its pipe does not grow for ever.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from phalanx.config.groups import Settings
from phalanx.core.errors import PhalanxError, RequestError
from phalanx.core.request import WORKER_SHIFT, EngineRequest
from phalanx.core.step import Finish, StepOutputs
from phalanx.messages import Abort, Control, ControlReply, EngineReady, Message, Submit
from phalanx.runtime.build import build_worker
from phalanx.runtime.channels import EngineChannel
from phalanx.runtime.collector import IdleCollector, settle_heap
from phalanx.runtime.heartbeat import ENGINE_BEAT, Heartbeat, SilentWorkers
from phalanx.runtime.process import die_with_parent, setup_logging, show_stacks_on_signal, tame_libraries
from phalanx.runtime.profiling import StepProfiler
from phalanx.runtime.progress import ProgressLog
from phalanx.runtime.rids import RidRegistry
from phalanx.runtime.watchdog import Watchdog
from phalanx.runtime.worker import Worker

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "in_place")
_IDLE_WAIT_MS = 100
_SILENCE_S = 30.0  # as long as a client may read nothing


class EngineLoop:
    """Serves the channel until told to stop. on_look: see Watchdog."""

    def __init__(
        self,
        worker: Worker,
        channel: EngineChannel,
        settings: Settings,
        info: dict[str, Any],
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._settings = settings
        self._info = {**info, "pid": os.getpid(), "started_at_s": time.time()}
        self._stop = threading.Event()
        self._progress = ProgressLog()
        self._rids = RidRegistry()
        self._paused = False
        self._awaited = set(range(settings.server.api_workers))
        self._greeted: list[int] = []
        self._num_lost = 0  # sequences that ended with their API worker
        self._profiler = StepProfiler(settings.engine.device)
        self._collector = IdleCollector()
        self._watchdog = Watchdog(settings.server.watchdog_timeout_s, on_look)
        self._silent = SilentWorkers(_SILENCE_S)

    def stop(self) -> None:
        """End the loop after the step in hand."""
        self._stop.set()

    def run(self) -> None:
        """Serve every API worker that says hello."""
        while not self._stop.is_set():
            self._watchdog.alive()
            busy = self._worker.busy and not self._paused
            self._take(self._channel.recv(0 if busy else _IDLE_WAIT_MS))
            for silent in self._silent.look():
                self._lose(silent, "does not answer")
            if self._worker.busy and not self._paused:
                self._send(self._worker.step())
                self._worker.sent()
                self._collector.worked()
                if self._profiler.is_due(self._worker.num_steps):
                    self._profile("", {})
                if self._progress.due:
                    self._progress.log(self._worker.stats())
            else:
                self._collector.idle()
        self._watchdog.close()
        self._profiler.close()

    def _take(self, messages: list[tuple[int, Message]]) -> None:
        """Handle what has come together."""
        late: list[EngineRequest] = []
        self._silent.heard(worker_id for worker_id, _ in messages)
        for worker_id, message in messages:
            if isinstance(message, Submit):
                late += [request for request in message.requests if not self._add(request)]
            elif isinstance(message, Abort):
                self._abort(message.stream_ids)
            elif isinstance(message, Control):
                self._answer(worker_id, message)
            else:
                logger.error("ignored a message of type %s", type(message).__name__)
        for request in late:
            # The end of the request that had the name may have come in the same batch, after this one.
            if not self._add(request):
                self._refuse(request, RequestError(f"the request id {request.rid!r} is in use", param="rid"))

    def _add(self, request: EngineRequest) -> bool:
        """Queue a request or refuse it; False if another one has its name."""
        if not self._rids.claim(request):
            return False
        try:
            self._worker.add(request)
        except RequestError as error:
            self._rids.release([request.stream_id])
            self._refuse(request, error)
        return True

    def _refuse(self, request: EngineRequest, error: RequestError) -> None:
        self._channel.send_outputs(_refusal(request.stream_id, error))

    def _abort(self, stream_ids: Iterable[int], error: RequestError | None = None) -> None:
        """End these streams. error: why, if it was nobody's wish."""
        self._worker.abort(stream_ids)
        ends = self._worker.pending_outputs()
        if ends is not None and error is not None:
            errors = tuple((stream_id, error.status, error.message) for stream_id in ends.stream_ids.tolist())
            ends = replace(ends, errors=errors)
        if ends is not None:
            self._send([ends])

    def _send(self, steps: list[StepOutputs]) -> None:
        for outputs in steps:
            self._rids.on_outputs(outputs)
            self._channel.send_outputs(outputs)

    def _answer(self, worker_id: int, message: Control) -> None:
        if message.op == "worker_ended":  # from the launcher, which waits for no answer
            ended = message.args["worker"]
            self._silent.ended(ended)
            self._silent.ended(worker_id)  # the launcher sends no pings
            self._lose(ended, "has ended")
            self._greet(ended)
            return
        if message.op == "hello":
            self._greet(worker_id)
        ok, data = self._control(message)
        self._channel.send(worker_id, ControlReply(id=message.id, ok=ok, data=data))

    def _lose(self, worker_id: int, why: str) -> None:
        streams = [s for s in self._worker.scheduler.stream_ids() if s >> WORKER_SHIFT == worker_id]
        level = logging.WARNING if streams else logging.INFO  # one that was told to end has finished all
        logger.log(level, "API worker %d %s: aborting its %d sequences", worker_id, why, len(streams))
        self._num_lost += len(streams)
        # With an error: should it go on, its clients must not take what they have for a whole answer.
        self._abort(streams, RequestError("the API worker did not answer for too long", status=503))

    def _greet(self, worker_id: int) -> None:
        """Tell a worker that the engine is ready; all of the first ones at once, when the last is there.

        Else the server would be ready on a connection that one worker took, and loading on the next one.
        """
        self._greeted.append(worker_id)
        self._awaited.discard(worker_id)
        if self._awaited:
            return
        for greeted in self._greeted:
            self._channel.send(greeted, EngineReady(info=self._info))
        self._greeted.clear()

    def _control(self, message: Control) -> tuple[bool, dict[str, Any]]:
        op = message.op
        if op in ("hello", "ping"):
            return True, {}
        if op == "pause":
            return self._pause(message.args.get("mode"))
        if op == "continue":
            self._paused = False
            return True, {}
        if op == "stats":
            own = {
                "paused": self._paused,
                "aborted_worker_lost_total": self._num_lost,
                "cpu_seconds_total": time.process_time(),
            }
            return True, {**self._worker.stats(), **own}
        if op == "flush_cache":
            if self._worker.busy:
                return False, {"message": "requests are running or queued"}
            return True, {}
        if op in ("start_profile", "stop_profile"):
            return self._profile(op, message.args)
        return False, {"message": f"unknown operation {op!r}"}

    def _profile(self, op: str, args: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Begin or end a profile, by order or because its step has come, with no step in flight."""
        self._send(self._worker.drain())
        try:
            if op == "start_profile":
                self._profiler.start(args, self._worker.num_steps)
            elif op == "stop_profile":
                self._profiler.stop()
            else:
                self._profiler.proceed()
        except RequestError as error:
            return False, {name: getattr(error, name) for name in ("message", "status", "param", "code")}
        return True, {}

    def _pause(self, mode: object) -> tuple[bool, dict[str, Any]]:
        """Run no step until "continue"; requests that come meanwhile are queued."""
        if mode not in PAUSE_MODES:
            return False, {"message": f"unknown mode {mode!r}"}
        self._paused = True
        self._send(self._worker.drain())
        if mode == "abort":
            self._abort(self._worker.scheduler.stream_ids())
        return True, {}


def _refusal(stream_id: int, error: RequestError) -> StepOutputs:
    """The end message of a request that the scheduler refused."""
    return StepOutputs(
        step_id=-1,
        stream_ids=np.array([stream_id], np.int64),
        tokens=np.array([-1], np.int32),
        finish=np.array([Finish.ABORT], np.uint8),
        errors=((stream_id, error.status, error.message),),
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit code 0 after SIGTERM, 2 if the model cannot be loaded, 1 after a failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--ipc-dir", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(args.parent_pid)
    tame_libraries()
    settings = msgspec.json.decode(args.settings.read_bytes(), type=Settings)
    setup_logging(settings.server.log_level, "engine")
    try:
        channel = EngineChannel(str(args.ipc_dir), settings.server.api_workers)
        worker, info = build_worker(settings, progress=sys.stderr.isatty())
    except PhalanxError as error:
        print(f"phalanx: error: {error}", file=sys.stderr)
        return 2
    show_stacks_on_signal()
    loop = EngineLoop(worker, channel, settings, info, Heartbeat(args.ipc_dir, ENGINE_BEAT).beat)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the launcher decides
    settle_heap()
    loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
