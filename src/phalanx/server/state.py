"""What the routes of one worker share, made once at start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.config.groups import ServerConfig, Settings
from phalanx.core.errors import RequestError
from phalanx.core.request import WORKER_SHIFT
from phalanx.core.settle import Settler, end_tokens
from phalanx.messages import Control
from phalanx.runtime.channels import WorkerEnd
from phalanx.runtime.heartbeat import Heartbeat
from phalanx.server.engine_client import EngineClient
from phalanx.server.housekeeping import Histogram, Housekeeper
from phalanx.server.logprobs import TokenTexts
from phalanx.server.request_log import RequestLog
from phalanx.server.side_process import Job, SideProcess, SideSettings
from phalanx.server.stream import Dispatcher
from phalanx.server.worker_metrics import WorkerMetrics, metrics_path
from phalanx.text.detokenizer import Detokenizer
from phalanx.text.tokenizer import Tokenizer

T = TypeVar("T")

# Text of this size tokenizes in about a millisecond; more goes to a thread, so that streams do not wait.
INLINE_BYTES = 8192
# More is prepared in a process beside: JSON of ids holds the interpreter's lock for 14 to 22 ms a megabyte.
BIG_BYTES = 2**20
MAX_WAITING_BYTES = 2**30  # of requests that are or wait to be prepared there; more are refused
_GREETING_S, _GREETING_POLL_S = 10.0, 0.02


@dataclass(slots=True)
class ApiWorker:
    """The parts of one API worker.

    Attributes:
        worker_id: the process's number, in its stream ids; a successor of a dead worker has another.
        slot: its place, 0 to api_workers - 1, which its successor takes over.
        tokenizer, detokenizer: None with skip_tokenizer_init.
        request_log: None unless requests are logged.
        run_dir: where the workers' metrics files lie; None where this one counts in memory alone.
        started_at_s: when the server began to serve, the same in all its workers (seconds since 1970).
        side: where big requests are prepared; side_thread waits for it.
        num_side_bytes: of requests that are there or wait for it.
        is_draining: the server is about to end, and nothing but running sequences is waited for.
    """

    settings: Settings
    worker_id: int
    slot: int
    tokenizer: Tokenizer | None
    detokenizer: Detokenizer | None
    token_texts: TokenTexts
    settler: Settler
    engine: EngineClient
    dispatcher: Dispatcher
    threads: ThreadPoolExecutor
    side: SideProcess
    side_thread: ThreadPoolExecutor
    housekeeper: Housekeeper
    request_log: RequestLog | None
    started_at_s: float
    metrics: WorkerMetrics
    run_dir: Path | None = None
    next_stream: int = 0
    is_draining: bool = False
    num_side_bytes: int = 0

    def stream_ids(self, count: int) -> list[int]:
        """`count` new stream ids."""
        first = self.worker_id << WORKER_SHIFT | self.next_stream
        self.next_stream += count
        return list(range(first, first + count))

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, or a 400 if the server runs without one."""
        if self.tokenizer is None:
            raise RequestError(
                "this server runs with skip_tokenizer_init and knows no text: give token ids to /generate or "
                "/v1/completions",
                code="no_tokenizer",
            )
        return self.tokenizer

    async def offload(self, size_bytes: int, function: Callable[[], T]) -> T:
        """Call the function here if the input is small, else in a thread."""
        if size_bytes <= INLINE_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self.threads, function)

    async def prepare(self, size_bytes: int, job: Job[T]) -> T:
        """Call the job with the tokenizer: here, in a thread or in the side process, by the input's size.

        job: picklable, and so is what it returns; what it returns for a big input must be quick to unpickle.

        Raises:
            RequestError: what the job raises; 503 if too much waits for the side process, or it ended.
        """
        if size_bytes <= BIG_BYTES:
            return await self.offload(size_bytes, lambda: job(self.tokenizer))
        if self.num_side_bytes + size_bytes > MAX_WAITING_BYTES:
            raise RequestError("too many big requests wait to be read", status=503, code="busy")
        self.num_side_bytes += size_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(self.side_thread, self.side.call, job)
        finally:
            self.num_side_bytes -= size_bytes

    def check_model(self, model: str | None) -> None:
        """Raise a 404 unless `model` is what is served, "default" or not given."""
        served = self.settings.server.served_model_name
        if model not in (None, "", "default", served):
            raise RequestError(
                f"the model {model!r} does not exist; this server serves {served!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    @property
    def loop_lag_s(self) -> Histogram:
        """How late the event loop ran what was due, in seconds."""
        return self.housekeeper.loop_lag_s

    def publish_metrics(self) -> None:
        """Bring this worker's metrics up to date."""
        dispatcher = self.dispatcher
        dispatcher.latencies.flush()
        counts = (dispatcher.num_events, dispatcher.num_coalesced, dispatcher.num_stalled)
        self.metrics.publish(
            num_streams=dispatcher.num_streams,
            totals=(*counts, time.process_time()),
            lag=self.housekeeper.loop_lag_s,
        )

    async def start(self) -> None:
        """Listen to the engine. A dead worker's successor waits for its answer: no client meets a 503."""
        self.engine.start()
        self.housekeeper.start()
        deadline_s = time.monotonic() + _GREETING_S
        while self.worker_id != self.slot and not self.engine.is_settled and time.monotonic() < deadline_s:
            await asyncio.sleep(_GREETING_POLL_S)

    def close(self) -> None:
        """Stop threads and channel."""
        self.housekeeper.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.side_thread.shutdown(wait=False, cancel_futures=True)
        self.side.close()
        self.engine.close()


def _request_log(server: ServerConfig, tokenizer: Tokenizer | None) -> RequestLog | None:
    if server.log_requests_level is None:
        return None
    return RequestLog(server.log_requests_level, server.log_requests_format, tokenizer)


def _side_settings(settings: Settings, tokenizer: Tokenizer | None) -> SideSettings:
    return SideSettings(
        path=None if tokenizer is None else settings.source.tokenizer_path,
        vocab_size=settings.model.vocab_size,
        chat_template=settings.server.chat_template,
        log_level=settings.server.log_level,
    )


def build_api_worker(
    settings: Settings,
    worker_id: int,
    channel: WorkerEnd,
    tokenizer: Tokenizer | None,
    slot: int | None = None,
    run_dir: Path | None = None,
) -> ApiWorker:
    """Wire up one worker. slot: None where it is the worker's number. run_dir: see ApiWorker."""
    slot = worker_id if slot is None else slot
    metrics = WorkerMetrics(None if run_dir is None else metrics_path(run_dir, slot))
    eos = end_tokens(settings.model.eos_token_ids, () if tokenizer is None else tokenizer.eos_token_ids)
    settler = Settler(
        vocab_size=settings.model.vocab_size,
        context_length=settings.scheduler.context_length,
        eos_token_ids=eos,
        seed_source=settings.engine.random_seed,
        worker=worker_id,
    )
    dispatcher = Dispatcher(
        abort=lambda ids: engine.abort(ids),  # the engine client is made below: each knows the other
        stream_interval=settings.server.stream_interval,
        metrics=metrics,
    )

    def on_ready(info: dict[str, Any]) -> None:
        pool = info.get("max_request_tokens")
        if isinstance(pool, int):
            settler.max_request_tokens = pool
        worker.started_at_s = info.get("started_at_s", worker.started_at_s)

    def on_control(message: Control) -> None:
        if message.op == "abort":
            rid = None if message.args.get("abort_all") else message.args.get("rid")
            dispatcher.abort_matching(rid)

    engine = EngineClient(
        channel,
        on_outputs=dispatcher.on_outputs,
        on_death=lambda reason: dispatcher.fail_all(503, reason),
        on_unsent=dispatcher.fail,
        on_control=on_control,
        on_ready=on_ready,
        silence_s=settings.server.watchdog_timeout_s,
    )
    texts = TokenTexts(None)
    if tokenizer is not None:
        texts = TokenTexts(tokenizer.id_to_bytes, tokenizer.special_ids)
    heartbeat = None if run_dir is None else Heartbeat(run_dir, worker_id)

    def on_tick() -> None:
        worker.publish_metrics()
        if heartbeat is not None:
            heartbeat.beat()

    housekeeper = Housekeeper(
        is_idle=lambda: not dispatcher.num_streams,
        watchdog_timeout_s=settings.server.watchdog_timeout_s,
        on_tick=on_tick,
    )
    worker = ApiWorker(
        settings=settings,
        worker_id=worker_id,
        slot=slot,
        tokenizer=tokenizer,
        detokenizer=None if tokenizer is None else Detokenizer(tokenizer),
        token_texts=texts,
        settler=settler,
        engine=engine,
        dispatcher=dispatcher,
        threads=ThreadPoolExecutor(1, thread_name_prefix="tokenize"),
        side=SideProcess(_side_settings(settings, tokenizer)),
        side_thread=ThreadPoolExecutor(1, thread_name_prefix="side"),
        housekeeper=housekeeper,
        request_log=_request_log(settings.server, tokenizer),
        started_at_s=time.time(),
        metrics=metrics,
        run_dir=run_dir,
    )
    return worker
