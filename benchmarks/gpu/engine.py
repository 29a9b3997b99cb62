"""Measure the CUDA engine with dummy weights: offline throughput, steady decode and what fills a step.

usage: python benchmarks/gpu/engine.py OUTPUT_FOLDER [--parts offline:qwen3-0.6b:triton,...] [--repeats 3]

A part is offline:MODEL:BACKEND[:FLAG...]: 5000 prompts of 1-32 tokens in and 1-128 out through
LLM.generate, ids in and ids out, then steady decode by the same engine, and the model's linear layers alone
in a CUDA graph, so that the step can be set against them and the KV bytes. FLAG is `eager` (no CUDA
graphs), `serial` (no overlap), `page1`, `mixed` (also steps in which some 64 requests arrive and end), or
naive, torch or triton (who builds FlashInfer's page lists). Each part is a process of its own. Its numbers
are added to OUTPUT_FOLDER/engine.jsonl; a part that stands there is not run again. Ends with a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from common import HBM_BYTES_PER_S, add, device_facts, dummy_llm, median_us, read

PARTS = (
    "offline:qwen3-0.6b:triton",
    "offline:qwen3-0.6b:flashinfer",
    "offline:llama-3-8b:triton",
    "offline:llama-3-8b:flashinfer",
    "offline:qwen3-0.6b:triton:eager",
)
# Names of device kernels -> where their time belongs.
GROUPS = (
    ("gemm", ("gemm", "nvjet", "cutlass", "splitk", "cublas")),
    ("attention", ("attend_", "merge_", "find_rows", "rank_rows", "BatchPrefill", "PagedKV")),
    ("sampling", ("reduce_chunks", "choose_tokens")),
    ("prep", ("prepare_lanes", "copy_rows", "scan_blocks", "Memcpy", "Memset", "index")),
    ("elementwise", ("norm_rows", "rotate", "rope", "silu_mul")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=480)
    parser.add_argument("--run-part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "engine.jsonl"
    if args.run_part:
        record = offline(args.run_part, args.repeats)
        add(results, record)
        return 0
    failed = False
    for part in args.parts.split(","):
        if part in {record["part"] for record in read(results)}:
            continue
        start = time.perf_counter()
        failed |= not run_part(part, args, results)
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    print_table(read(results))
    return int(failed)


def run_part(part: str, args: argparse.Namespace, results: Path) -> bool:
    command = [__file__, str(args.folder), "--run-part", part, "--repeats", str(args.repeats)]
    log = args.folder / f"engine-{part.replace(':', '-')}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, timeout=args.timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    last = log.read_text(errors="replace").strip().splitlines()[-12:]
    print("\n".join(last), flush=True)
    # What counts is the record: a process that has used torch's profiler may die after its last line.
    if code:
        print(f"{part}: exit code {code}", flush=True)
    return any(record["part"] == part for record in read(results))


def offline(part: str, repeats: int) -> dict[str, Any]:
    from phalanx.microbench.offline import draw_workload, measure
    from phalanx.runtime.step_times import summary_ms

    _, model, backend, *flags = part.split(":")
    start = time.perf_counter()
    llm = dummy_llm(
        model,
        attention_backend=backend,
        page_size=1 if "page1" in flags else None,
        disable_cuda_graph="eager" in flags,
        disable_overlap_schedule="serial" in flags,
        kv_indices_backend=next((name for name in ("naive", "torch", "triton") if name in flags), None),
    )
    record: dict[str, Any] = {"part": part, "start_up_s": time.perf_counter() - start, **device_facts()}
    record["phases_s"] = llm.info["startup_phases_s"]
    record["pool_tokens"] = llm.info["max_total_num_tokens"]
    prompts, lens = draw_workload(5000, 32, 128, 0.0, llm.settings.model.vocab_size, 42)
    measure(llm, prompts[:200], [min(n, 8) for n in lens[:200]], progress=False)
    times = [measure(llm, prompts, lens, progress=False) for _ in range(repeats)]
    record["durations_s"] = times
    record["req_per_s"] = [len(prompts) / t for t in times]
    record["output_tok_per_s"] = sum(lens) / float(np.median(times))
    gc.disable()  # as LLM.generate does
    record["host_time_between_steps_ms"] = summary_ms(llm.host_times(), "between_steps")
    record["linears_ms"] = linears_ms(llm)
    record["steady"] = steady_decode(llm)
    kv_ms = record["steady"]["mean_context"] * record["steady"]["kv_bytes_per_token_ms"]
    record["steady"]["floor_ms"] = record["linears_ms"] + kv_ms
    record["steady"]["step_to_floor"] = record["steady"]["step_ms"] / record["steady"]["floor_ms"]
    if "mixed" in flags:
        record["mixed"] = mixed_steps(llm)
    print(json.dumps(record, indent=1))
    return record


def steady_decode(llm: Any, num_requests: int = 4096, first: int = 48, last: int = 112) -> dict[str, Any]:
    """Requests of 32 tokens in, all decoding: steps `first` .. `last` - 1 after the last prompt, 16 traced.

    They ask for 256 tokens, or for what the pool holds of all of them at once.
    """
    from phalanx.core.sampling_params import SamplingParams

    rng = np.random.default_rng(1)
    vocab = llm.settings.model.vocab_size
    output_len = min(256, llm.info["max_total_num_tokens"] // num_requests - 48)
    params = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
    worker = llm._worker
    for i in range(num_requests):
        ids = rng.integers(0, vocab, 32).astype(np.int32)
        for request in llm._settler.settle(range(i, i + 1), ids, params, None):
            worker.add(request)
    while worker.scheduler.num_queued or worker.scheduler._partial is not None:
        worker.step()
    for _ in range(first):
        worker.step()
    host = HostTimes(worker)
    context = mean_context(worker)
    start = time.perf_counter()
    for _ in range(last - first):
        worker.step()
    step_ms = (time.perf_counter() - start) / (last - first) * 1e3
    context = (context + mean_context(worker)) / 2
    host.stop()
    traced = trace(worker, num_steps=16)
    worker.abort(range(num_requests))
    worker.pending_outputs()
    while worker.busy:
        worker.step()
    config = llm.settings.model
    kv_bytes = 2 * 2 * config.num_kv_heads * config.head_dim * config.num_layers * num_requests
    return {
        "output_len": output_len,
        "step_ms": step_ms,
        "mean_context": context,
        "kv_bytes_per_token_ms": kv_bytes / HBM_BYTES_PER_S * 1e3,  # of one token of every row
        **host.summary(),
        **traced,
    }


def mean_context(worker: Any) -> float:
    """Tokens that the rows in use hold on average; waits for the device."""
    lens = worker._engine._rows.seq_lens
    return float(lens[worker.scheduler.table.used_rows()].float().mean())


def linears_ms(llm: Any, num_tokens: int = 4096, repeats: int = 12) -> float:
    """Median device ms of the model's linear layers alone, in one CUDA graph, on random input."""
    import torch

    engine, config = llm._worker._engine, llm.settings.model
    model, logits = engine._model, engine._logits[:num_tokens]
    widths = config.hidden_size, config.num_q_heads * config.head_dim, config.intermediate_size
    with torch.inference_mode():
        hidden, heads, wide = (
            torch.randn(num_tokens, width, dtype=logits.dtype, device=logits.device) for width in widths
        )

        def run() -> None:
            for layer in model.layers:
                layer.attention.qkv(hidden)
                layer.attention.out(heads)
                layer.mlp.gate_up(hidden)
                layer.mlp.down(wide)
            model.head.into(hidden, logits)

        return median_us([run], repeats) / 1e3


def mixed_steps(llm: Any, num_requests: int = 12000, first: int = 100, last: int = 130) -> dict[str, Any]:
    """The offline workload with more requests: all rows decode, and as many prompts enter as outputs end."""
    from phalanx.core.sampling_params import SamplingParams
    from phalanx.microbench.offline import draw_workload

    prompts, lens = draw_workload(num_requests, 32, 128, 0.0, llm.settings.model.vocab_size, 7)
    worker = llm._worker
    for i, (ids, n) in enumerate(zip(prompts, lens, strict=True)):
        params = SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True)
        for request in llm._settler.settle(range(i, i + 1), ids, params, None):
            worker.add(request)
    for _ in range(first):
        worker.step()
    host = HostTimes(worker)
    before = worker.scheduler.num_queued
    start = time.perf_counter()
    for _ in range(last - first):
        worker.step()
    step_ms = (time.perf_counter() - start) / (last - first) * 1e3
    arrivals = (before - worker.scheduler.num_queued) / (last - first)
    host.stop()
    traced = trace(worker, num_steps=16)
    worker.abort(range(num_requests))
    worker.pending_outputs()
    while worker.busy:
        worker.step()
    return {"arrivals_per_step": arrivals, "step_ms": step_ms, **host.summary(), **traced}


class HostTimes:
    """Host time of planning, launching and applying, taken around the worker's own calls."""

    def __init__(self, worker: Any) -> None:
        self._undo: list[tuple[Any, str]] = []
        self._seconds: dict[str, list[float]] = {}
        for owner, name in (
            (worker.scheduler, "plan"),
            (worker._engine, "launch"),
            (worker.scheduler, "apply"),
        ):
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        real, seconds = getattr(owner, name), self._seconds.setdefault(name, [])

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return real(*args)
            finally:
                seconds.append(time.perf_counter() - start)

        setattr(owner, name, timed)
        self._undo.append((owner, name))

    def stop(self) -> None:
        for owner, name in self._undo:
            delattr(owner, name)

    def summary(self) -> dict[str, float]:
        return {f"host_{name}_ms": float(np.median(s)) * 1e3 for name, s in self._seconds.items()}


def trace(worker: Any, num_steps: int) -> dict[str, Any]:
    """Device time of a step by group, and how long the device has nothing to do.

    idle_between: from the last kernel of a step to the first of the next, as a share of the step.
    idle: all time in which nothing runs, gaps between the kernels of one step included.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(num_steps):
            worker.step()
        worker._engine.close()  # waits; the engine goes on working afterwards
    events = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in prof.profiler.kineto_results.events()
        if e.device_type().name == "CUDA" and "Synchronize" not in e.name()
    )
    starts = [i for i, event in enumerate(events) if "prepare_lanes" in event[2]]
    num_whole = len(starts) - 2  # the first and the last may be cut
    if num_whole < 1:
        return {"trace": "no whole step in the trace"}
    begin, end = starts[1], starts[-1]
    inside = events[begin:end]
    span = events[end][0] - events[begin][0]
    between = sum(gap_before(events, i) for i in starts[2:])
    by_group: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for first, last, name in inside:
        by_group[group_of(name)] += last - first
        by_name[name[:70]] += last - first
    return {
        "traced_step_ms": span / num_whole / 1e6,
        "idle_between": between / span,
        "idle": 1 - busy(inside) / span,
        "groups_ms": {name: ns / num_whole / 1e6 for name, ns in by_group.most_common()},
        "kernels_ms": {name: ns / num_whole / 1e6 for name, ns in by_name.most_common(14)},
    }


def gap_before(events: list[tuple[int, int, str]], index: int) -> int:
    """Idle nanoseconds between the last compute kernel before this one and it; copies count as idle."""
    previous = index - 1
    while "Memcpy" in events[previous][2] or "Memset" in events[previous][2]:
        previous -= 1
    return max(0, events[index][0] - events[previous][1])


def busy(events: list[tuple[int, int, str]]) -> int:
    """Nanoseconds in which at least one of them runs."""
    total, reached = 0, 0
    for first, last, _ in events:
        total += max(0, last - max(first, reached))
        reached = max(reached, last)
    return total


def group_of(name: str) -> str:
    return next((group for group, words in GROUPS if any(word in name for word in words)), "other")


def print_table(records: list[dict[str, Any]]) -> None:
    print(f"{'part':<38} {'req/s (median)':>14} {'range':>16} {'step ms':>8} {'idle':>7} {'start s':>8}")
    for record in records:
        rates, steady = sorted(record["req_per_s"]), record["steady"]
        idle = f"{steady['idle_between']:7.2%}" if "idle_between" in steady else "-"
        print(
            f"{record['part']:<38} {np.median(rates):14.1f} {rates[0]:7.1f}-{rates[-1]:<8.1f} "
            f"{steady['step_ms']:8.2f} {idle:>7} {record['start_up_s']:8.1f}"
        )
        if "groups_ms" in steady:
            print("    ms of a step: " + ", ".join(f"{k} {v:.2f}" for k, v in steady["groups_ms"].items()))
        for name in ("steady", "mixed"):
            times = {k: v for k, v in record.get(name, {}).items() if isinstance(v, float)}
            if times:
                print(f"    {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in times.items()))


if __name__ == "__main__":
    sys.exit(main())
