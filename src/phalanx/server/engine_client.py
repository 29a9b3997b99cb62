"""The worker's view of the engine: requests out, outputs in, questions answered, and whether it lives."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import Callable
from typing import Any

from phalanx.core.errors import RequestError
from phalanx.core.request import EngineRequest
from phalanx.core.step import StepOutputs
from phalanx.messages import Abort, Control, ControlReply, EngineReady, Message, MessageError, Submit
from phalanx.runtime.channels import WorkerEnd

logger = logging.getLogger(__name__)

_PING_S = 1.0
_SPARE_PINGS = 10


class EngineClient:
    """One per worker process.

    Args:
        channel: the worker's end.
        on_outputs: takes the steps that have come, oldest first.
        on_death: takes the reason, once.
        on_unsent: takes (stream id, HTTP status, message) of a request that cannot be sent.
        on_control: takes orders relayed from other workers.
        on_ready: takes the engine's facts.
        silence_s: an engine that answers no ping for longer is dead; 0 for never. Its own watchdog ends it
            sooner, unless the whole process is stopped.
    """

    def __init__(
        self,
        channel: WorkerEnd,
        *,
        on_outputs: Callable[[list[StepOutputs]], None],
        on_death: Callable[[str], None],
        on_unsent: Callable[[int, int, str], None],
        on_control: Callable[[Control], None],
        on_ready: Callable[[dict[str, Any]], None],
        silence_s: float = 0.0,
    ) -> None:
        self._channel = channel
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_unsent = on_unsent
        self._on_control = on_control
        self._on_ready = on_ready
        # A step may last long (a big prompt on a CPU): silence alone means death only late. The engine's
        # process is watched besides, and its death is noticed at once.
        self._max_silent_pings = silence_s / _PING_S + _SPARE_PINGS if silence_s else math.inf
        self._submits: list[EngineRequest] = []
        self._aborts: list[int] = []
        self._asked: dict[int, asyncio.Future[ControlReply]] = {}
        self._ids = itertools.count(1)
        self._silent_pings = 0
        self._pidfd: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.is_ready = False
        self.death: str | None = None

    def start(self) -> None:
        """Begin to listen; needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._channel.attach(self._loop, self._on_messages)
        self._tasks.append(self._loop.create_task(self._ping()))

    def close(self) -> None:
        """Stop listening; what is unsent is sent."""
        for task in self._tasks:
            task.cancel()
        self._flush()
        self._unwatch()
        self._channel.close()

    @property
    def is_settled(self) -> bool:
        """Whether the engine is ready or dead, and not merely unheard of."""
        return self.is_ready or self.death is not None

    def require_alive(self) -> None:
        """Raise a 503 unless the engine can take requests."""
        if self.death is not None:
            raise RequestError(self.death, status=503, code="engine_dead")
        if not self.is_ready:
            raise RequestError("the model is still loading", status=503, code="loading")

    def submit(self, requests: list[EngineRequest]) -> None:
        """Send requests; those of one turn of the event loop go as one message."""
        self._schedule_flush()
        self._submits += requests

    def abort(self, stream_ids: list[int]) -> None:
        """End streams in the engine."""
        self._schedule_flush()
        self._aborts += stream_ids

    def _schedule_flush(self) -> None:
        if not self._submits and not self._aborts:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        submits, self._submits = self._submits, []
        aborts, self._aborts = self._aborts, []
        try:
            if submits:
                self._send(submits)
        finally:
            if aborts:  # after the submissions: a request may come and go within one turn
                self._channel.send(Abort(tuple(aborts)))

    def _send(self, requests: list[EngineRequest]) -> None:
        """Send requests in one message; if that cannot be, all but those that are to blame, in order."""
        try:
            self._channel.send(Submit(tuple(requests)))
            return
        except Exception as error:
            failure = error
        if len(requests) > 1:
            middle = len(requests) // 2
            self._send(requests[:middle])
            self._send(requests[middle:])
            return
        # A value that no message can hold came with the request; all else is this worker's own doing.
        is_clients = isinstance(failure, MessageError) and not isinstance(failure.__cause__, TypeError)
        logger.error("request %d was not sent: %s", requests[0].stream_id, failure)
        message = f"the request cannot be sent: {failure}" if is_clients else "internal error"
        self._on_unsent(requests[0].stream_id, 400 if is_clients else 500, message)

    async def control(
        self, op: str, args: dict[str, Any] | None = None, timeout_s: float | None = 10.0
    ) -> ControlReply:
        """Ask the engine. timeout_s: None waits as long as it lives.

        Raises:
            RequestError: 503 if it is not there or does not answer in time.
        """
        self.require_alive()
        number = next(self._ids)
        future: asyncio.Future[ControlReply] = self._loop.create_future()
        self._asked[number] = future
        self._channel.send(Control(number, op, args or {}))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RequestError(f"the engine did not answer within {timeout_s:g} s", status=503) from None
        finally:
            del self._asked[number]

    def _on_messages(self, messages: list[Message]) -> None:
        self._silent_pings = 0
        outputs = [m for m in messages if isinstance(m, StepOutputs)]
        for message in messages:
            if isinstance(message, ControlReply):
                future = self._asked.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)
            elif isinstance(message, EngineReady):
                self._become_ready(message.info)
            elif isinstance(message, Control):
                self._on_control(message)
        if outputs:
            self._on_outputs(outputs)

    def _become_ready(self, info: dict[str, Any]) -> None:
        self._on_ready(info)
        self.is_ready = True
        pid = info.get("pid")
        if not isinstance(pid, int) or self._pidfd is not None:
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._die("the engine process has ended")
        except (OSError, AttributeError) as error:  # an old kernel, or not Linux: the pings remain
            logger.warning("cannot watch the engine process (%s)", error)
        else:
            self._loop.add_reader(self._pidfd, self._die, "the engine process has ended")

    async def _ping(self) -> None:
        while self.death is None:
            await asyncio.sleep(_PING_S)
            if not self.is_ready:
                continue
            # Counted in own turns, not by the clock: a worker that was stopped itself blames nobody.
            self._silent_pings += 1
            if self._silent_pings > self._max_silent_pings:
                self._die("the engine does not answer")
            else:
                self._channel.send(Control(0, "ping"))

    def _die(self, reason: str) -> None:
        self._unwatch()
        if self.death is not None:
            return
        self.death = reason
        logger.error("%s", reason)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(RequestError(reason, status=503, code="engine_dead"))
        self._on_death(reason)

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
