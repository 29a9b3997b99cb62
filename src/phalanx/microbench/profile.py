"""Where the time of a step goes: some steps of the engine under torch.profiler.

All prompts are run first; then the steps measured are of decode rows alone. With --random-output-len they are
of the offline workload in full swing instead: outputs end, and prompts from the queue take their places.
Writes a chrome trace (open it with ui.perfetto.dev) and prints where a step's time goes. The last line is
one JSON object. docs/performance.md explains both.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.config.cli import add_model_arguments
from phalanx.config.groups import SchedulerConfig, Settings
from phalanx.core.errors import ConfigError
from phalanx.core.sampling_params import SamplingParams
from phalanx.microbench.offline import check_context, check_workload, draw_workload, load

_CUT = 3  # steps at the ends of a trace that may not be whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phalanx profile`."""
    add_model_arguments(parser)
    parser.add_argument("--steps", type=int, default=16, help="whole steps to trace, at least")
    parser.add_argument("--warm-up-steps", type=int, default=32, help="steps before the first one measured")
    parser.add_argument(
        "--num-prompts", type=int, default=256, help="requests, all handed over at once; all of them decode"
    )
    parser.add_argument("--random-input-len", type=int, default=32, help="prompts of 1..this many tokens")
    parser.add_argument(
        "--random-output-len",
        type=int,
        help="outputs of 1..this many tokens, so that prompts enter while others decode; ask for enough "
        "prompts that some still wait at the end (default: no output ends)",
    )
    parser.add_argument("--random-range-ratio", type=float, default=0.0, help="1.0: exactly the lengths")
    parser.add_argument("--seed", type=int, default=42, help="of prompts and lengths")
    parser.add_argument(
        "--output", default="phalanx-profile.json.gz", metavar="FILE", help="the trace, .json or .json.gz"
    )


def run(args: argparse.Namespace) -> int:
    """Trace the steps and print a table, then one JSON line."""
    from phalanx.runtime.models import settle_settings

    path = _check(args)
    prompts, output_lens = _workload(settle_settings(args), args)
    llm = load(args)
    was_enabled = gc.isenabled()
    gc.disable()  # as LLM.generate does
    try:
        start_requests(llm, prompts, output_lens, steady=args.random_output_len is None)
        result = profile_steps(llm, args, path)
        _drain(llm._worker, len(prompts))
    finally:
        if was_enabled:
            gc.enable()
    print_breakdown(result)
    print(json.dumps(result))
    if llm.settings.engine.device == "cuda":
        _leave()
    return 0


def _check(args: argparse.Namespace) -> Path:
    check_workload(args)
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {args.steps}")
    if args.warm_up_steps < 0:
        raise ConfigError(f"--warm-up-steps must not be negative, got {args.warm_up_steps}")
    path = Path(args.output)
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--output must end in .json or .json.gz, got {path}")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no such folder")
    is_new = not path.exists()
    try:
        path.open("ab").close()  # the profiler would say nothing, or put its file in an empty folder's place
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from error
    if is_new:
        path.unlink()
    return path


def start_requests(llm: Any, prompts: list[np.ndarray], output_lens: list[int], *, steady: bool) -> None:
    """Hand over the requests, as streams 0, 1, 2, ...; if steady, run until each of them has a token.

    Raises ConfigError if the pool does not hold all of a steady workload at once.
    """
    worker = llm._worker
    if steady:
        _check_pool(llm, prompts, output_lens[0])
    for stream, (ids, output_len) in enumerate(zip(prompts, output_lens, strict=True)):
        params = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
        for request in llm._settler.settle(range(stream, stream + 1), ids, params, None):
            worker.add(request)
    begun: set[int] = set()
    while steady and len(begun) < len(prompts):
        for outputs in worker.step():
            begun.update(outputs.stream_ids[outputs.tokens >= 0].tolist())


def _workload(settings: Settings, args: argparse.Namespace) -> tuple[list[np.ndarray], list[int]]:
    """Prompts and output lengths; in steady decode outputs that have not ended when the trace does.

    Raises ConfigError for what cannot be profiled with these settings: before the model is loaded.
    """
    if settings.engine.device == "null":
        raise ConfigError("--device null runs no model: there is nothing to profile (see bench host)")
    check_context(args, settings.scheduler.context_length)
    ratio, vocab_size = args.random_range_ratio, settings.model.vocab_size
    prompts, output_lens = draw_workload(
        args.num_prompts, args.random_input_len, args.random_output_len or 1, ratio, vocab_size, args.seed
    )
    if args.random_output_len is None:
        output_lens = [_steady_output_len(settings.scheduler, args, prompts)] * len(prompts)
    return prompts, output_lens


def _steady_output_len(
    scheduler: SchedulerConfig, args: argparse.Namespace, prompts: list[np.ndarray]
) -> int:
    """Tokens that no request can have reached when the trace ends."""
    num_tokens, longest = sum(map(len, prompts)), max(map(len, prompts))
    if len(prompts) > scheduler.max_running_requests:
        raise ConfigError(
            f"--num-prompts {len(prompts)}: {scheduler.max_running_requests} decode at once "
            "(--max-running-requests)"
        )
    per_step = scheduler.max_prefill_tokens
    if scheduler.chunked_prefill_size > 0:
        per_step = min(per_step, scheduler.chunked_prefill_size)
    prefill_steps = 2 * -(-num_tokens // per_step) + 2  # a step takes at least half of what it may
    if longest > per_step:
        prefill_steps += len(prompts)  # without chunks such a prompt has a step of its own
    output_len: int = prefill_steps + args.warm_up_steps + 2 * (args.steps + _CUT) + 2
    if longest + output_len > scheduler.context_length:
        raise ConfigError(
            f"a prompt of {longest} tokens and {output_len} steps (--steps twice, timed and traced, and "
            f"those before) pass the context of {scheduler.context_length}: lower --steps, --warm-up-steps "
            "or --random-input-len"
        )
    return output_len


def _check_pool(llm: Any, prompts: list[np.ndarray], output_len: int) -> None:
    page_size, pool = llm.settings.cache.page_size, llm.info["max_total_num_tokens"]
    needed = sum(-(-(len(p) + output_len) // page_size) for p in prompts) * page_size
    if needed > pool:
        raise ConfigError(
            f"{len(prompts)} requests need {needed} tokens of KV for their prompts and {output_len} steps, "
            f"but the pool holds {pool}: lower --num-prompts, --steps or --warm-up-steps"
        )


def profile_steps(llm: Any, args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Time `args.steps` steps without the profiler, trace as many, and write the trace to `path`."""
    from phalanx.microbench.named_ranges import named_ranges
    from phalanx.microbench.step_trace import breakdown, host_busy_ms, read_trace

    worker, settings = llm._worker, llm.settings
    mixed = args.random_output_len is not None
    _run_steps(worker, args.warm_up_steps, mixed=mixed)
    start = time.perf_counter()
    _run_steps(worker, args.steps, mixed=mixed)
    untraced_ms = (time.perf_counter() - start) / args.steps * 1e3
    with named_ranges(worker):
        _trace(worker, args.steps + _CUT, settings.engine.device == "cuda", path, mixed=mixed)
    found = breakdown(*read_trace(path))
    return {
        "model": args.model,
        "dtype": settings.engine.dtype,
        "device": settings.engine.device,
        "attention_backend": settings.engine.attention_backend,
        "cuda_graph": settings.engine.cuda_graph,
        "overlap": settings.engine.overlap,
        "start_up_s": _rounded(llm.info["startup_phases_s"]),
        "running": int(worker.stats()["running"]),
        "steps": found.num_steps,
        "untraced_step_ms": round(untraced_ms, 4),
        "step_ms": round(found.step_ms, 4),
        "groups_ms": _rounded(found.groups_ms),
        "idle_between_steps_ms": round(found.between_ms, 4),
        "names_ms": _rounded(found.names_ms),
        "host_ms": _rounded(found.host_ms),
        "host_busy_ms": round(host_busy_ms(found.host_ms), 4),
        "trace": str(path),
    }


def _run_steps(worker: Any, num_steps: int, *, mixed: bool) -> None:
    """mixed: raise ConfigError once no prompt waits any more."""
    for _ in range(num_steps):
        worker.step()
        if mixed and not worker.scheduler.num_queued:
            raise ConfigError("no prompt was waiting any more: raise --num-prompts")


def _trace(worker: Any, num_steps: int, on_cuda: bool, path: Path, *, mixed: bool) -> None:
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
    # A CPU engine runs steps on a thread of its own, which a profiler does not see unless asked to.
    config = _ExperimentalConfig(profile_all_threads=not on_cuda)
    with profile(activities=activities, experimental_config=config, acc_events=True) as prof:
        _run_steps(worker, num_steps, mixed=mixed)
        if on_cuda:
            torch.cuda.synchronize()
    prof.export_chrome_trace(str(path))


def _drain(worker: Any, num_streams: int) -> None:
    worker.abort(range(num_streams))
    worker.pending_outputs()
    while worker.busy:
        worker.step()


def _leave() -> None:
    """End the process at once, with all that was printed and written in place.

    A process that has traced a GPU sometimes aborts ("free(): invalid pointer") after its last line, and its
    exit code says that the command failed: the CUDA runtime's exit handler releases the context, CUPTI then
    hands its last buffers to PyTorch's profiler, and that one's own state has been destroyed already.
    TEARDOWN_CUPTI=1 avoids it, but then graphs must not be replayed any more in some versions of CUDA.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


def print_breakdown(result: dict[str, Any]) -> None:
    """Tables of `profile_steps`' result on standard output."""
    from rich.console import Console
    from rich.table import Table

    step_ms, console = result["step_ms"], Console()
    where = "the GPU" if result["device"] == "cuda" else "the engine's thread"
    print(f"{result['model']}, {result['running']} requests running")
    table = Table("", "ms", "share", title=f"{where} in a step")
    labels = {"elementwise": "norms, RoPE, KV store, activation", "copies": "copies and fills"}
    for name, ms in result["groups_ms"].items():
        table.add_row(labels.get(name, name), f"{ms:.3f}", f"{ms / step_ms:.1%}")
    between = result["idle_between_steps_ms"]
    table.add_row("  of it between steps", f"{between:.3f}", f"{between / step_ms:.1%}")
    table.add_section()
    table.add_row(f"step (mean of {result['steps']})", f"{step_ms:.3f}", "100.0%")
    table.add_row("step before tracing", f"{result['untraced_step_ms']:.3f}", "")
    console.print(table)

    # Of the host's own turn: beside a CPU engine's thread it may take longer than the step that is traced.
    busy = result["host_busy_ms"]
    turn_ms = busy + result["host_ms"].get("read", 0.0) or math.inf
    table = Table("", "ms", "share of its turn", title="the host in a step")
    for name, ms in result["host_ms"].items():
        inside = name in ("upload", "enter rows", "graph replay")
        label = {"read": "read (waits for the device)"}.get(name, name)
        table.add_row(f"  of it {label}" if inside else label, f"{ms:.3f}", f"{ms / turn_ms:.1%}")
    table.add_section()
    table.add_row("all but read", f"{busy:.3f}", f"{busy / turn_ms:.1%}")
    console.print(table)

    table = Table("", "ms", title="kernels" if result["device"] == "cuda" else "ranges")
    for name, ms in result["names_ms"].items():
        table.add_row(name, f"{ms:.3f}")
    console.print(table)
    print(f"trace: {result['trace']}")
