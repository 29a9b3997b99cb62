"""The engine process: `python -m phalanx.runtime.engine_process`, started by `launch`.

One loop: take what the API workers sent, run a step, send each worker its arrays. Tokens are never waited for
by anyone else; a worker that does not read cannot slow it (its pipe is unbounded).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from phalanx.config.groups import Settings
from phalanx.core.errors import PhalanxError, RequestError
from phalanx.core.step import Finish, StepOutputs
from phalanx.messages import Abort, Control, ControlReply, EngineReady, Submit
from phalanx.runtime.build import build_worker
from phalanx.runtime.channels import EngineChannel
from phalanx.runtime.process import die_with_parent, setup_logging, tame_libraries
from phalanx.runtime.progress import ProgressLog
from phalanx.runtime.worker import Worker

logger = logging.getLogger(__name__)

_IDLE_WAIT_MS = 100
_COLLECT_AFTER_IDLE_S = 1.0


class EngineLoop:
    """Serves the channel until told to stop."""

    def __init__(
        self, worker: Worker, channel: EngineChannel, settings: Settings, info: dict[str, Any]
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._settings = settings
        self._info = {**info, "pid": os.getpid()}
        self._stop = threading.Event()
        self._progress = ProgressLog()
        self._last_work = time.monotonic()
        self._collected = True

    def stop(self) -> None:
        """End the loop after the step in hand."""
        self._stop.set()

    def run(self) -> None:
        """Announce readiness to every API worker, then serve."""
        for worker_id in range(self._settings.server.api_workers):
            self._channel.send(worker_id, EngineReady(info=self._info))
        while not self._stop.is_set():
            timeout_ms = 0 if self._worker.busy else _IDLE_WAIT_MS
            for worker_id, message in self._channel.recv(timeout_ms):
                self._handle(worker_id, message)
            if self._worker.busy:
                for outputs in self._worker.step():
                    self._channel.send_outputs(outputs)
                self._last_work, self._collected = time.monotonic(), False
                if self._progress.due:
                    self._progress.log(self._worker.stats())
            elif not self._collected and time.monotonic() - self._last_work > _COLLECT_AFTER_IDLE_S:
                gc.collect()  # automatic collection is off: a full one takes 0.1 s and would stall a step
                self._collected = True

    def _handle(self, worker_id: int, message: Any) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                try:
                    self._worker.add(request)
                except RequestError as error:
                    self._channel.send_outputs(_refusal(request.stream_id, error))
        elif isinstance(message, Abort):
            self._worker.abort(message.stream_ids)
            ends = self._worker.pending_outputs()
            if ends is not None:
                self._channel.send_outputs(ends)
        elif isinstance(message, Control):
            ok, data = self._control(message.op)
            self._channel.send(worker_id, ControlReply(id=message.id, ok=ok, data=data))
        else:
            logger.error("ignored a message of type %s", type(message).__name__)

    def _control(self, op: str) -> tuple[bool, dict[str, Any]]:
        if op == "ping":
            return True, {}
        if op == "stats":
            return True, self._worker.stats()
        if op == "flush_cache":
            if self._worker.busy:
                return False, {"message": "requests are running or queued"}
            return True, {}
        return False, {"message": f"unknown operation {op!r}"}


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
    loop = EngineLoop(worker, channel, settings, info)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the launcher decides
    gc.collect()
    gc.freeze()
    gc.disable()
    loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
