"""Measure the CUDA engine with dummy weights: offline throughput, steady decode and what fills a step.

usage: python benchmarks/gpu/engine.py OUTPUT_FOLDER [--parts offline:qwen3-0.6b:triton,...] [--repeats 3]

A part is offline:MODEL:BACKEND[:FLAG...]: 5000 prompts of 1-32 tokens in and 1-128 out through
LLM.generate, ids in and ids out, then steady decode by the same engine (4096 requests, 32 in, exactly 256 out
or what the pool holds), and the model's linear layers alone in a CUDA graph, so that the step can be set
against them and the KV bytes. FLAG is `eager` (no CUDA graphs), `serial` (no overlap), `page1`, `mixed` (also
steps in which some 64 requests arrive and end), or naive, torch or triton (who builds FlashInfer's page
lists). Each part is a process of its own, and its record keeps all runs of each number. Records are added to
OUTPUT_FOLDER/engine.jsonl; a part that stands there is not run again. Ends with a table, medians with ranges.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import add, device_facts, dummy_llm, median_and_range, read
from steps import Window, linears_ms, mixed_steps, steady_decode

PARTS = (
    "offline:qwen3-0.6b:triton",
    "offline:qwen3-0.6b:flashinfer",
    "offline:llama-3-8b:triton",
    "offline:llama-3-8b:flashinfer",
    "offline:qwen3-0.6b:triton:eager",
)
# So that the pool of an H200 holds 4096 requests of 288 tokens; of llama-3-8b no fraction does.
MEMORY_FRACTIONS = {"qwen3-0.6b": 0.93}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each number")
    parser.add_argument("--timeout-s", type=float, default=480)
    parser.add_argument("--num-prompts", type=int, default=5000, help="of the offline workload")
    parser.add_argument("--num-mixed", type=int, default=12000, help="requests for mixed steps")
    for name, default in vars(Window()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="steady decode")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script")
    parser.add_argument("--pool-tokens", type=int, help="instead of the memory's share")
    parser.add_argument("--run-part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "engine.jsonl"
    if args.run_part:
        add(results, offline(args.run_part, args))
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
    command = [sys.executable, __file__, *sys.argv[1:], "--run-part", part]
    log = args.folder / f"engine-{part.replace(':', '-')}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=args.timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    last = log.read_text(errors="replace").strip().splitlines()[-12:]
    print("\n".join(last), flush=True)
    # What counts is the record: a process that has used torch's profiler may die after its last line.
    if code:
        print(f"{part}: exit code {code}", flush=True)
    return any(record["part"] == part for record in read(results))


def offline(part: str, args: argparse.Namespace) -> dict[str, Any]:
    from phalanx.microbench.offline import draw_workload, measure
    from phalanx.runtime.step_times import summary_ms

    _, model, backend, *flags = part.split(":")
    start = time.perf_counter()
    llm = build(model, backend, flags, args)
    record: dict[str, Any] = {"part": part, "start_up_s": time.perf_counter() - start, **device_facts()}
    record["phases_s"] = llm.info["startup_phases_s"]
    record["pool_tokens"] = llm.info["max_total_num_tokens"]
    record["mem_fraction_static"] = llm.settings.cache.mem_fraction_static
    prompts, lens = draw_workload(args.num_prompts, 32, 128, 0.0, llm.settings.model.vocab_size, 42)
    measure(llm, prompts[:200], [min(n, 8) for n in lens[:200]], progress=False)
    times = [measure(llm, prompts, lens, progress=False) for _ in range(args.repeats)]
    record["durations_s"] = times
    record["req_per_s"] = [len(prompts) / t for t in times]
    record["output_tok_per_s"] = sum(lens) / float(np.median(times))
    gc.disable()  # as LLM.generate does
    record["host_time_between_steps_ms"] = summary_ms(llm.host_times(), "between_steps")
    window = Window(**{name: getattr(args, name) for name in vars(Window())})
    linears = [linears_ms(llm) for _ in range(args.repeats)] if args.device == "cuda" else []
    record["linears_ms"] = linears
    record["steady"] = [steady_decode(llm, window, run) for run in range(args.repeats)]
    if linears:
        for run in record["steady"]:
            run["floor_ms"] = float(np.median(linears)) + run["kv_ms"]
            run["step_to_floor"] = run["step_ms"] / run["floor_ms"]
    if "mixed" in flags:
        record["mixed"] = [mixed_steps(llm, args.num_mixed) for _ in range(args.repeats)]
    print(json.dumps(record, indent=1))
    return record


def build(model: str, backend: str, flags: list[str], args: argparse.Namespace) -> Any:
    more: dict[str, Any] = {"device": "cpu"} if args.device == "cpu" else {}
    if args.pool_tokens is not None:
        more["max_total_tokens"] = args.pool_tokens
    elif model in MEMORY_FRACTIONS:
        more["mem_fraction_static"] = MEMORY_FRACTIONS[model]
    return dummy_llm(
        model,
        attention_backend=backend,
        page_size=1 if "page1" in flags else None,
        disable_cuda_graph="eager" in flags,
        disable_overlap_schedule="serial" in flags,
        kv_indices_backend=next((name for name in ("naive", "torch", "triton") if name in flags), None),
        **more,
    )


def print_table(records: list[dict[str, Any]]) -> None:
    """Medians with ranges over the runs of a part."""
    print(f"{'part':<40} {'req/s':>26} {'step ms':>24} {'idle between steps':>26} {'start s':>8}")
    for record in records:
        steady = record["steady"]
        print(
            f"{record['part']:<40} {median_and_range(record['req_per_s'], '.1f'):>26} "
            f"{median_and_range([run['step_ms'] for run in steady]):>24} "
            f"{median_and_range([run.get('idle_between') for run in steady], '.3%'):>26} "
            f"{record['start_up_s']:8.1f}"
        )
        run = steady[0]
        print(
            f"    linears alone {median_and_range(record['linears_ms'])} ms; outputs of {run['output_len']}; "
            f"steps {run['first_step']}-{run['last_step']} and {run['num_traced']} traced, {len(steady)} runs"
        )
        for name in ("steady", "mixed"):
            print_runs(name, record.get(name, []))


def print_runs(name: str, runs: list[dict[str, Any]]) -> None:
    """A run without a whole step in its trace lacks the trace's figures."""
    if not runs:
        return
    figures = dict.fromkeys(k for run in runs for k, v in run.items() if isinstance(v, float))
    cells = (f"{k} {median_and_range([run.get(k) for run in runs])}" for k in figures)
    print(f"    {name}: " + ", ".join(cells))
    groups = {group for run in runs for group in run.get("groups_ms", {})}
    times = {g: [run["groups_ms"].get(g, 0.0) for run in runs if "groups_ms" in run] for g in groups}
    if times:
        ranked = sorted(times.items(), key=lambda item: -float(np.median(item[1])))
        print(f"    {name}, traced ms: " + ", ".join(f"{g} {median_and_range(t, '.2f')}" for g, t in ranked))


if __name__ == "__main__":
    sys.exit(main())
