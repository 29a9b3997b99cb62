"""An ordinary shape on the GPU: a few hundred requests, prompts of up to 4096 tokens, outputs of up to 2048.

usage: python benchmarks/gpu/ordinary_shape.py OUTPUT_FOLDER [--variants default,baseline] [--repeats 3]
           [--model NAME]

All requests arrive at once, go through the worker's own loop (no HTTP, no tokenizer), and run to their
length, greedily. "default" is what the settings choose; "flashinfer" has that backend; "chunked" has
--chunked-prefill-size 2048; "baseline" is the loop of the origin: FlashInfer, naive page lists, page size 1,
no CUDA graphs, no overlap. A token's time is when the loop hands it out. Each run is added to
OUTPUT_FOLDER/ordinary_shape.jsonl; what stands there is not run again. Ends with a table, and medians with
ranges. Its steps are those with at least 8192 prompt tokens, and those without any at 200 rows and more.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import add, device_facts, dummy_llm, median_and_range, read

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "flashinfer": {"attention_backend": "flashinfer"},
    "chunked": {"chunked_prefill_size": 2048},
    "baseline": {
        "attention_backend": "flashinfer",
        "kv_indices_backend": "naive",
        "page_size": 1,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
    },
}
WARM_UP = 8  # requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variants", default="default,baseline")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--num-prompts", type=int, default=400)
    parser.add_argument("--input-len", type=int, default=4096)
    parser.add_argument("--output-len", type=int, default=2048)
    parser.add_argument("--device", help="of the engine, e.g. cpu to try the script; default: as settled")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "ordinary_shape.jsonl"
    for variant in args.variants.split(","):
        done = sum(record["variant"] == variant for record in read(results))
        if done < args.repeats:
            measure(variant, args.repeats - done, results, args)
    print_table(read(results))
    return 0


def measure(variant: str, repeats: int, results: Path, args: argparse.Namespace) -> None:
    import torch

    from phalanx.microbench.offline import draw_workload
    from phalanx.runtime.step_times import difference, summary_ms

    llm = dummy_llm(
        args.model,
        context_length=args.input_len + args.output_len,
        max_running_requests=args.num_prompts,
        device=args.device or "auto",
        **VARIANTS[variant],
    )
    vocab = llm.settings.model.vocab_size
    prompts, lens = draw_workload(args.num_prompts, args.input_len, args.output_len, 0.0, vocab, 42)
    gc.disable()  # as LLM.generate does
    drive(llm, prompts[:WARM_UP], [min(n, 16) for n in lens[:WARM_UP]])
    for _ in range(repeats):
        before, memory = llm.host_times(), allocator_counts()
        run = drive(llm, prompts, lens)
        if run["counts"] != lens:
            raise RuntimeError("an output has another length than asked for")
        record = {
            "variant": variant,
            **device_facts(),
            "duration_s": run["duration_s"],
            "req_per_s": len(prompts) / run["duration_s"],
            "output_tok_per_s": sum(lens) / run["duration_s"],
            "allocator": {name: n - memory[name] for name, n in allocator_counts().items()},
            "pool_tokens": llm.info["max_total_num_tokens"],
            "ttft_ms": percentiles(run["ttft_s"]),
            "itl_ms": percentiles(run["itl_s"]),
            "steps": run["steps"],
            "host_time_between_steps_ms": summary_ms(difference(llm.host_times(), before), "between_steps"),
        }
        add(results, record)
        print(line(record), flush=True)
    gc.enable()
    llm._worker._engine.close()
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def allocator_counts() -> dict[str, int]:
    """How often torch asked the device for memory, and gave back what it kept; both wait for the device."""
    import torch

    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {name: stats.get(name, 0) for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}


def drive(llm: Any, prompts: list[np.ndarray], lens: list[int]) -> dict[str, Any]:
    """Run all: times to first token, all gaps between tokens of a request, and the steps; seconds."""
    from phalanx.core.sampling_params import SamplingParams

    worker = llm._worker
    start = time.perf_counter()
    for i, (ids, n) in enumerate(zip(prompts, lens, strict=True)):
        params = SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True)
        for request in llm._settler.settle(range(i, i + 1), ids, params, None):
            worker.add(request)
    launches = Launches(worker)
    streams, times, reads = [], [], []
    while worker.busy:
        steps = worker.step()
        now = time.perf_counter() - start
        for outputs in steps:
            reads.append(now)
            got = outputs.stream_ids[outputs.tokens >= 0]
            streams.append(got)
            times.append(np.full(len(got), now))
        worker.sent()
    duration = time.perf_counter() - start
    launches.stop()
    ids, at = np.concatenate(streams), np.concatenate(times)
    order = np.argsort(ids, kind="stable")
    ids, at = ids[order], at[order]
    is_first = np.diff(ids, prepend=-1) != 0
    return {
        "duration_s": duration,
        "ttft_s": at[is_first],
        "itl_s": np.diff(at)[~is_first[1:]],
        "counts": np.bincount(ids, minlength=len(prompts)).tolist(),
        "steps": launches.summary(np.diff(reads, prepend=0.0)),
    }


class Launches:
    """What each step held and how long its launch took, taken around the engine's own call."""

    def __init__(self, worker: Any) -> None:
        self._engine = worker._engine
        self._launch = self._engine.launch
        self._engine.launch = self._timed
        self._steps: list[tuple[int, int, float]] = []  # prompt tokens, decode rows, seconds

    def _timed(self, plan: Any) -> Any:
        start = time.perf_counter()
        handle = self._launch(plan)
        seconds = time.perf_counter() - start
        self._steps.append((len(plan.prefill.input_ids), len(plan.decode_rows), seconds))
        return handle

    def stop(self) -> None:
        del self._engine.launch

    def summary(self, step_s: np.ndarray) -> dict[str, dict[str, float]]:
        """step_s: from one step's outputs to the next one's, in the order launched."""
        tokens, rows, launch_s = (np.array(column) for column in zip(*self._steps, strict=True))
        kinds = {"prompts": tokens >= 8192, "wide decode": (tokens == 0) & (rows >= 200)}
        return {
            kind: {
                "count": int(which.sum()),
                "step_ms": float(np.median(step_s[which])) * 1e3,
                "launch_ms": float(np.median(launch_s[which])) * 1e3,
                "launch_max_ms": float(launch_s[which].max()) * 1e3,
            }
            for kind, which in kinds.items()
            if which.any()
        }


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    figures = {"p50": np.median(seconds), "p90": np.quantile(seconds, 0.9), "p99": np.quantile(seconds, 0.99)}
    return {name: float(value) * 1e3 for name, value in (figures | {"mean": seconds.mean()}).items()}


def line(r: dict[str, Any]) -> str:
    host = r["host_time_between_steps_ms"]
    steps = "; ".join(
        f"{kind}: {n['count']} x {n['step_ms']:.1f}, "
        f"launch {n['launch_ms']:.1f} (max {n['launch_max_ms']:.1f})"
        for kind, n in r["steps"].items()
    )
    return (
        f"{r['variant']:<10} {r['req_per_s']:7.2f} {r['output_tok_per_s']:8.0f}   "
        f"{r['ttft_ms']['p50']:.0f}, {r['ttft_ms']['p99']:.0f}; {r['itl_ms']['p50']:.1f}, "
        f"{r['itl_ms']['p99']:.1f}; {host['mean']:.2f}, {host['p99']:.2f}\n{'':<10} steps, ms: {steps}"
    )


def print_table(records: list[dict[str, Any]]) -> None:
    print(f"{'variant':<10} {'req/s':>7} {'tok/s':>8}   TTFT P50, P99; ITL P50, P99; host mean, P99 (ms)")
    for record in records:
        print(line(record))
    for variant in dict.fromkeys(record["variant"] for record in records):
        runs = [record for record in records if record["variant"] == variant]
        figures = {
            "req/s": [run["req_per_s"] for run in runs],
            **{f"TTFT {p}, s": [run["ttft_ms"][p] / 1e3 for run in runs] for p in ("p50", "p99")},
            **{f"ITL {p}, ms": [run["itl_ms"][p] for run in runs] for p in ("p50", "p99")},
        }
        shown = (f"{name} {median_and_range(column, '.2f')}" for name, column in figures.items())
        print(f"{variant}, {len(runs)} runs: {'; '.join(shown)}")


if __name__ == "__main__":
    sys.exit(main())
