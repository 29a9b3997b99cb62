"""The JSON line of a run: SGLang's field names first, then ours."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from phalanx.bench.client_load import ClientLoad
from phalanx.bench.errors import BenchError
from phalanx.bench.metrics import Metrics
from phalanx.bench.parse import Outcome
from phalanx.bench.server_figures import ServerFigures


def result_fields(
    args: argparse.Namespace,
    metrics: Metrics,
    client: ClientLoad,
    server_info: dict[str, Any] | None,
    server: ServerFigures,
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
        figures |= {"min": d.min, "max": d.max}
        fields |= {f"{figure}_{name}_ms": value for figure, value in figures.items()}
    fields |= {
        "concurrency": metrics.concurrency,
        "accept_length": server.accept_length,
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
    fields |= _goodput_fields(metrics) | _own_fields(metrics, client) | server.fields()
    return fields | {"config": config_fields(args)}


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


def series_fields(metrics: Metrics) -> dict[str, Any]:
    """Return what charts are drawn from: the run over time, and 101 quantiles of each latency."""
    return {"series": metrics.timeline.series(), "quantiles_ms": metrics.quantiles_ms}


def config_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return every setting of the run; of headers their names only, since values may be secret."""
    config = {
        name: value
        for name, value in sorted(vars(args).items())
        if value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
    }
    config["header"] = [name for name, _ in args.header or []]
    infinite = {name for name, value in config.items() if isinstance(value, float) and math.isinf(value)}
    return config | dict.fromkeys(infinite, "inf")


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


def require_writable(path: str, option: str) -> None:
    """Make sure before a run that its result can be written to `path`; what is there is left as it is.

    Raises:
        BenchError: exit code 2; the file cannot be opened for writing.
    """
    file = Path(path)
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise BenchError(f"{option} {path}: cannot be written: {error.strerror}", exit_code=2) from None


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


def _goodput_fields(m: Metrics) -> dict[str, Any]:
    if m.goodput is None:
        return {}
    return {
        "goodput_slos_ms": m.goodput.slos_ms,
        "request_goodput": m.goodput.requests_per_s,
        "slo_attainment": m.goodput.attainment,
        "slo_attainment_by_metric": m.goodput.attainment_by_metric,
    }


def _own_fields(m: Metrics, client: ClientLoad) -> dict[str, Any]:
    return {
        "sent": m.num_sent,
        "failed": sum(m.failures.values()),
        "failures": m.failures,
        "unmeasured": m.unmeasured,
        "output_len_sources": m.count_sources,
        "itl_retokenized_requests": m.num_retokenized_itl,
        "streams_in_one_piece": m.num_in_one_piece,
        "total_input_tokens_asked": m.total_input_asked,
        "total_input_tokens_server": m.total_input_server,
        "peak_requests_in_flight": m.peak_in_flight,
        "median_schedule_delay_ms": m.schedule_delay.p50,
        "p99_schedule_delay_ms": m.schedule_delay.p99,
        "max_schedule_delay_ms": m.schedule_delay.max,
        "median_slot_wait_ms": m.slot_wait.p50,
        "p99_slot_wait_ms": m.slot_wait.p99,
        "in_flight": asdict(m.in_flight),
        "output_tokens_per_s": asdict(m.output_rate),
        "steady_state": None if m.steady is None else asdict(m.steady),
        "steady_state_reason": m.steady_reason or None,
        "p99_client_lag_ms": client.worst("lag_p99_ms"),
        "max_client_lag_ms": client.worst("lag_max_ms"),
        "client_cpu_s": client.cpu_s,
        "client_bottleneck": client.bottleneck,
        "client_processes": [asdict(process) for process in client.processes],
        "connections_opened": client.num_connections,
        "requests_sent_again": client.num_resent,
    }
