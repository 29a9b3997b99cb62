"""Check the model kernels against their references and time them against the bytes that they must move.

usage: python benchmarks/gpu/model_kernels.py [--device cuda|cpu] [--rows 4096,256] [--parts prefill,...]
       python benchmarks/gpu/model_kernels.py --compile

Beside our kernels as they are in service, FlashInfer's on the same tensors, where it can be imported; what of
it cannot be compiled or run is skipped and says why. --compile only compiles its modules, all at once, so
that the measurement finds them. --sweep measures other configurations of our kernels too. Prints a table and
a line of JSON; with --output OUTPUT_FOLDER that is added to OUTPUT_FOLDER/model_kernels.jsonl. With --device
cpu everything is tiny and runs in Triton's interpreter: results are checked, nothing is timed. The exit code
is 1 if a result was wrong or one of our kernels could not run. Decode attention: decode_shapes.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from common import add, device_facts
from flashinfer_ops import compile_all
from kernel_bench import OURS, Bench, Model, Record, print_comparison
from model_elementwise import bench_elementwise
from model_prefill import bench_prefill


def bench_sample(bench: Bench) -> None:
    from phalanx.kernels import sample_triton

    default, most = sample_triton.REDUCE_WARPS, bench.rows[0]
    for model in bench.models:
        for bs, temperature in product(sorted({1, most}), (0.0, 1.0)):
            bench_sample_case(bench, model, bs, temperature, OURS)
            for sample_triton.REDUCE_WARPS in (4, 8) if bench.sweep else ():
                bench_sample_case(bench, model, bs, temperature, f"{OURS} {sample_triton.REDUCE_WARPS} warps")
            sample_triton.REDUCE_WARPS = default
        logits = bench.randn(most, model.vocab)
        prepare = lambda logits=logits: ((lambda: 0.0), [lambda: logits.argmax(1)])  # noqa: E731
        record = Record("sample", model.name, f"{most} rows", "torch.argmax")
        bench.measure(record, prepare, 2 * logits.numel())
        del logits


def bench_sample_case(bench: Bench, model: Model, bs: int, temperature: float, variant: str) -> None:
    from phalanx.kernels import sample

    logits = bench.randn(bs, model.vocab) * 2
    heat = torch.full((bs + 1,), temperature, device=bench.device)
    seeds = torch.randint(-(2**62), 2**62, (bs + 1,), device=bench.device)
    rows = torch.arange(1, bs + 1, device=bench.device)
    stops = torch.full((bs + 1, 16), -1, dtype=torch.int32, device=bench.device)
    counts = torch.arange(bs, dtype=torch.int32, device=bench.device)

    def call(backend: str = "triton", part: slice = slice(None)) -> torch.Tensor:
        args = (logits[part], heat, seeds, rows[part], stops)
        return sample(*args, num_generated=counts[part], backend=backend)[0]

    def check() -> float:
        """Share of rows whose token differs: rounding at a border between tokens moves very few."""
        got = call()
        parts = [slice(first, first + 256) for first in range(0, bs, 256)]
        want = torch.cat([call("torch", part) for part in parts])
        return float((got != want).double().mean())

    record = Record("sample", model.name, f"{bs} rows, heat {temperature:g}", variant)
    bench.measure(record, lambda: (check, [call]), 2 * logits.numel(), limit=5e-3)


PARTS = {"elementwise": bench_elementwise, "sample": bench_sample, "prefill": bench_prefill}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", help="numbers of decode rows (default 4096,256, on the CPU 3)")
    parser.add_argument("--mean-len", type=int, help="mean length of rows (default 84, on the CPU 20)")
    parser.add_argument("--page-size", type=int, help="of prompt attention (default 16, on the CPU 4)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--sweep", action="store_true", help="other configurations of our kernels, too")
    parser.add_argument("--compile", action="store_true", help="compile FlashInfer's modules, nothing else")
    parser.add_argument("--output", type=Path, help="folder for model_kernels.jsonl")
    args = parser.parse_args()
    if args.compile:
        return int(not compile_all())
    cuda = args.device == "cuda"
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported
    bench = Bench(
        args.device,
        [int(n) for n in (args.rows or ("4096,256" if cuda else "3")).split(",")],
        args.mean_len or (84 if cuda else 20),
        args.page_size or (16 if cuda else 4),
        args.sweep,
    )
    torch.manual_seed(0)
    for part in args.parts.split(","):
        if part not in PARTS:
            parser.error(f"--parts: {part!r} is none of {', '.join(PARTS)}")
        try:
            PARTS[part](bench)
        except Exception as error:  # one part's end must not hide the others' numbers
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            bench.records.append(Record(part, "", "", "set-up", failed=text))
            print(bench.records[-1].line(), flush=True)
        if cuda:
            torch.cuda.empty_cache()
    results = [asdict(record) for record in bench.records]
    sizes = {"rows": bench.rows, "mean_len": bench.mean_len, "page_size": bench.page_size}
    record = {**device_facts(), **sizes, "results": results}
    print(json.dumps(record))
    print_comparison(bench.records)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        add(args.output / "model_kernels.jsonl", record)
    return 1 if any(record.failed for record in bench.records) else 0


if __name__ == "__main__":
    sys.exit(main())
