"""The printed table, in SGLang's layout, and the JSON line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from phalanx.bench.errors import BenchError
from phalanx.bench.metrics import Distribution, Metrics
from phalanx.bench.parse import Outcome
from phalanx.bench.worker import LoadResult

_WIDTH = 50
_MAX_CAUSES = 10


def format_table(
    args: argparse.Namespace, metrics: Metrics, load: LoadResult, accept_length: float | None
) -> str:
    """Return the result as SGLang's client prints it, then what that leaves out (failures, delays, sources).

    A figure that was not measured prints as n/a.
    """
    lines = [_rule(" Serving Benchmark Result ", "=")]
    lines += _summary_lines(args, metrics, accept_length)
    lines += _goodput_lines(metrics)
    sections = (
        ("End-to-End Latency", "E2E Latency", metrics.e2e),
        ("Time to First Token", "TTFT", metrics.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", metrics.tpot),
        ("Inter-Token Latency", "ITL", metrics.itl),
    )
    for title, name, distribution in sections:
        lines.append(_rule(title, "-"))
        lines += _latency_lines(name, distribution)
    lines.append(_row("Max ITL (ms):", metrics.itl.max))
    if args.cache_report:
        lines += _cache_lines(metrics)
    lines += _delivery_lines(args, metrics, load)
    lines += _failure_lines(metrics)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def result_fields(
    args: argparse.Namespace,
    metrics: Metrics,
    load: LoadResult,
    server_info: dict[str, Any] | None,
    accept_length: float | None,
) -> dict[str, Any]:
    """Return the JSON line's fields: SGLang's names first, then ours. None for what was not measured."""
    fields: dict[str, Any] = {
        "tag": args.tag,
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        # Strict JSON has no Infinity.
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "sharegpt_output_len": args.sharegpt_output_len,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        "server_info": server_info,
        "duration": metrics.duration_s,
        "completed": metrics.num_completed,
        "total_input_tokens": metrics.total_input,
        "total_input_text_tokens": metrics.total_input,
        "total_input_vision_tokens": 0,
        "total_output_tokens": metrics.total_output,
        "total_output_tokens_retokenized": metrics.total_output_retokenized,
        "request_throughput": metrics.rate(metrics.num_completed),
        "input_throughput": metrics.rate(metrics.total_input),
        "output_throughput": metrics.rate(metrics.total_output),
        "total_throughput": metrics.rate(metrics.total_input + metrics.total_output),
    }
    for name, d in (
        ("e2e_latency", metrics.e2e),
        ("ttft", metrics.ttft),
        ("tpot", metrics.tpot),
        ("itl", metrics.itl),
    ):
        figures = {"mean": d.mean, "median": d.p50, "std": d.std, "p90": d.p90, "p95": d.p95, "p99": d.p99}
        fields |= {f"{figure}_{name}_ms": value for figure, value in figures.items()}
    fields |= {
        "concurrency": metrics.concurrency,
        "accept_length": accept_length,
        "max_output_tokens_per_s": metrics.peak_output_tokens_per_s,
        "max_concurrent_requests": metrics.peak_concurrent_requests,
    }
    if args.cache_report:
        rate = metrics.cache_hit_rate
        fields["cache_report"] = {
            "total_prompt_tokens": metrics.total_input_server,
            "total_cached_tokens": metrics.total_cached,
            "cache_hit_rate_pct": None if rate is None else 100 * rate,
        }
    return fields | _goodput_fields(metrics) | _own_fields(metrics, load)


def detail_fields(outcomes: list[Outcome], prompt_lens: list[int], metrics: Metrics) -> dict[str, Any]:
    """Return the per-request lists of --output-details, in request order; seconds, None if unmeasured."""
    return {
        "input_lens": prompt_lens,
        "output_lens": metrics.output_lens,
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": metrics.itls,
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.failure or "" for outcome in outcomes],
    }


def default_file_name(args: argparse.Namespace) -> str:
    """Return the file name that SGLang's client would choose today."""
    today = datetime.now().strftime("%m%d")
    if args.dataset_name.startswith("random"):
        data = f"{args.random_input_len}_{args.random_output_len}"
    else:
        data = args.dataset_name
    return f"{args.backend}_{today}_{args.num_prompts}_{data}.jsonl"


def json_line(fields: dict[str, Any]) -> bytes:
    """Encode one line of strict JSON, with its newline."""
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def append_json_line(path: str, fields: dict[str, Any]) -> None:
    """Append `json_line(fields)` to `path`.

    Raises:
        BenchError: the file cannot be written.
    """
    try:
        with Path(path).open("ab") as file:
            file.write(json_line(fields))
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None


def _summary_lines(args: argparse.Namespace, m: Metrics, accept_length: float | None) -> Iterator[str]:
    yield _row("Backend:", args.backend)
    yield _row("Traffic request rate:", str(args.request_rate))
    yield _row("Max request concurrency:", args.max_concurrency or "not set")
    yield _row("Successful requests:", m.num_completed)
    yield _row("Benchmark duration (s):", m.duration_s)
    yield _row("Total input tokens:", m.total_input)
    yield _row("Total input text tokens:", m.total_input)
    yield _row("Total generated tokens:", m.total_output)
    yield _row("Total generated tokens (retokenized):", m.total_output_retokenized)
    yield _row("Request throughput (req/s):", m.rate(m.num_completed))
    yield _row("Input token throughput (tok/s):", m.rate(m.total_input))
    yield _row("Output token throughput (tok/s):", m.rate(m.total_output))
    yield _row("Peak output token throughput (tok/s):", m.peak_output_tokens_per_s)
    yield _row("Peak concurrent requests:", m.peak_concurrent_requests)
    yield _row("Total token throughput (tok/s):", m.rate(m.total_input + m.total_output))
    yield _row("Concurrency:", m.concurrency)
    if accept_length:
        yield _row("Accept length:", accept_length)


def _goodput_lines(m: Metrics) -> Iterator[str]:
    if m.goodput is None:
        return
    yield _rule("Goodput", "-")
    yield _row("SLOs (ms):", " ".join(f"{name}:{slo:g}" for name, slo in m.goodput.slos_ms.items()))
    yield _row("Request goodput (req/s):", m.goodput.requests_per_s)
    yield _row("SLO attainment (%):", m.goodput.attainment * 100)
    for name, share in m.goodput.attainment_by_metric.items():
        yield _row(f"{name.upper()} SLO attainment (%):", share * 100)


def _latency_lines(name: str, d: Distribution) -> Iterator[str]:
    for figure, value in (
        ("Mean", d.mean),
        ("Median", d.p50),
        ("P90", d.p90),
        ("P95", d.p95),
        ("P99", d.p99),
    ):
        yield _row(f"{figure} {name} (ms):", value)


def _cache_lines(m: Metrics) -> Iterator[str]:
    rate = m.cache_hit_rate
    yield _rule("Cache Hit Details", "-")
    yield _row("Total prompt tokens:", m.total_input_server)
    yield _row("Total cached tokens:", m.total_cached)
    yield _row("Cache hit rate:", None if rate is None else f"{100 * rate:.1f}%")


def _delivery_lines(args: argparse.Namespace, m: Metrics, load: LoadResult) -> Iterator[str]:
    """What tells whether the figures above can be believed."""
    yield _rule("Load as sent", "-")
    yield _row("Median schedule delay (ms):", m.schedule_delay.p50)
    yield _row("P99 schedule delay (ms):", m.schedule_delay.p99)
    yield _row("Max schedule delay (ms):", m.schedule_delay.max)
    if args.max_concurrency:
        yield _row("Median wait for a slot in it (ms):", m.slot_wait.p50)
        yield _row("P99 wait for a slot in it (ms):", m.slot_wait.p99)
    yield _row("P99 client event-loop lag (ms):", _lag_ms(load, 99))
    yield _row("Max client event-loop lag (ms):", _lag_ms(load, 100))
    yield _row("Client CPU (% of one core):", 100 * m.rate(load.cpu_s))
    yield _row("Peak requests in flight:", m.peak_in_flight)
    yield _row("Connections opened:", load.num_connections)
    yield _rule("Token counts", "-")
    yield _row("Input tokens asked of the dataset:", m.total_input_asked)
    yield _row("Input tokens counted by the server:", m.total_input_server)
    yield _row("Output lengths from the server (req):", m.count_sources["server"])
    yield _row("Output lengths retokenized (req):", m.count_sources["retokenized"])
    yield _row("ITL weights retokenized (req):", m.num_retokenized_itl)
    for name, count in m.unmeasured.items():
        yield _row(f"Successful requests without {name.upper()}:", count)


def _failure_lines(m: Metrics) -> Iterator[str]:
    yield _rule("Failures", "-")
    yield _row("Failed requests:", sum(m.failures.values()))
    for cause, count in list(m.failures.items())[:_MAX_CAUSES]:
        yield f"  {count} x {cause}"
    if len(m.failures) > _MAX_CAUSES:
        rest = list(m.failures.values())[_MAX_CAUSES:]
        yield f"  {sum(rest)} x {len(rest)} other causes"


def _goodput_fields(m: Metrics) -> dict[str, Any]:
    if m.goodput is None:
        return {}
    return {
        "goodput_slos_ms": m.goodput.slos_ms,
        "request_goodput": m.goodput.requests_per_s,
        "slo_attainment": m.goodput.attainment,
        "slo_attainment_by_metric": m.goodput.attainment_by_metric,
    }


def _own_fields(m: Metrics, load: LoadResult) -> dict[str, Any]:
    return {
        "sent": m.num_sent,
        "failed": sum(m.failures.values()),
        "failures": m.failures,
        "unmeasured": m.unmeasured,
        "output_len_sources": m.count_sources,
        "itl_retokenized_requests": m.num_retokenized_itl,
        "total_input_tokens_asked": m.total_input_asked,
        "total_input_tokens_server": m.total_input_server,
        "max_itl_ms": m.itl.max,
        "peak_requests_in_flight": m.peak_in_flight,
        "median_schedule_delay_ms": m.schedule_delay.p50,
        "p99_schedule_delay_ms": m.schedule_delay.p99,
        "max_schedule_delay_ms": m.schedule_delay.max,
        "median_slot_wait_ms": m.slot_wait.p50,
        "p99_slot_wait_ms": m.slot_wait.p99,
        "p99_client_lag_ms": _lag_ms(load, 99),
        "max_client_lag_ms": _lag_ms(load, 100),
        "client_cpu_s": load.cpu_s,
        "connections_opened": load.num_connections,
    }


def _lag_ms(load: LoadResult, percentile: float) -> float | None:
    return float(np.percentile(load.loop_lags, percentile)) * 1e3 if len(load.loop_lags) else None


def _rule(title: str, fill: str) -> str:
    return f"{title:{fill}^{_WIDTH}}"


def _row(label: str, value: str | int | float | None) -> str:
    if value is None:
        value = "n/a"
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value:<10}"
    return f"{label:<40} {shown}"
