"""The experiment of SGLang's PR #1262 end to end: what building FlashInfer's kv_indices costs a decode step.

usage: python benchmarks/gpu/seed_experiment.py OUTPUT_FOLDER [--models qwen3-0.6b,llama-3-8b]
           [--loops serial,overlapped] [--backends naive,torch,triton,fused] [--repeats 3]

Dummy bf16 weights, page size 1, `--attention-backend flashinfer --disable-cuda-graph`, 5000 prompts of 1-32
tokens in and 1-128 out, 4096 running, greedy, through LLM.generate, after 200 short ones. "serial" is
`--disable-overlap-schedule`. Host times are of all steps of a run (`Worker.stats`). Numbers are added to
OUTPUT_FOLDER/seed_experiment.jsonl; a variant that stands there is not run again. Ends with a table: medians,
with the range over the runs in brackets.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import add, device_facts, dummy_llm, median_and_range, read

LOOPS = ("serial", "overlapped")
BACKENDS = ("naive", "torch", "triton", "fused")
PHASES = ("between_steps", "kv_indices", "plan", "launch", "wait", "apply", "send")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="qwen3-0.6b,llama-3-8b")
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=5000)
    parser.add_argument("--timeout-s", type=float, default=480, help="of one model")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "seed_experiment.jsonl"
    variants = itertools.product(args.models.split(","), args.loops.split(","), args.backends.split(","))
    if args.in_process:
        for variant in variants:
            if "/".join(variant) not in {record["variant"] for record in read(results)}:
                record = measure_variant(*variant, args.num_prompts, args.repeats)
                add(results, record)
                print(json.dumps(record), flush=True)
        return 0
    failed = [not run_model(model, args) for model in args.models.split(",")]
    print_table(read(results))
    return int(any(failed))


def run_model(model: str, args: argparse.Namespace) -> bool:
    """All variants of a model in one process, so that only the first pays for loading kernels."""
    command = [sys.executable, __file__, str(args.folder), "--in-process", "--models", model]
    command += ["--loops", args.loops, "--backends", args.backends]
    command += ["--repeats", str(args.repeats), "--num-prompts", str(args.num_prompts)]
    log = args.folder / f"seed_experiment-{model}.log"
    with log.open("a") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=args.timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    if code:
        print(f"{model}: exit code {code}", *log.read_text(errors="replace").splitlines()[-12:], sep="\n")
    return code == 0


def measure_variant(model: str, loop: str, backend: str, num_prompts: int, repeats: int) -> dict[str, Any]:
    import torch

    from phalanx.microbench.offline import draw_workload, measure
    from phalanx.runtime.step_times import difference, summary_ms

    start = time.perf_counter()
    llm = dummy_llm(
        model,
        attention_backend="flashinfer",
        page_size=1,
        disable_cuda_graph=True,
        disable_overlap_schedule=loop == "serial",
        kv_indices_backend=backend,
    )
    start_up_s = time.perf_counter() - start
    prompts, lens = draw_workload(num_prompts, 32, 128, 0.0, llm.settings.model.vocab_size, 42)
    measure(llm, prompts[:200], [min(n, 8) for n in lens[:200]], progress=False)
    steps_before = llm._worker.num_steps
    times, hosts = [], []
    for _ in range(repeats):
        before = llm.host_times()
        times.append(measure(llm, prompts, lens, progress=False))
        host = difference(llm.host_times(), before)
        hosts.append({phase: summary_ms(host, phase) for phase in PHASES})
    num_steps = (llm._worker.num_steps - steps_before) / repeats
    record = {
        "variant": f"{model}/{loop}/{backend}",
        **device_facts(),
        "start_up_s": start_up_s,
        "num_prompts": num_prompts,
        "durations_s": times,
        "req_per_s": [num_prompts / t for t in times],
        "num_steps": num_steps,
        "step_ms": float(np.median(times)) / num_steps * 1e3,
        "host_ms": hosts,
    }
    llm._worker._engine.close()
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return record


def print_table(records: list[dict[str, Any]]) -> None:
    names = ("req/s", "between: mean", "P99", "indices: mean", "P99", "launch", "wait", "step")
    print(f"{'variant':<34}", *(f"{name:>22}" for name in names), "  (ms)")
    for record in records:
        columns = [record["req_per_s"]]
        for phase, figure in (
            ("between_steps", "mean"),
            ("between_steps", "p99"),
            ("kv_indices", "mean"),
            ("kv_indices", "p99"),
            ("launch", "mean"),
            ("wait", "mean"),
        ):
            columns.append([host[phase][figure] for host in record["host_ms"]])
        columns.append([record["step_ms"]])
        print(f"{record['variant']:<34}", *(f"{median_and_range(column):>22}" for column in columns))


if __name__ == "__main__":
    sys.exit(main())
