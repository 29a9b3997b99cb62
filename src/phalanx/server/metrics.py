"""GET /metrics: the engine's figures and those of all API workers, under SGLang's names where it has them.

docs/metrics.md says what each one means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import RequestError
from phalanx.server.housekeeping import LAG_BOUNDS_S
from phalanx.server.prometheus import Labels, MetricsText
from phalanx.server.state import ApiWorker
from phalanx.server.worker_metrics import (
    CAUSES,
    ENDS,
    GAUGES,
    LATENCIES,
    LATENCY_BOUNDS_S,
    TOTALS,
    metrics_path,
    read,
)

_ENGINE_WAIT_S = 5.0  # a step may last longer; Prometheus itself waits ten seconds
_HOST_PHASES = ("plan", "launch", "kv_indices", "wait", "apply", "send")
_LATENCY_TEXTS = (
    "From a request's arrival until its first token is taken up to be sent.",
    "Between two tokens of a sequence; tokens that come together share the wait.",
    "From a request's arrival until the end of a sequence, aborted and failed ones excepted.",
)


async def metrics_text(worker: ApiWorker) -> str:
    """The page. Without the engine's part where that does not answer."""
    worker.publish_metrics()
    stats: dict[str, Any] | None = None
    try:
        stats = (await worker.engine.control("stats", timeout_s=_ENGINE_WAIT_S)).data
    except RequestError:
        pass
    settings = worker.settings
    text = MetricsText({"model_name": settings.server.served_model_name})
    text.gauge("phalanx:engine_up", "1 if the engine has answered for this page.", int(stats is not None))
    if stats is not None:
        _add_engine(text, stats, settings.scheduler.max_running_requests)
        _add_times(text, stats)
    figures = _worker_figures(worker.run_dir, worker, settings.server.api_workers)
    _add_workers(text, figures)
    _add_cpu(text, figures, (stats or {}).get("cpu_seconds_total"))
    _add_ends(text, figures, num_lost=(stats or {}).get("aborted_worker_lost_total", 0))
    _add_http(text, figures)
    return text.text()


def _worker_figures(run_dir: Path | None, worker: ApiWorker, count: int) -> dict[int, Any]:
    """What each worker that has begun counts, by slot."""
    if run_dir is None:
        return {worker.slot: worker.metrics.snapshot()}
    found = {slot: read(metrics_path(run_dir, slot)) for slot in range(max(count, worker.slot + 1))}
    return {slot: figures for slot, figures in found.items() if figures is not None}


def _add_engine(text: MetricsText, stats: Mapping[str, Any], max_running_requests: int) -> None:
    get: Callable[..., Any] = stats.get
    total, held, page_size = get("pages_total", 0), get("pages_held", 0), get("page_size", 0)
    prompt, cached = get("prompt_tokens_total", 0), get("cached_tokens_total", 0)
    gauge, counter = text.gauge, text.counter
    gauge("sglang:num_running_reqs", "Sequences that have a row.", get("running", 0))
    gauge("sglang:num_queue_reqs", "Sequences that wait for a row.", get("queued", 0))
    gauge("sglang:num_used_tokens", "Tokens' worth of KV pages that are held.", held * page_size)
    gauge("sglang:token_usage", "Held pages over all pages.", held / total if total else 0.0)
    gauge("sglang:max_total_num_tokens", "Size of the KV pool in tokens.", total * page_size)
    gauge("sglang:page_size", "Tokens of a KV page.", page_size)
    gauge("sglang:max_running_requests", "Rows of the request table.", max_running_requests)
    gauge("sglang:gen_throughput", "Generated tokens per second, of late.", get("gen_throughput", 0.0))
    rate = cached / (prompt + cached) if cached else 0.0
    gauge("sglang:cache_hit_rate", "Prompt tokens found in a prefix cache over all prompt tokens.", rate)
    counter("sglang:prompt_tokens_total", "Prompt tokens computed.", prompt)
    counter("sglang:cached_tokens_total", "Prompt tokens found in a prefix cache.", cached)
    counter("sglang:generation_tokens_total", "Tokens generated.", get("generated_tokens_total", 0))
    counter("sglang:num_requests_total", "Sequences that the engine has accepted.", get("requests_total", 0))
    counter(
        "sglang:num_retracted_requests_total",
        "Sequences whose pages were taken back while they ran.",
        get("retracted_total", 0),
    )
    kinds = ("free", "cached", "held")
    text.samples(
        "phalanx:kv_pages",
        "gauge",
        "Pages of the KV pool: free, cached and held ones are all there are.",
        [({"state": kind}, get(f"pages_{kind}", 0)) for kind in kinds],
    )
    gauge(
        "phalanx:kv_pages_reserved",
        "Pages that running sequences may still ask for.",
        get("pages_reserved", 0),
    )
    rows = get("last_step_rows", 0) if get("running", 0) else 0
    gauge(
        "phalanx:batch_occupancy",
        "Rows of the last step over all rows; 0 while nothing runs.",
        rows / max_running_requests,
    )
    counter("phalanx:steps_total", "Steps of the engine.", get("steps_total", 0))
    counter("phalanx:step_rows_total", "Rows of all steps; each got a token.", get("step_rows_total", 0))
    gauge(
        "phalanx:paused", "1 between /pause_generation and /continue_generation.", int(get("paused", False))
    )


def _add_times(text: MetricsText, stats: Mapping[str, Any]) -> None:
    """Histograms that the engine keeps; one that it does not tell is left out."""
    step, queue, host = stats.get("step_time"), stats.get("queue_time"), stats.get("host_time")
    if queue is not None:
        _add_histogram(text, "sglang:queue_time_seconds", "From arrival until a row was had.", queue)
    if step is not None:
        _add_histogram(
            text, "phalanx:step_time_seconds", "Length of a step, as the engine's loop sees it.", step
        )
    if host is None:
        return
    bounds = host["bounds_s"]
    _add_histogram(
        text,
        "phalanx:host_time_between_steps_seconds",
        "Host time between two steps that decode.",
        {"bounds_s": bounds, **host["between_steps"]},
    )
    phases = [phase for phase in _HOST_PHASES if phase in host]
    text.histogram(
        "phalanx:host_time_seconds",
        "Host time of a step, by phase.",
        bounds[::2],
        [({"phase": p}, _pairs(host[p]["buckets"]), host[p]["sum_s"]) for p in phases],
    )
    text.counter(
        "phalanx:gpu_idle_seconds_total",
        "Estimate, from above, of the time in which the device had work to come and nothing to do.",
        host["idle"]["sum_s"],
    )


def _add_histogram(text: MetricsText, name: str, what: str, histogram: Mapping[str, Any]) -> None:
    samples: list[tuple[Labels, Sequence[float], float]] = [
        ({}, _pairs(histogram["buckets"]), histogram["sum_s"])
    ]
    text.histogram(name, what, histogram["bounds_s"][::2], samples)


def _pairs(buckets: Sequence[int]) -> list[int]:
    """Buckets below every second bound, the first one included: five a decade are told, ten kept."""
    return [buckets[0], *(sum(buckets[i : i + 2]) for i in range(1, len(buckets), 2))]


def _added(figures: Mapping[int, Any], field: str, i: int) -> float:
    return float(sum(one[field][0, i] for one in figures.values()))


def _add_workers(text: MetricsText, figures: Mapping[int, Any]) -> None:
    for i, name in enumerate(LATENCIES):
        buckets = sum(one["latency_buckets"][0, i] for one in figures.values())
        text.histogram(
            f"sglang:{name}_seconds",
            _LATENCY_TEXTS[i],
            LATENCY_BOUNDS_S.tolist(),
            [({}, buckets.tolist(), _added(figures, "latency_sums", i))],
        )
    for i, (name, what) in enumerate(zip(TOTALS, _TOTAL_TEXTS, strict=False)):
        text.counter(f"phalanx:{name}_total", what, _added(figures, "totals", i))
    streams = GAUGES.index("streams")
    text.samples(
        "phalanx:api_worker_streams",
        "gauge",
        "Sequences of each API worker that run or wait.",
        [({"worker": str(slot)}, float(one["gauges"][0, streams])) for slot, one in figures.items()],
    )
    text.histogram(
        "phalanx:event_loop_lag_seconds",
        "How late each API worker's event loop ran what was due, twenty times a second.",
        LAG_BOUNDS_S,
        [
            ({"worker": str(slot)}, one["lag_buckets"][0].tolist(), float(one["lag_sum"][0, 0]))
            for slot, one in figures.items()
        ],
    )


_TOTAL_TEXTS = (  # of the first TOTALS; CPU time is told by process
    "Chunks of streams that were written.",
    "Tokens that shared their chunk with an earlier one, since client or worker did not keep up.",
    "HTTP requests whose clients were cut off since they read nothing.",
)


def _add_cpu(text: MetricsText, figures: Mapping[int, Any], engine_s: float | None) -> None:
    seconds = TOTALS.index("cpu_seconds")
    samples: list[tuple[Labels, float]] = [
        ({"component": f"api_worker_{slot}"}, float(one["totals"][0, seconds]))
        for slot, one in figures.items()
    ]
    if engine_s is not None:
        samples.append(({"component": "engine"}, engine_s))
    text.samples("sglang:process_cpu_seconds_total", "counter", "CPU time of each process.", samples)


def _add_ends(text: MetricsText, figures: Mapping[int, Any], *, num_lost: int) -> None:
    """num_lost: sequences that ended with their worker, which can count nothing any more."""
    causes: list[tuple[Labels, float]] = [
        ({"cause": cause}, _added(figures, "causes", i)) for i, cause in enumerate(CAUSES)
    ]
    causes.append(({"cause": "worker_lost"}, num_lost))
    text.counter(
        "sglang:num_aborted_requests_total",
        "Sequences that were ended before their time, for whatever cause.",
        sum(value for _, value in causes),
    )
    text.samples("phalanx:aborted_requests_total", "counter", "The same by cause.", causes)
    text.samples(
        "phalanx:finished_requests_total",
        "counter",
        "Sequences whose end was told to their clients, by reason.",
        [({"reason": reason}, _added(figures, "ends", i)) for i, reason in enumerate(ENDS)],
    )


def _add_http(text: MetricsText, figures: Mapping[int, Any]) -> None:
    active = GAUGES.index("http_active")
    text.gauge(
        "sglang:http_requests_active",
        "HTTP requests that are being answered.",
        sum(float(one["gauges"][0, active]) for one in figures.values()),
    )
    counts: dict[tuple[str, int], float] = {}
    for one in figures.values():
        for endpoint, status, count in one["responses"][0].tolist():
            if endpoint:
                key = (endpoint.decode(), status)
                counts[key] = counts.get(key, 0.0) + count
    text.samples(
        "sglang:http_responses_total",
        "counter",
        "HTTP responses by route and status; 499: the client left before there was one.",
        [
            ({"endpoint": endpoint, "status_code": str(status)}, count)
            for (endpoint, status), count in sorted(counts.items())
        ],
    )
