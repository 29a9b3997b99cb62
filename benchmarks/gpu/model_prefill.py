"""Prompt attention: our kernel beside FlashInfer's, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import flashinfer_ops
import numpy as np
import torch
from common import DecodeRows
from kernel_bench import BYTES_PER_US, OURS, Bench, Calls, Check, Model, Record, distance

# Chunks as a mixed step has them (many short prompts), whole prompts, and one behind a prefix:
# number of chunks, tokens before each, tokens of each.
CASES = {
    "512 x 16": (512, 0, 16),
    "16 x 512": (16, 0, 512),
    "4 x 2048": (4, 0, 2048),
    "1 x 8192": (1, 0, 8192),
    "1 x 2048 after 2048": (1, 2048, 2048),
}
SMALL_CASES = {"2 x 5 after 20": (2, 20, 5)}
NAMES = ("QUERIES", "TOKENS", "NUM_WARPS", "NUM_STAGES")
TILES = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2))


@dataclass
class Chunks:
    """Tensors of one case, and what the torch backend makes of them."""

    model: Model
    name: str
    length: int
    rows: DecodeRows
    q: torch.Tensor
    indptr: torch.Tensor
    starts: torch.Tensor
    out: torch.Tensor
    want: torch.Tensor
    num_flops: float

    def ours(self, tiles: Any = None, backend: str = "triton") -> torch.Tensor:
        from phalanx.kernels import prefill_attention

        rows = self.rows
        return prefill_attention(
            self.q,
            rows.k,
            rows.v,
            rows.table,
            self.indptr,
            rows.rows,
            self.starts,
            max_chunk_len=self.length,
            page_size=rows.page_size,
            out=self.out,
            backend=backend,
            **({} if tiles is None else {"tiles": tiles}),
        )

    def check(self, call: Callable[[], None]) -> float:
        """How far from `want` is what the call writes into `out`."""
        self.out.fill_(torch.nan)
        call()
        return distance(self.out, self.want)


def bench_prefill(bench: Bench) -> None:
    """FlashInfer's Hopper kernel comes last: an error of the device would end all that follows."""
    cases = CASES if bench.device == "cuda" else SMALL_CASES
    chosen = [
        make_chunks(bench, model, name, *case) for model, (name, case) in product(bench.models, cases.items())
    ]
    for chunks in chosen:
        bench_ours(bench, chunks, OURS)
    if bench.sweep:
        sweep(bench, chosen)
    for backend, chunks in product(flashinfer_ops.PREFILL_BACKENDS, chosen):
        bench_flashinfer(bench, chunks, backend)


def make_chunks(bench: Bench, model: Model, name: str, m: int, start: int, length: int) -> Chunks:
    heads = model.num_q_heads, model.num_kv_heads, model.head_dim
    rows = DecodeRows(np.full(m, start + length), *heads, page_size=bench.page_size, device=bench.device)
    q = bench.randn(m * length, model.num_q_heads, model.head_dim)
    pairs = m * length * (start + (length + 1) / 2)
    chunks = Chunks(
        model=model,
        name=name,
        length=length,
        rows=rows,
        q=q,
        indptr=torch.arange(m + 1, dtype=torch.int32, device=bench.device) * length,
        starts=torch.full((m,), start, dtype=torch.int32, device=bench.device),
        out=torch.empty_like(q),
        want=q,
        num_flops=4 * pairs * model.num_q_heads * model.head_dim,
    )
    chunks.want = chunks.ours(backend="torch").clone()
    return chunks


def bench_ours(bench: Bench, chunks: Chunks, variant: str) -> None:
    """How chunks are cut into tiles is found beforehand: all layers of a step share it."""
    from phalanx.kernels import prefill_tiles

    def prepare() -> tuple[Check, Calls]:
        group = chunks.model.num_q_heads // chunks.model.num_kv_heads
        tiles = prefill_tiles(chunks.indptr, len(chunks.q), longest=chunks.length, group=group)

        def call() -> None:
            chunks.ours(tiles)

        return lambda: chunks.check(call), [call]

    measure(bench, chunks, variant, prepare)


def bench_flashinfer(bench: Bench, chunks: Chunks, backend: str) -> None:
    def prepare() -> tuple[Check, Calls]:
        rows, model = chunks.rows, chunks.model
        planned = flashinfer_ops.Prefill(
            backend,
            chunks.indptr.cpu().diff(),
            rows.lens.cpu(),
            rows.table,
            rows.page_size,
            (model.num_q_heads, model.num_kv_heads, model.head_dim),
        )

        def call() -> None:
            planned.run(chunks.q, rows.k, rows.v, chunks.out)

        return lambda: chunks.check(call), [call]

    measure(bench, chunks, f"flashinfer {backend}", prepare)


def measure(bench: Bench, chunks: Chunks, variant: str, prepare: Any) -> None:
    record = Record("prefill", chunks.model.name, chunks.name, variant)
    bench.measure(record, prepare, chunks.rows.floor_us * BYTES_PER_US, num_flops=chunks.num_flops)


def sweep(bench: Bench, chosen: list[Chunks]) -> None:
    from phalanx.kernels import prefill_attention_triton

    default = [getattr(prefill_attention_triton, name) for name in NAMES]
    for tile in TILES:
        for constant, value in zip(NAMES, tile, strict=True):
            setattr(prefill_attention_triton, constant, value)
        for chunks in chosen:
            bench_ours(bench, chunks, f"{OURS} {'x'.join(map(str, tile))}")
    for constant, value in zip(NAMES, default, strict=True):
        setattr(prefill_attention_triton, constant, value)
