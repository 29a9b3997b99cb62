"""One benchmark from command line to result: ready check, data, warm-up, load, figures, table, JSON line."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.bench.arrivals import Pace, draw_arrivals
from phalanx.bench.backends import BACKENDS, RequestOptions, build_body
from phalanx.bench.check import check_possible
from phalanx.bench.client_load import ClientLoad, judge_client
from phalanx.bench.datasets import BenchRequest, TokenizerLike, request_source
from phalanx.bench.errors import BenchError
from phalanx.bench.fleet import Load, RunRecord, run_fleet, settle_num_processes
from phalanx.bench.metrics import Asked, Metrics, compute_metrics
from phalanx.bench.parse import Outcome
from phalanx.bench.profile import profiled
from phalanx.bench.progress import Progress
from phalanx.bench.report import (
    append_json_line,
    default_file_name,
    detail_fields,
    json_line,
    require_writable,
    result_fields,
    series_fields,
)
from phalanx.bench.server_figures import ServerFigures, read_server_figures
from phalanx.bench.server_metrics import MetricsSampler
from phalanx.bench.settle import check_arguments
from phalanx.bench.table import format_table
from phalanx.bench.target import (
    Target,
    first_model,
    flush_cache,
    make_target,
    server_info,
    wait_until_ready,
)
from phalanx.bench.terminal_plot import plot_run

_WARMUP_TOKENS = 32
_SAMPLING_FIELDS = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, understood.

    Attributes:
        metrics: every figure.
        client: what the client spent.
        server: what the server says of itself.
        fields: the JSON line without the details of each request.
        outcomes: one per request.
        requests: what was asked.
    """

    metrics: Metrics
    client: ClientLoad
    server: ServerFigures
    fields: dict[str, Any]
    outcomes: list[Outcome]
    requests: list[BenchRequest]


def run(
    args: argparse.Namespace, load_tokenizer: Callable[[str], TokenizerLike], settle_s: float = 1.0
) -> int:
    """Run the benchmark; the table and the JSON line go to stdout, everything else to stderr.

    Args:
        args: from a parser filled by `add_arguments`.
        load_tokenizer: returns the tokenizer of a name, folder or file.
        settle_s: pause between warm-up and load.

    Returns:
        Exit code: 0, or 1 when not one request succeeded.

    Raises:
        BenchError: with the exit code of its kind.
    """
    check_arguments(args)
    path = args.output_file or default_file_name(args)
    require_writable(path, "--output-file")
    target = connect(args)
    measured = measure(args, target, load_tokenizer(args.tokenizer or args.model), settle_s)
    print(format_table(args, measured.metrics, measured.client, measured.server))
    if args.plot:
        print(plot_run(measured.fields["series"]))
    # Last on stdout, for scripts: the figures alone.
    long = ("server_info", "series", "quantiles_ms", "server_metrics", "config")
    short = {name: value for name, value in measured.fields.items() if name not in long}
    print(json_line(short).decode(), end="", flush=True)
    # After the printing: a disk that is full by now costs the file, not the figures.
    save(args, measured, path)
    say(f"Result appended to {path}")
    return 0 if measured.metrics.num_completed else 1


def connect(args: argparse.Namespace) -> Target:
    """Return the server of the command line once it is ready; settle `args.model` if it is open.

    Raises:
        BenchError: it does not get ready, or names no model.
    """
    target = make_target(args.base_url, args.host, args.port, args.header or [])
    if args.ready_check_timeout_sec > 0:
        wait_until_ready(target, args.ready_check_timeout_sec)
    args.model = args.model or first_model(target)
    return target


def measure(
    args: argparse.Namespace, target: Target, tokenizer: TokenizerLike, settle_s: float = 1.0
) -> Measured:
    """Make one measured run: data, warm-up, load, figures that passed `check_possible`.

    Raises:
        BenchError: with the exit code of its kind.
    """
    requests, rng = request_source(args, tokenizer)
    _describe_data(args, requests)
    arrivals = draw_arrivals(len(requests), _pace(args), rng)
    _warm_up(args, target, requests[0])
    if args.flush_cache:
        flush_cache(target, BACKENDS[args.backend].flush_path or "")
    time.sleep(settle_s)
    sampler = MetricsSampler(target) if args.server_metrics else None
    with profiled(args, target, say) as profile_problems, sampler or contextlib.nullcontext():
        record = _load(args, target, requests, arrivals)
    info = server_info(target) if BACKENDS[args.backend].has_server_info else None
    metrics = compute_metrics(
        record.outcomes,
        _asked(args, requests, record),
        record.ended - record.began,
        tokenizer,
        args.goodput,
        began=record.began,
        ramped_rate=args.ramp_up_strategy is not None,
    )
    check_possible(metrics)
    client = judge_client(record.processes, _judged_window(record, metrics))
    server = read_server_figures(info)
    fields = result_fields(args, metrics, client, info, server) | series_fields(metrics)
    if args.profile:
        fields["profile_problems"] = profile_problems
    if sampler is not None:
        fields["server_metrics"] = sampler.series(record.began)
    return Measured(metrics, client, server, fields, record.outcomes, requests)


def save(args: argparse.Namespace, measured: Measured, path: str | Path) -> None:
    """Append the JSON line, with --output-details those of each request too, to `path`.

    Raises:
        BenchError: the file cannot be written.
    """
    fields = measured.fields
    if args.output_details:
        prompt_lens = [request.prompt_len for request in measured.requests]
        fields = fields | detail_fields(measured.outcomes, prompt_lens, measured.metrics)
    append_json_line(str(path), fields)


def say(text: str) -> None:
    """Print a remark to stderr."""
    print(text, file=sys.stderr, flush=True)


def _warm_up(args: argparse.Namespace, target: Target, request: BenchRequest) -> None:
    if not args.warmup_requests:
        return
    say(f"Warm-up: {args.warmup_requests} requests")
    backend, count = BACKENDS[args.backend], args.warmup_requests
    body = build_body(backend, _options(args), request.prompt, min(request.output_len, _WARMUP_TOKENS))
    wires = [target.wire_request(backend.path, body)] * count
    load = Load(target, wires, np.zeros(count), args.max_concurrency, backend.flavor, not args.disable_stream)
    outcomes = run_fleet(load, 1).outcomes
    if not any(outcome.success for outcome in outcomes):
        raise BenchError(f"warm-up failed: {outcomes[0].failure}")


def _load(
    args: argparse.Namespace, target: Target, requests: list[BenchRequest], arrivals: np.ndarray
) -> RunRecord:
    backend, options = BACKENDS[args.backend], _options(args)
    wires = [
        target.wire_request(backend.path, build_body(backend, options, r.prompt, r.output_len))
        for r in requests
    ]
    asked = None if args.client_processes == "auto" else args.client_processes
    num_processes = settle_num_processes(asked, len(requests), args.max_concurrency)
    say(f"Client processes: {num_processes}")
    load = Load(target, wires, arrivals, args.max_concurrency, backend.flavor, options.stream)
    shown = not args.disable_tqdm and sys.stderr.isatty()
    progress = Progress(len(requests), sys.stderr) if shown else None
    record = run_fleet(load, num_processes, progress)
    if progress is not None:
        progress.close()
    if early := sum(process.num_parsed_early for process in record.processes):
        say(f"{early} answers were parsed during the run: the raw bytes passed the limit")
    return record


def _asked(args: argparse.Namespace, requests: list[BenchRequest], record: RunRecord) -> Asked:
    return Asked(
        prompt_lens=np.asarray([request.prompt_len for request in requests], np.int64),
        asked_lens=np.asarray([request.asked_len for request in requests], np.int64),
        due=record.due,
        sent=record.sent,
        slot_waits=record.slot_waits if args.max_concurrency else np.empty(0),
    )


def _judged_window(record: RunRecord, metrics: Metrics) -> tuple[float, float]:
    """The steady state, else the whole run: the burst of sends at rate inf is no sign of a weak client."""
    if metrics.steady is None:
        return record.began, record.ended
    return record.began + metrics.steady.begin_s, record.began + metrics.steady.end_s


def _pace(args: argparse.Namespace) -> Pace:
    return Pace(
        args.request_rate,
        args.burstiness,
        args.ramp_up_strategy,
        args.ramp_up_start_rps or 0.0,
        args.ramp_up_end_rps or 0.0,
    )


def _options(args: argparse.Namespace) -> RequestOptions:
    given = {name: getattr(args, name) for name in _SAMPLING_FIELDS}
    native: dict[str, Any] = {}
    if args.return_logprob:
        native = {
            "return_logprob": True,
            "top_logprobs_num": args.top_logprobs_num,
            "logprob_start_len": args.logprob_start_len,
        }
    return RequestOptions(
        model=args.served_model_name or args.model,
        stream=not args.disable_stream,
        ignore_eos=not args.disable_ignore_eos,
        temperature=args.temperature,
        top_p=args.top_p,
        sampling={name: value for name, value in given.items() if value is not None},
        native_fields=native,
        extra_body=args.extra_request_body,
    )


def _describe_data(args: argparse.Namespace, requests: list[BenchRequest]) -> None:
    if len(requests) < args.num_prompts:
        say(f"{args.dataset_path} yields {len(requests)} requests, fewer than the {args.num_prompts} asked")
    sent, asked = sum(r.prompt_len for r in requests), sum(r.asked_len for r in requests)
    changed = sum(r.prompt_len != r.asked_len for r in requests)
    say(
        f"#Input tokens: {sent} (asked: {asked}; {changed} of {len(requests)} prompts changed length as text)"
    )
    say(f"#Output tokens: {sum(r.output_len for r in requests)}")
