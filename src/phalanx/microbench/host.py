"""What a step costs on the host: the real scheduler, at full width, in front of an engine that does nothing.

Prompts of 1..32 and outputs of 1..128 tokens, as in the seed's workload, with requests always waiting: some
running/64 of them arrive and finish in every step. The last line is one JSON object; `us_per_row_step` in it
is the median of plan + apply over the rows that got a token.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from phalanx.config.groups import PAGE_SIZES, SchedulerConfig
from phalanx.core.errors import ConfigError
from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepPlan, StepResult
from phalanx.scheduler import Scheduler

_STAGES = ("add", "plan", "apply", "plan + apply")
_VOCAB_SIZE = 32_000


@dataclass
class Samples:
    """One entry per measured step: microseconds by stage, and the rows that got a token."""

    us: dict[str, list[float]] = field(default_factory=lambda: {stage: [] for stage in _STAGES})
    rows: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)


class Workload:
    """Draws requests and the null engine's results."""

    def __init__(self, *, max_input_len: int, max_output_len: int, stop_rate: float, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._max_input_len = max_input_len
        self._max_output_len = max_output_len
        self._stop_rate = stop_rate
        self._next_id = 0

    def requests(self, count: int) -> list[EngineRequest]:
        """New greedy requests."""
        rng = self._rng
        made = []
        for prompt_len, output_len in zip(
            rng.integers(1, self._max_input_len + 1, count).tolist(),
            rng.integers(1, self._max_output_len + 1, count).tolist(),
            strict=True,
        ):
            made.append(
                EngineRequest(
                    stream_id=self._next_id,
                    input_ids=rng.integers(0, _VOCAB_SIZE, prompt_len, dtype=np.int32),
                    sampling=SamplingParams(
                        max_new_tokens=output_len,
                        temperature=0.0,
                        ignore_eos=True,
                        sampling_seed=self._next_id,
                    ),
                )
            )
            self._next_id += 1
        return made

    def result(self, plan: StepPlan) -> StepResult:
        """Random tokens; each of them a stop token with probability stop_rate."""
        size = len(plan.sample_rows)
        finish = np.zeros(size, dtype=np.uint8)
        if self._stop_rate:
            finish[self._rng.random(size) < self._stop_rate] = Finish.STOP
        tokens = self._rng.integers(0, _VOCAB_SIZE, size, dtype=np.int32)
        return StepResult(step_id=plan.step_id, tokens=tokens, finish=finish)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phalanx bench host`."""
    parser.add_argument("--running", type=int, default=4096, help="rows of the request table")
    parser.add_argument("--steps", type=int, default=300, help="measured steps")
    parser.add_argument("--warm-up-steps", type=int, default=256)
    parser.add_argument("--page-size", type=int, default=16, help="tokens per KV page, as in a server")
    parser.add_argument("--random-input-len", type=int, default=32, help="prompts of 1..this many tokens")
    parser.add_argument("--random-output-len", type=int, default=128, help="outputs of 1..this many tokens")
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--chunked-prefill-size", type=int, default=-1)
    parser.add_argument(
        "--stop-rate", type=float, default=0.0, help="probability that a token is a stop token"
    )
    parser.add_argument("--overlap", action="store_true", help="plan step i+1 before step i is applied")
    parser.add_argument("--gc-off", action="store_true", help="turn Python's garbage collector off")
    parser.add_argument("--seed", type=int, default=42)


def measure(scheduler: Scheduler, workload: Workload, *, steps: int, warm_up: int, overlap: bool) -> Samples:
    """Run warm_up + steps steps and time the last `steps` of them."""
    samples = Samples()
    in_flight: deque[StepPlan] = deque()
    wanted = scheduler.config.max_running_requests // 4  # so many always wait
    clock = time.perf_counter_ns
    for step in range(warm_up + steps):
        arrivals = workload.requests(wanted - scheduler.num_queued)
        start = clock()
        for request in arrivals:
            scheduler.add(request)
        added = clock()
        plan = scheduler.plan()
        planned = clock()
        apply_ns = 0
        if plan is not None:
            in_flight.append(plan)
        while len(in_flight) > (overlap and plan is not None):
            oldest = in_flight.popleft()
            result = workload.result(oldest)
            before = clock()
            scheduler.apply(oldest, result)
            apply_ns += clock() - before
        if step >= warm_up and plan is not None:
            plan_ns = planned - added
            for stage, ns in zip(
                _STAGES, (added - start, plan_ns, apply_ns, plan_ns + apply_ns), strict=True
            ):
                samples.us[stage].append(ns / 1000)
            samples.rows.append(len(plan.sample_rows))
            samples.arrivals.append(plan.entering.count)
    for oldest in in_flight:
        scheduler.apply(oldest, workload.result(oldest))
    return samples


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, then one JSON line."""
    _check(args)
    max_request = args.random_input_len + args.random_output_len
    num_pages = 1 + args.running * -(-max_request // args.page_size)
    config = SchedulerConfig(
        max_running_requests=args.running,
        context_length=args.context_length,
        chunked_prefill_size=args.chunked_prefill_size,
    )
    scheduler = Scheduler(config, num_pages=num_pages, page_size=args.page_size)
    workload = Workload(
        max_input_len=args.random_input_len,
        max_output_len=args.random_output_len,
        stop_rate=args.stop_rate,
        seed=args.seed,
    )
    was_enabled = gc.isenabled()
    if args.gc_off:
        gc.disable()
    try:
        samples = measure(
            scheduler, workload, steps=args.steps, warm_up=args.warm_up_steps, overlap=args.overlap
        )
    finally:
        if was_enabled:
            gc.enable()
    scheduler.check()
    _report(args, samples)
    return 0


def _check(args: argparse.Namespace) -> None:
    for name in ("running", "steps", "random_input_len", "random_output_len"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.page_size not in PAGE_SIZES:
        raise ConfigError(f"--page-size must be a power of two up to {PAGE_SIZES[-1]}, got {args.page_size}")
    if args.warm_up_steps < 0:
        raise ConfigError(f"--warm-up-steps must be at least 0, got {args.warm_up_steps}")
    if not 0 <= args.stop_rate <= 1:
        raise ConfigError(f"--stop-rate must be in [0, 1], got {args.stop_rate}")
    if args.random_input_len >= args.context_length:
        raise ConfigError(
            f"--random-input-len {args.random_input_len} does not fit --context-length {args.context_length}"
        )


def _report(args: argparse.Namespace, samples: Samples) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = np.array(samples.rows)
    table = Table(
        "stage",
        *("us/step median", "fastest", "p99", "longest", "ns/row-step median"),
        title=f"phalanx bench host: {args.running} rows, page size {args.page_size}, "
        f"{'overlapped' if args.overlap else 'serial'}",
    )
    stages: dict[str, dict[str, float]] = {}
    for stage in _STAGES:
        us = np.array(samples.us[stage])
        stages[stage] = {
            "median_us": round(float(np.median(us)), 2),
            "min_us": round(float(us.min()), 2),
            "p99_us": round(float(np.percentile(us, 99)), 2),
            "max_us": round(float(us.max()), 2),
            "ns_per_row_step": round(float(np.median(us / rows)) * 1000, 2),
        }
        table.add_row(stage, *(f"{value:.1f}" for value in stages[stage].values()))
    Console().print(table)
    result = {
        "running": args.running,
        "page_size": args.page_size,
        "overlap": args.overlap,
        "gc": not args.gc_off,
        "steps": len(rows),
        "rows_per_step": round(float(rows.mean()), 1),
        "arrivals_per_step": round(float(np.mean(samples.arrivals)), 1),
        "stages": stages,
        "us_per_row_step": round(stages["plan + apply"]["ns_per_row_step"] / 1000, 4),
    }
    print(json.dumps(result))
