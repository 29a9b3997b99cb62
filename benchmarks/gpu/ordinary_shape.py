"""An ordinary shape on the GPU: a few hundred requests, prompts of up to 4096 tokens, outputs of up to 2048.

usage: python benchmarks/gpu/ordinary_shape.py OUTPUT_FOLDER [--variants default,baseline] [--model NAME]

All requests arrive at once, go through the worker's own loop (no HTTP, no tokenizer), and run to their
length, greedily. "default" is what the settings choose; "chunked" has --chunked-prefill-size 2048;
"baseline" is the loop of the origin: FlashInfer, naive page lists, page size 1, no CUDA graphs, no overlap. A
token's time is when the loop hands it out. Numbers are added to OUTPUT_FOLDER/ordinary_shape.jsonl; what
stands there is not run again. Ends with a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from engine import device_facts, read

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
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
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--num-prompts", type=int, default=400)
    parser.add_argument("--input-len", type=int, default=4096)
    parser.add_argument("--output-len", type=int, default=2048)
    parser.add_argument("--device", help="of the engine, e.g. cpu to try the script; default: as settled")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "ordinary_shape.jsonl"
    for variant in args.variants.split(","):
        if variant not in {record["variant"] for record in read(results)}:
            record = measure(variant, args)
            with results.open("a") as file:
                print(json.dumps(record), file=file)
    print_table(read(results))
    return 0


def measure(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from phalanx.microbench.offline import draw_workload
    from phalanx.runtime.llm import LLM
    from phalanx.runtime.step_times import difference, summary_ms

    llm = LLM(
        args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        progress=False,
        random_seed=0,
        context_length=args.input_len + args.output_len,
        max_running_requests=args.num_prompts,
        device=args.device or "auto",
        **VARIANTS[variant],
    )
    vocab = llm.settings.model.vocab_size
    prompts, lens = draw_workload(args.num_prompts, args.input_len, args.output_len, 0.0, vocab, 42)
    gc.disable()  # as LLM.generate does
    drive(llm, prompts[:WARM_UP], [min(n, 16) for n in lens[:WARM_UP]])
    before, steps_before = llm.host_times(), llm._worker.num_steps
    memory = allocator_counts()
    duration, tokens = drive(llm, prompts, lens)
    gc.enable()
    if tokens["counts"] != lens:
        raise RuntimeError("an output has another length than asked for")
    record = {
        "variant": variant,
        **(device_facts() if torch.cuda.is_available() else {}),
        "duration_s": duration,
        "req_per_s": len(prompts) / duration,
        "output_tok_per_s": sum(lens) / duration,
        "num_steps": llm._worker.num_steps - steps_before,
        "allocator": {name: n - memory[name] for name, n in allocator_counts().items()},
        "pool_tokens": llm.info["max_total_num_tokens"],
        "ttft_ms": percentiles(tokens["ttft_s"]),
        "itl_ms": percentiles(tokens["itl_s"]),
        "host_time_between_steps_ms": summary_ms(difference(llm.host_times(), before), "between_steps"),
    }
    llm._worker._engine.close()
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return record


def allocator_counts() -> dict[str, int]:
    """How often torch asked the device for memory, and gave back what it kept; both wait for the device."""
    import torch

    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {name: stats.get(name, 0) for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}


def drive(llm: Any, prompts: list[np.ndarray], lens: list[int]) -> tuple[float, dict[str, Any]]:
    """Seconds until all have ended; time to first token and all gaps between tokens of a request, seconds."""
    from phalanx.core.sampling_params import SamplingParams

    worker = llm._worker
    start = time.perf_counter()
    for i, (ids, n) in enumerate(zip(prompts, lens, strict=True)):
        params = SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True)
        for request in llm._settler.settle(range(i, i + 1), ids, params, None):
            worker.add(request)
    streams, times = [], []
    while worker.busy:
        steps = worker.step()
        now = time.perf_counter() - start
        for outputs in steps:
            got = outputs.stream_ids[outputs.tokens >= 0]
            streams.append(got)
            times.append(np.full(len(got), now))
        worker.sent()
    duration = time.perf_counter() - start
    ids, at = np.concatenate(streams), np.concatenate(times)
    order = np.argsort(ids, kind="stable")
    ids, at = ids[order], at[order]
    is_first = np.diff(ids, prepend=-1) != 0
    itl = np.diff(at)[~is_first[1:]]
    counts = np.bincount(ids, minlength=len(prompts)).tolist()
    return duration, {"ttft_s": at[is_first], "itl_s": itl, "counts": counts}


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    figures = {"p50": np.median(seconds), "p90": np.quantile(seconds, 0.9), "p99": np.quantile(seconds, 0.99)}
    return {name: float(value) * 1e3 for name, value in (figures | {"mean": seconds.mean()}).items()}


def print_table(records: list[dict[str, Any]]) -> None:
    print(f"{'variant':<10} {'req/s':>7} {'tok/s':>8}   TTFT P50, P99; ITL P50, P99; host mean, P99 (ms)")
    for r in records:
        host = r["host_time_between_steps_ms"]
        print(
            f"{r['variant']:<10} {r['req_per_s']:7.2f} {r['output_tok_per_s']:8.0f}   "
            f"{r['ttft_ms']['p50']:.0f}, {r['ttft_ms']['p99']:.0f}; {r['itl_ms']['p50']:.1f}, "
            f"{r['itl_ms']['p99']:.1f}; {host['mean']:.2f}, {host['p99']:.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
