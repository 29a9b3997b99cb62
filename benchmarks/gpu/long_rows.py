"""Decode attention when a few rows of a wide batch are far longer than the rest.

usage: python benchmarks/gpu/long_rows.py OUTPUT_FOLDER [--parts kernel,step] [--rows 4096] [--repeats 15]
           [--models llama-3-8b,qwen3-0.6b]

kernel: device microseconds of a layer's attention over rows of 16-150 tokens of which some are longer, begun
longest first: all in one launch, and with rows above a threshold cut into pieces (`find_long_rows`, timed
alone as well, since it runs once a step); beside them the time to read that K and V at 4.3 TB/s. step:
qwen3-0.6b decodes 4095 rows of about 100 tokens and one of 32,000, through the engine, with and without.
Numbers are added to OUTPUT_FOLDER/long_rows.jsonl; the parts that stand there are not run again. Batches of
long rows alone: decode_shapes.py.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import DecodeRows, add, device_facts, dummy_llm, median_us, read

from phalanx.kernels import find_long_rows, longest_first

SHAPES = {"llama-3-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128)}
# Number of long rows, tokens of each.
CASES = ((0, 0), (1, 2048), (1, 4096), (1, 8192), (1, 32768), (1, 131072), (16, 4096), (16, 8192), (64, 2048))
# Threshold and piece; None: rows are not cut.
CUTS = (None, (1024, 512), (2048, 512), (2048, 256), (2048, 1024), (4096, 512), (8192, 512))
PAGE_SIZE = 16
MAX_CONTEXT = 131072
CALLS = 8  # in a graph


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default="kernel,step")
    parser.add_argument("--models", default=",".join(SHAPES), help="of the kernel part")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "long_rows.jsonl"
    for name in args.parts.split(","):
        part = f"kernel {args.models}" if name == "kernel" else name
        if part in {record["part"] for record in read(results)}:
            continue
        run = {"kernel": kernel, "step": step}[name]
        record = {"part": part, **device_facts(), **run(args)}
        add(results, record)
    return 0


def kernel(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for model in args.models.split(","):
        heads = SHAPES[model]
        print(f"{model:<12} {'long rows':>12} {'floor':>8}", *(f"{cut or 'whole'!s:>12}" for cut in CUTS))
        for num_long, length in CASES:
            batch = batch_of(args.rows, num_long, length, heads)
            times = {str(cut): time_cut(batch, cut, args.repeats) for cut in CUTS}
            found[f"{model} {num_long}x{length}"] = {"floor_us": batch.floor_us, "us": times}
            cells = (f"{times[str(cut)]:12.1f}" for cut in CUTS)
            print(f"{'':<12} {f'{num_long} x {length}':>12} {batch.floor_us:8.1f}", *cells, flush=True)
        lens = torch.full((args.rows,), 84, dtype=torch.int32, device="cuda")
        alone = median_us([functools.partial(find_long_rows, lens, MAX_CONTEXT)] * CALLS, args.repeats)
        found[f"{model} find_long_rows"] = {"us": alone}
        print(f"find_long_rows alone: {alone:.1f} us", flush=True)
    return {"kernel": found}


def batch_of(num_rows: int, num_long: int, length: int, heads: tuple[int, int, int]) -> DecodeRows:
    """Rows of 16-150 tokens; the long ones stand at random places."""
    rng = np.random.default_rng(5)
    lens = rng.integers(16, 151, num_rows)
    lens[rng.permutation(num_rows)[:num_long]] = length
    return DecodeRows(lens, *heads, PAGE_SIZE)


def time_cut(batch: DecodeRows, cut: tuple[int, int] | None, repeats: int) -> float:
    """Median us, after a check against whole rows."""
    whole, long_rows = batch.attend().clone(), None
    if cut is not None:
        long_rows = find_long_rows(
            batch.lens, MAX_CONTEXT, long_tokens=cut[0], times_mean=0, piece_tokens=cut[1]
        )
    more = {"long_rows": long_rows, "order": longest_first(long_rows.short_lens if long_rows else batch.lens)}
    batch.out.fill_(torch.nan)
    torch.testing.assert_close(batch.attend(**more), whole, rtol=2e-2, atol=2e-3)
    return median_us([lambda: batch.attend(**more)] * CALLS, repeats)


def step(args: argparse.Namespace) -> dict[str, Any]:
    llm = dummy_llm(
        "qwen3-0.6b",
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
