"""One benchmark from command line to result: ready check, data, warm-up, load, figures, table, JSON line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np

from phalanx.bench.args import check_arguments
from phalanx.bench.backends import BACKENDS, RequestOptions, build_body
from phalanx.bench.check import check_possible
from phalanx.bench.connection import RawRecord
from phalanx.bench.datasets import BenchRequest, TokenizerLike, request_source
from phalanx.bench.errors import BenchError
from phalanx.bench.metrics import Asked, Metrics, compute_metrics
from phalanx.bench.parse import Outcome, parse_record
from phalanx.bench.report import (
    append_json_line,
    default_file_name,
    detail_fields,
    format_table,
    json_line,
    result_fields,
)
from phalanx.bench.target import Target, first_model, flush_cache, make_target, server_info, wait_until_ready
from phalanx.bench.worker import LoadResult, poisson_arrivals, run_load

_WARMUP_TOKENS = 32
# Raw answers kept for parsing after the run. SGLang's native stream repeats the whole text in every event, so
# long answers would fill the memory: past this, each answer is parsed as soon as it is complete.
_MAX_RAW_BYTES = 2 << 30


def run(
    args: argparse.Namespace, load_tokenizer: Callable[[str], TokenizerLike], settle_s: float = 1.0
) -> int:
    """Run the benchmark; the table goes to stdout, everything else to stderr.

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
    backend = BACKENDS[args.backend]
    target = make_target(args.base_url, args.host, args.port, args.header or [])
    if args.ready_check_timeout_sec > 0 and not wait_until_ready(target, args.ready_check_timeout_sec):
        raise BenchError(f"{target.url}/v1/models is not ready after {args.ready_check_timeout_sec:g} s")
    args.model = args.model or first_model(target)
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    requests, rng = request_source(args, tokenizer)
    _describe_data(args, requests)
    arrivals = poisson_arrivals(len(requests), args.request_rate, rng)
    _warm_up(args, target, requests[0])
    if args.flush_cache and backend.flush_path is not None:
        flush_cache(target, backend.flush_path)
    time.sleep(settle_s)
    load, outcomes = _load(args, target, requests, arrivals)
    info = server_info(target) if backend.has_server_info else None
    metrics = compute_metrics(
        outcomes, _asked(args, requests, load.records), load.ended - load.began, tokenizer, args.goodput
    )
    check_possible(metrics)
    _publish(args, metrics, load, outcomes, requests, info)
    return 0 if metrics.num_completed else 1


def _publish(
    args: argparse.Namespace,
    metrics: Metrics,
    load: LoadResult,
    outcomes: list[Outcome],
    requests: list[BenchRequest],
    info: dict[str, Any] | None,
) -> None:
    accept_length = _accept_length(info)
    print(format_table(args, metrics, load, accept_length))
    fields = result_fields(args, metrics, load, info, accept_length)
    # Last on stdout, for scripts: the figures without the server's settings and the per-request details.
    short = {name: value for name, value in fields.items() if name != "server_info"}
    print(json_line(short).decode(), end="", flush=True)
    if args.output_details:
        fields |= detail_fields(outcomes, [request.prompt_len for request in requests], metrics)
    path = args.output_file or default_file_name(args)
    append_json_line(path, fields)
    _say(f"Result appended to {path}")


def _warm_up(args: argparse.Namespace, target: Target, request: BenchRequest) -> None:
    if not args.warmup_requests:
        return
    _say(f"Warm-up: {args.warmup_requests} requests")
    body = build_body(
        BACKENDS[args.backend], _options(args), request.prompt, min(request.output_len, _WARMUP_TOKENS)
    )
    wire = target.wire_request(BACKENDS[args.backend].path, body)
    count = args.warmup_requests
    load = run_load(target, [wire] * count, np.zeros(count), args.max_concurrency)
    outcomes = _parse_all(args, load.records, {})
    if not any(outcome.success for outcome in outcomes):
        raise BenchError(f"warm-up failed: {outcomes[0].failure}")


def _load(
    args: argparse.Namespace, target: Target, requests: list[BenchRequest], arrivals: np.ndarray
) -> tuple[LoadResult, list[Outcome]]:
    backend, options = BACKENDS[args.backend], _options(args)
    wires = [
        target.wire_request(backend.path, build_body(backend, options, r.prompt, r.output_len))
        for r in requests
    ]
    early: dict[int, Outcome] = {}
    num_kept = 0

    def keep_or_parse(record: RawRecord) -> None:
        nonlocal num_kept
        num_kept += sum(map(len, record.pieces))
        if num_kept > _MAX_RAW_BYTES:
            early[record.index] = parse_record(record, backend.flavor, options.stream)
            record.pieces, record.times = [], []

    progress = None if args.disable_tqdm or not sys.stderr.isatty() else Progress(len(requests), sys.stderr)
    load = run_load(
        target, wires, arrivals, args.max_concurrency, on_progress=progress, on_finished=keep_or_parse
    )
    if progress is not None:
        progress.close()
    if early:
        limit = _MAX_RAW_BYTES >> 30
        _say(f"{len(early)} answers were parsed during the run: the raw bytes passed {limit} GiB")
    return load, _parse_all(args, load.records, early)


class Progress:
    """A line on a terminal, redrawn at each call; plain, since a live display would stall the event loop."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._began = time.perf_counter()

    def __call__(self, num_finished: int, num_failed: int) -> None:
        """Draw `num_finished` of the total, and the failures among them."""
        elapsed = time.perf_counter() - self._began
        filled = 30 * num_finished // max(self._total, 1)
        failed = f", {num_failed} failed" if num_failed else ""
        self._out.write(
            f"\r[{'#' * filled}{'.' * (30 - filled)}] {num_finished}/{self._total}{failed}, {elapsed:.1f} s "
        )
        self._out.flush()

    def close(self) -> None:
        """Leave the line."""
        self._out.write("\n")
        self._out.flush()


def _parse_all(
    args: argparse.Namespace, records: list[RawRecord], early: dict[int, Outcome]
) -> list[Outcome]:
    flavor, stream = BACKENDS[args.backend].flavor, not args.disable_stream
    outcomes = []
    for record in records:
        outcomes.append(early.get(record.index) or parse_record(record, flavor, stream))
        record.pieces, record.times = [], []
    return outcomes


def _asked(args: argparse.Namespace, requests: list[BenchRequest], records: list[RawRecord]) -> Asked:
    waits = [record.wait_for_slot for record in records] if args.max_concurrency else []
    return Asked(
        prompt_lens=np.asarray([request.prompt_len for request in requests], np.int64),
        asked_lens=np.asarray([request.asked_len for request in requests], np.int64),
        due=np.asarray([record.due for record in records], np.float64),
        sent=np.asarray([np.nan if r.sent is None else r.sent for r in records], np.float64),
        slot_waits=np.asarray(waits, np.float64),
    )


def _options(args: argparse.Namespace) -> RequestOptions:
    return RequestOptions(
        model=args.served_model_name or args.model,
        stream=not args.disable_stream,
        ignore_eos=not args.disable_ignore_eos,
        temperature=args.temperature,
        top_p=args.top_p,
        extra_body=args.extra_request_body,
    )


def _describe_data(args: argparse.Namespace, requests: list[BenchRequest]) -> None:
    if len(requests) < args.num_prompts:
        _say(f"{args.dataset_path} yields {len(requests)} requests, fewer than the {args.num_prompts} asked")
    sent, asked = sum(r.prompt_len for r in requests), sum(r.asked_len for r in requests)
    changed = sum(r.prompt_len != r.asked_len for r in requests)
    _say(
        f"#Input tokens: {sent} (asked: {asked}; {changed} of {len(requests)} prompts changed length as text)"
    )
    _say(f"#Output tokens: {sum(r.output_len for r in requests)}")


def _accept_length(info: dict[str, Any] | None) -> float | None:
    """SGLang's mean number of tokens accepted per step of speculative decoding, where it reports one."""
    states = (info or {}).get("internal_states")
    if not isinstance(states, list) or not states or not isinstance(states[0], dict):
        return None
    value = states[0].get("avg_spec_accept_length")
    return float(value) if isinstance(value, (int, float)) else None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
