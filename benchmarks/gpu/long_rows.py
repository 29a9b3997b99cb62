"""Decode attention when a few rows of a wide batch are far longer than the rest.

usage: python benchmarks/gpu/long_rows.py OUTPUT_FOLDER [--parts kernel,all-long,step] [--rows 4096]
           [--repeats 15]

kernel: device microseconds of one layer's attention over rows of 16-150 tokens of which some are longer: all
in one launch, and with rows above a threshold cut into pieces (`find_long_rows`, timed alone as well, since
it runs once a step); beside them the time to read that K and V at 4.3 TB/s. all-long: the same for narrower
batches of long rows alone. step: qwen3-0.6b decodes 4095 rows of about 100 tokens and one of 32,000, through
the engine, with and without. Numbers are added to OUTPUT_FOLDER/long_rows.jsonl; the parts that stand there
are not run again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import HBM_BYTES_PER_S, device_facts, read

from phalanx.kernels import decode_attention, find_long_rows

SHAPES = {"llama-3-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128)}
# Number of long rows, tokens of each.
CASES = ((0, 0), (1, 2048), (1, 4096), (1, 8192), (1, 32768), (1, 131072), (16, 4096), (16, 8192), (64, 2048))
# Threshold and piece; None: rows are not cut.
CUTS = (None, (1024, 512), (2048, 512), (4096, 256), (4096, 512), (4096, 1024))
# Rows, tokens of each on average; uniform.
ALL_LONG = ((8, 2048), (32, 2048), (128, 2048), (280, 2600), (280, 1024), (512, 1024))
ALL_LONG_CUTS = (None, (1024, 512), (2048, 512), (4096, 512))
PAGE_SIZE = 16
MAX_CONTEXT = 131072


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default="kernel,all-long,step")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "long_rows.jsonl"
    for part in args.parts.split(","):
        if part in {record["part"] for record in read(results)}:
            continue
        run = {"kernel": kernel, "all-long": all_long, "step": step}[part]
        record = {"part": part, **device_facts(), **run(args)}
        with results.open("a") as file:
            print(json.dumps(record), file=file)
    return 0


def kernel(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for model, (num_q, num_kv, dim) in SHAPES.items():
        print(f"{model:<12} {'long rows':>12} {'floor':>8}", *(f"{cut or 'whole'!s:>12}" for cut in CUTS))
        for num_long, length in CASES:
            batch = Batch(args.rows, num_long, length, num_q, num_kv, dim)
            times = {str(cut): batch.time(cut, args.repeats) for cut in CUTS}
            found[f"{model} {num_long}x{length}"] = {"floor_us": batch.floor_us, "us": times}
            cells = (f"{times[str(cut)]:12.1f}" for cut in CUTS)
            print(f"{'':<12} {f'{num_long} x {length}':>12} {batch.floor_us:8.1f}", *cells, flush=True)
        lens = torch.full((args.rows,), 84, dtype=torch.int32, device="cuda")
        alone = median_us(functools.partial(find_long_rows, lens, MAX_CONTEXT), args.repeats)
        found[f"{model} find_long_rows"] = {"us": alone}
        print(f"find_long_rows alone: {alone:.1f} us", flush=True)
    return {"kernel": found}


def all_long(args: argparse.Namespace) -> dict[str, Any]:
    found, (num_q, num_kv, dim) = {}, SHAPES["llama-3-8b"]
    print(f"{'rows x mean':>14} {'floor':>8}", *(f"{cut or 'whole'!s:>12}" for cut in ALL_LONG_CUTS))
    for num_rows, mean in ALL_LONG:
        lens = np.random.default_rng(3).integers(1, 2 * mean, num_rows)
        batch = Batch(num_rows, num_rows, lens, num_q, num_kv, dim)
        times = {str(cut): batch.time(cut, args.repeats) for cut in ALL_LONG_CUTS}
        found[f"{num_rows}x{mean}"] = {"floor_us": batch.floor_us, "us": times}
        cells = (f"{times[str(cut)]:12.1f}" for cut in ALL_LONG_CUTS)
        print(f"{f'{num_rows} x {mean}':>14} {batch.floor_us:8.1f}", *cells, flush=True)
    return {"all_long": found}


class Batch:
    """Random pages, queries and K and V of bf16; long rows stand at random places."""

    def __init__(
        self, num_rows: int, num_long: int, length: int | np.ndarray, num_q: int, num_kv: int, dim: int
    ) -> None:
        rng = np.random.default_rng(5)
        lens = rng.integers(16, 151, num_rows)
        lens[rng.permutation(num_rows)[:num_long]] = length
        pages = -(-lens // PAGE_SIZE)
        first = 1 + np.cumsum(pages) - pages
        order = np.concatenate(([0], 1 + rng.permutation(int(pages.sum())))).astype(np.int32) * PAGE_SIZE
        table = torch.zeros(num_rows, int(pages.max()) * PAGE_SIZE, dtype=torch.int32)
        for row, (start, count) in enumerate(zip(first.tolist(), pages.tolist(), strict=True)):
            table[row, : count * PAGE_SIZE : PAGE_SIZE] = torch.from_numpy(order[start : start + count])
        slots = (int(pages.sum()) + 1) * PAGE_SIZE
        kv = dict(dtype=torch.bfloat16, device="cuda")
        self.k, self.v = (torch.randn(slots, num_kv, dim, **kv) for _ in range(2))
        self.q = torch.randn(num_rows, num_q, dim, **kv)
        self.out = torch.empty_like(self.q)
        self.table = table.cuda()
        self.rows = torch.arange(num_rows, device="cuda")
        self.lens = torch.from_numpy(lens.astype(np.int32)).cuda()
        self.floor_us = float(lens.sum()) * num_kv * dim * 2 * 2 / HBM_BYTES_PER_S * 1e6
        self.whole = self.attend(None).clone()

    def attend(self, long_rows: Any) -> torch.Tensor:
        args = (self.q, self.k, self.v, self.table, self.rows, self.lens)
        return decode_attention(*args, page_size=PAGE_SIZE, out=self.out, long_rows=long_rows)

    def time(self, cut: tuple[int, int] | None, repeats: int) -> float:
        """Median us, after a check against whole rows."""
        long_rows = None
        if cut is not None:
            long_rows = find_long_rows(
                self.lens, MAX_CONTEXT, long_tokens=cut[0], times_mean=0, piece_tokens=cut[1]
            )
        self.out.fill_(torch.nan)
        torch.testing.assert_close(self.attend(long_rows), self.whole, rtol=2e-2, atol=2e-3)
        return median_us(lambda: self.attend(long_rows), repeats)


def median_us(call: Callable[[], object], repeats: int, calls: int = 8) -> float:
    """Median over replays of a CUDA graph of several calls, per call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return float(np.median(times[2:]))


def step(args: argparse.Namespace) -> dict[str, Any]:
    from phalanx.runtime.llm import LLM

    llm = LLM(
        "qwen3-0.6b",
        load_format="dummy",
        skip_tokenizer_init=True,
        progress=False,
        context_length=40960,
        max_running_requests=args.rows,
        attention_backend="triton",
        disable_cuda_graph=True,  # so that one engine runs both; overlapped, the device is the slower side
    )
    return {"step_ms": {f"{n} long": step_ms(llm, args.rows, n) for n in (0, 1)}}


def step_ms(llm: Any, num_rows: int, num_long: int, long_len: int = 32000) -> dict[str, list[float]]:
    """Mean ms of decode steps, rows cut and whole in turn."""
    from phalanx.attention import triton as backend
    from phalanx.core.sampling_params import SamplingParams

    rng, worker = np.random.default_rng(1), llm._worker
    params = SamplingParams(max_new_tokens=140, temperature=0.0, ignore_eos=True)
    for i in range(num_rows):
        length = long_len if i < num_long else 64
        ids = rng.integers(0, llm.settings.model.vocab_size, length).astype(np.int32)
        for request in llm._settler.settle(range(i, i + 1), ids, params, None):
            worker.add(request)
    while worker.scheduler.num_queued or worker.scheduler._partial is not None:
        worker.step()
    gc.disable()
    cut, found = backend.find_long_rows, {"cut": [], "whole": []}
    for name in ("cut", "whole") * 2:
        backend.find_long_rows = cut if name == "cut" else lambda *_: None  # type: ignore[assignment]
        for _ in range(3):
            worker.step()
        start = time.perf_counter()
        for _ in range(16):
            worker.step()
        found[name].append((time.perf_counter() - start) / 16 * 1e3)
    backend.find_long_rows = cut
    gc.enable()
    worker.abort(range(num_rows))
    worker.pending_outputs()
    while worker.busy:
        worker.step()
    print(f"qwen3-0.6b step, {num_long} long: {found}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
