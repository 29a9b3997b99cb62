"""The dispatcher: walks each step's arrays once and writes every stream's bytes itself.

No task, queue or event per stream. What comes while a client's buffer is full is joined into its next chunk;
what comes in several messages at once, or while earlier ones are worked on, is joined per stream before it is
written. Text is never lost or reordered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from phalanx.core.errors import RequestError
from phalanx.core.step import Finish, StepOutputs, TokenLogprobs
from phalanx.server.backlog import Backlog, joined
from phalanx.server.errors import error_event
from phalanx.server.lanes import SilentLane
from phalanx.server.latencies import Latencies
from phalanx.server.logprobs import MAX_ENTRIES, Positions, record, too_many
from phalanx.server.pace import Pace
from phalanx.server.response import encode_json
from phalanx.server.sessions import Call, OutputStream
from phalanx.server.worker_metrics import WorkerMetrics
from phalanx.text.output import FinishReason

logger = logging.getLogger(__name__)

_MANY_STREAMS = 128  # a call with more is answered in slices
_SLICE_S = 0.02
_ENTRIES_PER_TOKEN = 8192  # repeated log-probabilities that an event may hold for each of its new tokens
_LANE_WRITES = 64  # tokens that take the short way between two looks at the clock: about half a millisecond


class Dispatcher:
    """Owns the running streams of one worker.

    Args:
        abort: ends streams in the engine.
        stream_interval: a chunk carries at least this many tokens, the first and last excepted.
        metrics: where ends and latencies are counted.

    Attributes:
        latencies: of its streams.
        num_events: chunks of streams written so far. num_coalesced: tokens that shared their chunk with an
            earlier one, since the client or this worker did not keep up or the interval is above 1.
        num_stalled: calls ended since their clients read nothing.
    """

    def __init__(
        self,
        *,
        abort: Callable[[list[int]], None],
        stream_interval: int = 1,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self._abort = abort
        self._metrics = metrics or WorkerMetrics()
        self.latencies = Latencies(self._metrics)
        self._interval = stream_interval
        self._streams: dict[int, OutputStream] = {}
        self._backlog = Backlog()
        self._work: Iterator[None] | None = None
        self.num_events = 0
        self.num_coalesced = 0
        self.num_stalled = 0

    @property
    def num_streams(self) -> int:
        """Sequences that are running or queued."""
        return len(self._streams)

    def is_running(self, stream: OutputStream) -> bool:
        """Whether the stream is registered and has not ended."""
        return stream.stream_id in self._streams

    def register(self, call: Call) -> None:
        """Take on a call whose streams are complete."""
        call.num_open = len(call.streams)
        call.response.on_writable = lambda: self._flush(call)
        for stream in call.streams:
            self._streams[stream.stream_id] = stream
            if not call.is_stream and stream.text.is_plain:
                stream.lane = SilentLane(stream.text)
        self.latencies.began([s.stream_id for s in call.streams], call.response.received_s)

    def drop(self, call: Call, cause: str = "disconnect") -> None:
        """The client is gone or answered: end what still runs. cause: why it does, for the metrics."""
        num_ended = self._release([s for s in call.streams if s.finish is None])
        self._metrics.aborted("stalled" if call.response.stalled else cause, num_ended)
        call.response.ended = True
        self.num_stalled += call.response.stalled
        if call.answering is not None:
            call.answering.cancel()
            call.answering = None
        # Call, streams and response know each other; without these ties they go without the collector.
        call.response.on_writable = None
        for stream in call.streams:
            stream.lane = None
        call.streams.clear()

    def _release(self, streams: Iterable[OutputStream]) -> int:
        """Forget streams and end them in the engine; returns how many of them were running."""
        ids = [s.stream_id for s in streams if self._streams.pop(s.stream_id, None) is not None]
        if ids:
            self._abort(ids)
            for stream_id in ids:
                self.latencies.ended(stream_id, None)
        return len(ids)

    def abort_matching(self, rid: str | None) -> None:
        """End the streams that `rid` names, alone or with others (None: all), and tell their clients."""
        self._catch_up()
        for stream in list(self._streams.values()):
            if stream.finish is None and (
                rid is None or rid in (stream.rid, stream.prompt_rid, stream.call.rid)
            ):
                self._release([stream])
                self._metrics.aborted("request")
                self._advance(stream, [], Finish.ABORT)

    def fail(self, stream_id: int, status: int, message: str) -> None:
        """End one stream with an error, if it still runs."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.error = (status, message)
            self._guarded(stream, [], Finish.ERROR)

    def fail_all(self, status: int, message: str, cause: str = "engine_lost") -> None:
        """End every stream with an error. cause: why, for the metrics."""
        self._catch_up()
        self._metrics.aborted(cause, len(self._streams))
        for stream in list(self._streams.values()):
            self.fail(stream.stream_id, status, message)

    def on_outputs(self, steps: list[StepOutputs]) -> None:
        """Take the steps that have come, oldest first; what takes long goes on in later turns of the loop."""
        self._backlog.add(steps)
        if self._work is None:
            self._work = self._work_off()
            self._resume()

    def _resume(self) -> None:
        """Work for one slice of time."""
        if self._work is None:
            return
        end_s = time.monotonic() + _SLICE_S
        try:
            for _ in self._work:
                if time.monotonic() >= end_s:
                    asyncio.get_running_loop().call_soon(self._resume)
                    return
        except Exception:
            self._work = None
            raise
        self._work = None

    def _catch_up(self) -> None:
        """Work off all that has come."""
        if self._work is not None:
            for _ in self._work:
                pass
            self._work = None

    def _work_off(self) -> Iterator[None]:
        """Write what the steps that have come say; pauses after each stream."""
        find = self._streams.get
        while self._backlog:
            steps = self._backlog.take()
            self._note(steps)
            if len(steps) == 1:
                yield from self._tell(steps[0])
            else:
                for stream_id, ids, finish in joined(steps):
                    stream = find(stream_id)
                    if stream is not None:
                        self._guarded(stream, ids, finish)
                        yield
            for step in steps:
                for stream_id, _, _ in step.errors:
                    if stream_id in self._streams:  # an error without a row of its own
                        self._guarded(self._streams[stream_id], [], Finish.ERROR)

    def _tell(self, step: StepOutputs) -> Iterator[None]:
        """Write one step; pauses as `_work_off` does."""
        find = self._streams.get
        num_quick = num_events = 0
        for stream_id, token, finish in zip(
            step.stream_ids.tolist(), step.tokens.tolist(), step.finish.tolist(), strict=True
        ):
            stream = find(stream_id)
            if stream is None:
                continue
            if stream.lane is not None and not finish and token >= 0:
                try:
                    written = stream.lane.write(token)
                except Exception:
                    self._fault(stream)
                    continue
                if written >= 0:
                    num_events += written
                    num_quick += 1
                    if num_quick % _LANE_WRITES == 0:
                        yield
                    continue
            self._guarded(stream, [token] if token >= 0 else [], finish)
            yield
        self.num_events += num_events

    def _note(self, steps: list[StepOutputs]) -> None:
        """Take the time; put errors and log-probabilities where streams find them when they are told."""
        self.latencies.note(steps)
        for step in steps:
            for stream_id, status, message in step.errors:
                if stream_id in self._streams:
                    self._streams[stream_id].error = (status, message)
            if step.logprobs is not None:
                self._record(step, step.logprobs, is_prompt=False)
            if step.prompt_logprobs is not None:
                self._record(step, step.prompt_logprobs, is_prompt=True)

    def _record(self, step: StepOutputs, logprobs: TokenLogprobs, *, is_prompt: bool) -> None:
        stream_ids = step.stream_ids.tolist()
        excessive: set[int] = set()

        def find(row: int) -> Positions | None:
            stream = self._streams.get(stream_ids[row])
            if stream is None or stream.logprobs is None or stream.request.logprobs is None:
                return None
            wanted, log = stream.request.logprobs, stream.logprobs
            num_entries = 1 + wanted.top_k + len(wanted.token_ids)
            log.num_entries += num_entries
            stream.call.num_logprobs += num_entries
            if stream.call.num_logprobs > MAX_ENTRIES:
                excessive.add(stream.stream_id)
                return None
            return log.prompt if is_prompt else log.output

        record(logprobs, find)
        for stream_id in excessive:
            self._end_excessive(stream_id)

    def _end_excessive(self, stream_id: int) -> None:
        """End a stream whose request has more log-probabilities than one answer may hold."""
        stream = self._streams.get(stream_id)
        if stream is not None:  # else it went with a stream of the same request
            self._release([stream])
            stream.error = (400, too_many(stream.call.num_logprobs).message)
            self._guarded(stream, [], Finish.ERROR)

    def _guarded(self, stream: OutputStream, ids: list[int], finish: int) -> None:
        """A fault in one stream ends that stream alone."""
        try:
            self._advance(stream, ids, finish)
        except Exception:
            self._fault(stream)

    def _fault(self, stream: OutputStream) -> None:
        logger.exception("stream %d failed", stream.stream_id)
        self._release([stream])
        stream.error = stream.error or (500, "internal error")
        if stream.finish is None:
            self._metrics.ended("error")
        stream.finish = FinishReason("error")
        self._fail_call(stream.call, stream)

    def _advance(self, stream: OutputStream, ids: list[int], finish: int) -> None:
        delta = stream.text.push(ids, finish)
        call = stream.call
        if delta.finish_reason is not None:
            self._end(stream, delta.finish_reason, finish)
        if not call.is_stream:
            if stream.finish is not None:
                self._finish_whole(call, stream)
            return
        if delta.text:
            stream.unsent_text += delta.text
        interval = self._interval_of(stream)
        if stream.finish is None and stream.has_started and interval > 1:
            if len(stream.text.output_ids) - stream.num_sent < interval:
                return
        if call.response.blocked:
            call.waiting[stream.index] = stream
        else:
            self._write(call, (stream,))

    def _interval_of(self, stream: OutputStream) -> int:
        interval = stream.interval or self._interval
        if stream.logprobs is not None and stream.call.form.repeats_logprobs:
            # Megabytes again for each token would hold up all others.
            interval = max(interval, stream.logprobs.num_entries // _ENTRIES_PER_TOKEN)
        return interval

    def _end(self, stream: OutputStream, reason: FinishReason, finish: int) -> None:
        stream.finish = reason
        stream.call.num_open -= 1
        if stream.logprobs is not None:  # tokens past a stop string leave none behind
            stream.logprobs.output.truncate(stream.num_output_tokens)
        is_whole = reason.kind in ("stop", "length")
        if is_whole:  # by a stop string among tokens that came together with a failure
            stream.error = None
        self._metrics.ended("error" if stream.error is not None else reason.kind)
        self.latencies.ended(stream.stream_id, stream.call.response.received_s if is_whole else None)
        if finish == Finish.NONE:  # found here, by a stop string: the engine does not know yet
            self._release([stream])
        elif self._streams.pop(stream.stream_id, None) is not None:
            # The engine did it. With an error it was no pause: it refused the request, or counts it itself.
            if reason.kind == "abort" and stream.error is None:
                self._metrics.aborted("pause")

    def _finish_whole(self, call: Call, stream: OutputStream) -> None:
        alone = len(call.streams) == 1 or call.form.fails_whole
        if stream.error is not None and alone:
            self._fail_call(call, stream)
        elif call.num_open == 0 and len(call.streams) <= _MANY_STREAMS:
            call.response.write_whole(200, b"".join(call.form.whole(call)))
        elif call.num_open == 0:
            call.answering = asyncio.get_running_loop().create_task(_answer_in_slices(call))

    def _write(self, call: Call, streams: Iterable[OutputStream]) -> None:
        """One write for everything that these streams have to say."""
        parts = []
        for stream in streams:
            if stream.error is not None and stream.finish is not None:
                if len(call.streams) == 1 or call.form.fails_whole:
                    self._fail_call(call, stream)
                    return
            num_new = stream.num_output_tokens - stream.num_sent
            part = call.form.chunk(stream)
            if part:
                parts.append(part)
                stream.has_started = True
                self.num_events += 1
                self.num_coalesced += max(num_new - 1, 0)
                if stream.lane is None and stream.text.is_plain and self._interval_of(stream) == 1:
                    stream.lane = call.form.lane(stream)
        is_last = call.num_open == 0 and not call.waiting
        if is_last:
            parts.append(call.form.tail(call))
        if parts:
            call.response.write_event(b"".join(parts), more=not is_last)

    def _flush(self, call: Call) -> None:
        """The client can take more: as much of what waits as it takes."""
        while call.waiting and not (call.response.blocked or call.response.ended):
            first = list(islice(call.waiting, _MANY_STREAMS))
            self._write(call, [call.waiting.pop(index) for index in first])

    def _fail_call(self, call: Call, stream: OutputStream) -> None:
        """Answer with the error of one stream and end the others."""
        self._release([s for s in call.streams if s.finish is None])
        status, message = stream.error or (500, "internal error")
        if not call.response.started:
            call.response.write_error(RequestError(message, status=status))
        elif not call.response.blocked:
            # No [DONE] after it: a client that looks for nothing else must not take this for success.
            event = b"data: " + encode_json(error_event(status, message)) + b"\n\n"
            call.response.write_event(event, more=False)
        else:
            call.waiting[stream.index] = stream


async def _answer_in_slices(call: Call) -> None:
    """Write the whole answer of many sequences without holding up the event loop."""
    pace = Pace()
    parts = []
    try:
        for part in call.form.whole(call):
            parts.append(part)
            await pace.breathe()
    except Exception:
        logger.exception("an answer could not be written")
        call.response.write_error(RequestError("internal error", status=500))
    else:
        call.response.write_whole(200, b"".join(parts))
