"""Check the model kernels against their references and time them against the bytes that they must move.

usage: python benchmarks/gpu/model_kernels.py [--device cuda|cpu] [--rows 4096] [--parts prefill,...]
Prints a table and one line of JSON. With --device cpu everything is tiny and runs in Triton's interpreter:
results are checked, nothing is timed. The exit code is 1 if a result was wrong or a variant could not run.
Decode attention: decode_shapes.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from common import HBM_BYTES_PER_S, DecodeRows, median_us

PARTS = ("prefill", "elementwise", "sample")
BYTES_PER_US = HBM_BYTES_PER_S / 1e6
L2_BYTES = 200 << 20  # rotate over at least this much, so that nothing is found in the L2 cache


@dataclass(frozen=True)
class Model:
    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    qk_norm: bool


LLAMA = Model("llama-3-8b", 32, 8, 128, 4096, 14336, 128256, False)
QWEN = Model("qwen3-0.6b", 16, 8, 128, 1024, 3072, 151936, True)
TINY = Model("tiny", 8, 4, 16, 48, 40, 4200, True)


@dataclass
class Record:
    op: str
    model: str
    variant: str
    us: float | None = None
    floor_us: float | None = None
    error: float | None = None  # norm of the difference over the norm of the reference
    failed: str | None = None
    skipped: str | None = None  # the variant does not fit this device

    def line(self) -> str:
        if self.failed:
            return f"{self.op:<18} {self.model:<11} {self.variant:<34} FAILED {self.failed}"
        if self.skipped:
            return f"{self.op:<18} {self.model:<11} {self.variant:<34} skipped: {self.skipped}"
        timed = "" if self.us is None else f"{self.us:9.1f} us"
        if self.us and self.floor_us:
            timed += f"  {self.us / self.floor_us:6.2f} x floor"
        return f"{self.op:<18} {self.model:<11} {self.variant:<34} err {self.error:.1e} {timed}"


@dataclass
class Bench:
    device: str
    rows: int
    mean_len: int
    records: list[Record] = field(default_factory=list)

    @property
    def models(self) -> list[Model]:
        return [LLAMA, QWEN] if self.device == "cuda" else [TINY]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def measure(
        self,
        op: str,
        model: Model,
        variant: str,
        check: Callable[[], float],
        calls: list[Callable[[], Any]],
        num_bytes: float,
        limit: float = 2e-2,
    ) -> Record:
        """Check, then time the calls (each on memory of its own); whatever goes wrong is recorded."""
        record = Record(op, model.name, variant, floor_us=num_bytes / BYTES_PER_US)
        try:
            record.error = check()
            if not record.error <= limit:
                record.failed = f"wrong result, error {record.error:.2e}"
            elif self.device == "cuda":
                record.us = median_us(calls, repeats=20)
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if type(error).__name__ == "OutOfResources":
                record.skipped = text
            else:
                record.failed = text
        self.records.append(record)
        print(record.line(), flush=True)
        return record

    def copies(self, num_bytes: float) -> int:
        return max(1, min(32, math.ceil(L2_BYTES / num_bytes))) if self.device == "cuda" else 1


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if not bool(torch.isfinite(got).all()):
        return math.inf
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def bench_prefill(bench: Bench) -> None:
    """Chunks as a mixed step has them (many short prompts), whole prompts, and one behind a prefix."""
    from phalanx.kernels import prefill_attention, prefill_attention_triton

    cuda = bench.device == "cuda"
    cases = {
        "512 x 16": (512, 0, 16),
        "16 x 512": (16, 0, 512),
        "4 x 2048": (4, 0, 2048),
        "1 x 8192": (1, 0, 8192),
        "1 x 2048 after 2048": (1, 2048, 2048),
    }
    # Queries, tokens, warps, stages.
    tiles = (
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    )
    if not cuda:
        cases, tiles = {"2 x 5 after 20": (2, 20, 5)}, tiles[:1]
    names = ("QUERIES", "TOKENS", "NUM_WARPS", "NUM_STAGES")
    default = [getattr(prefill_attention_triton, name) for name in names]
    for model, (name, (m, start, length)) in product(bench.models, cases.items()):
        heads = model.num_q_heads, model.num_kv_heads, model.head_dim
        rows = DecodeRows(np.full(m, start + length), *heads, page_size=1, device=bench.device)
        q = bench.randn(m * length, model.num_q_heads, model.head_dim)
        indptr = torch.arange(m + 1, dtype=torch.int32, device=bench.device) * length
        starts = torch.full((m,), start, dtype=torch.int32, device=bench.device)
        args = (q, rows.k, rows.v, rows.table, indptr, rows.rows, starts)

        def call(backend: str = "triton", args: Any = args, length: int = length) -> torch.Tensor:
            return prefill_attention(*args, max_chunk_len=length, backend=backend)

        want = call("torch").clone()
        for tile in tiles:
            for constant, value in zip(names, tile, strict=True):
                setattr(prefill_attention_triton, constant, value)
            check = lambda call=call, want=want: distance(call(), want)  # noqa: E731
            variant = f"{name}, tile {'x'.join(map(str, tile))}"
            num_bytes = rows.floor_us * BYTES_PER_US
            record = bench.measure("prefill_attention", model, variant, check, [call], num_bytes)
            if record.us:
                pairs = m * length * (start + (length + 1) / 2)
                flops = 4 * pairs * model.num_q_heads * model.head_dim
                print(f"#   {flops / record.us / 1e6:.0f} TFLOP/s", flush=True)
        for constant, value in zip(names, default, strict=True):
            setattr(prefill_attention_triton, constant, value)


def bench_elementwise(bench: Bench) -> None:
    from phalanx.kernels import rmsnorm_triton, rope_triton, silu_mul_triton

    for model in bench.models:
        default = rmsnorm_triton.VALUES_PER_WARP
        for rmsnorm_triton.VALUES_PER_WARP in (256, 512, 1024):
            bench_norm(bench, model, f"{rmsnorm_triton.VALUES_PER_WARP} values a warp")
        rmsnorm_triton.VALUES_PER_WARP = default
        saved = silu_mul_triton.BLOCK, silu_mul_triton.NUM_WARPS
        for silu_mul_triton.BLOCK, silu_mul_triton.NUM_WARPS in ((512, 2), (1024, 4), (1024, 2), (2048, 4)):
            bench_silu(bench, model, f"block {silu_mul_triton.BLOCK}, warps {silu_mul_triton.NUM_WARPS}")
        silu_mul_triton.BLOCK, silu_mul_triton.NUM_WARPS = saved
        kept = rope_triton.HEADS, rope_triton.NUM_WARPS
        for rope_triton.HEADS, rope_triton.NUM_WARPS in ((4, 1), (8, 1), (8, 2), (8, 4), (16, 4)):
            bench_rope(bench, model, f"heads {rope_triton.HEADS}, warps {rope_triton.NUM_WARPS}")
        rope_triton.HEADS, rope_triton.NUM_WARPS = kept


def bench_norm(bench: Bench, model: Model, variant: str) -> None:
    from phalanx.kernels import add_rms_norm

    num_bytes = 4 * bench.rows * model.hidden * 2
    weight = bench.randn(model.hidden)
    sets = [
        (bench.randn(bench.rows, model.hidden), bench.randn(bench.rows, model.hidden))
        for _ in range(bench.copies(num_bytes))
    ]

    def check() -> float:
        results = []
        for backend in ("triton", "torch"):
            x, residual = (tensor.clone() for tensor in sets[0])
            add_rms_norm(x, residual, weight, 1e-6, backend=backend)
            results.append(torch.cat((x, residual)))
        return distance(*results)

    calls = [lambda s=s: add_rms_norm(*s, weight, 1e-6, backend="triton") for s in sets]
    bench.measure("add_rms_norm", model, variant, check, calls, num_bytes)


def bench_silu(bench: Bench, model: Model, variant: str) -> None:
    from phalanx.kernels import silu_mul

    num_bytes = 3 * bench.rows * model.intermediate * 2
    sets = [
        (bench.randn(bench.rows, 2 * model.intermediate), bench.randn(bench.rows, model.intermediate))
        for _ in range(bench.copies(num_bytes))
    ]
    check = lambda: distance(  # noqa: E731
        silu_mul(sets[0][0], backend="triton"), silu_mul(sets[0][0], backend="torch")
    )
    calls = [lambda s=s: silu_mul(s[0], out=s[1], backend="triton") for s in sets]
    bench.measure("silu_mul", model, variant, check, calls, num_bytes)


def bench_rope(bench: Bench, model: Model, variant: str) -> None:
    """The whole of what lies between the QKV projection and attention."""
    from phalanx.kernels import rope

    split = [model.num_q_heads, model.num_kv_heads, model.num_kv_heads]
    num_bytes = 2 * bench.rows * sum(split) * model.head_dim * 2
    cache = torch.randn(4096, model.head_dim, device=bench.device)
    positions = torch.randint(0, 2 * bench.mean_len, (bench.rows,), device=bench.device)
    norms = {}
    if model.qk_norm:
        norms = {"q_norm": bench.randn(model.head_dim), "k_norm": bench.randn(model.head_dim)}
    num_slots = 4 * bench.rows
    pool = (num_slots, model.num_kv_heads, model.head_dim)
    sets = [
        (
            bench.randn(bench.rows, sum(split), model.head_dim),
            bench.randn(*pool),
            bench.randn(*pool),
            torch.randperm(num_slots, device=bench.device)[: bench.rows],
        )
        for _ in range(bench.copies(num_bytes))
    ]

    def call(qkv: Any, k_pool: Any, v_pool: Any, slots: Any, backend: str = "triton") -> None:
        q, k, v = qkv.split(split, 1)
        store = {"v": v, "k_pool": k_pool, "v_pool": v_pool, "slot_mapping": slots}
        rope(q, k, positions, cache, backend=backend, **norms, **store)

    def check() -> float:
        results = []
        for backend in ("triton", "torch"):
            parts = [tensor.clone() for tensor in sets[0]]
            call(*parts, backend=backend)
            results.append(torch.cat([part.flatten() for part in parts[:3]]))
        return distance(*results)

    calls = [lambda s=s: call(*s) for s in sets]
    bench.measure("rope + store", model, variant, check, calls, num_bytes)


def bench_sample(bench: Bench) -> None:
    from phalanx.kernels import sample_triton

    default = sample_triton.REDUCE_WARPS
    for model in bench.models:
        for sample_triton.REDUCE_WARPS in (4, 8):
            for bs in sorted({1, bench.rows}):
                for temperature in (0.0, 1.0):
                    warps = f"reduce warps {sample_triton.REDUCE_WARPS}"
                    bench_sample_case(bench, model, bs, temperature, warps)
        sample_triton.REDUCE_WARPS = default
        logits = bench.randn(bench.rows, model.vocab)
        zero = lambda: 0.0  # noqa: E731
        call = [lambda logits=logits: logits.argmax(1)]
        bench.measure("torch.argmax", model, "", zero, call, 2 * logits.numel())
        del logits


def bench_sample_case(bench: Bench, model: Model, bs: int, temperature: float, warps: str) -> None:
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

    variant = f"bs {bs}, temperature {temperature:g}, {warps}"
    bench.measure("sample", model, variant, check, [call], 2 * logits.numel(), limit=5e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, help="decode rows (default 4096, on the CPU 3)")
    parser.add_argument("--mean-len", type=int, help="mean length of short rows (default 84, on the CPU 20)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported
    bench = Bench(args.device, args.rows or (4096 if cuda else 3), args.mean_len or (84 if cuda else 20))
    torch.manual_seed(0)
    for part in args.parts.split(","):
        if part not in PARTS:
            parser.error(f"--parts: {part!r} is none of {', '.join(PARTS)}")
        try:
            globals()[f"bench_{part}"](bench)
        except Exception as error:  # one part's end must not hide the others' numbers
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            bench.records.append(Record(part, "", "set-up", failed=text))
            print(bench.records[-1].line(), flush=True)
        if cuda:
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if cuda else "cpu, interpreted"
    results = [asdict(record) for record in bench.records]
    print(json.dumps({"device": name, "rows": bench.rows, "mean_len": bench.mean_len, "results": results}))
    return 1 if any(record.failed for record in bench.records) else 0


if __name__ == "__main__":
    sys.exit(main())
