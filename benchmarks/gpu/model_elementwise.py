"""Norms, SiLU, and what lies between the QKV projection and attention: our kernels beside FlashInfer's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import flashinfer_ops
import torch
from flashinfer_ops import EPS
from kernel_bench import OURS, Bench, Model, Record, distance

THEIRS = "flashinfer"


def bench_elementwise(bench: Bench) -> None:
    for model, num_rows in product(bench.models, bench.rows):
        for measure in (bench_add_norm, bench_norm, bench_silu, bench_rope):
            measure(bench, model, num_rows, {OURS: "triton", THEIRS: THEIRS})
    if bench.sweep:
        sweep(bench)


def sweep(bench: Bench) -> None:
    """Other configurations of our kernels."""
    from phalanx.kernels import rmsnorm_triton, rope_triton, silu_mul_triton

    for model in bench.models:
        num_rows, default = bench.rows[0], rmsnorm_triton.VALUES_PER_WARP
        for rmsnorm_triton.VALUES_PER_WARP in (256, 512, 1024):
            name = f"{OURS} {rmsnorm_triton.VALUES_PER_WARP}"
            bench_add_norm(bench, model, num_rows, {name: "triton"})
        rmsnorm_triton.VALUES_PER_WARP = default
        saved = silu_mul_triton.BLOCK, silu_mul_triton.NUM_WARPS
        for silu_mul_triton.BLOCK, silu_mul_triton.NUM_WARPS in ((512, 2), (1024, 4), (1024, 2), (2048, 4)):
            name = f"{OURS} {silu_mul_triton.BLOCK}x{silu_mul_triton.NUM_WARPS}"
            bench_silu(bench, model, num_rows, {name: "triton"})
        silu_mul_triton.BLOCK, silu_mul_triton.NUM_WARPS = saved
        kept = rope_triton.HEADS, rope_triton.NUM_WARPS
        for rope_triton.HEADS, rope_triton.NUM_WARPS in ((4, 1), (8, 1), (8, 2), (8, 4), (16, 4)):
            name = f"{OURS} {rope_triton.HEADS}x{rope_triton.NUM_WARPS}"
            bench_rope(bench, model, num_rows, {name: "triton"})
        rope_triton.HEADS, rope_triton.NUM_WARPS = kept


def compare(
    bench: Bench,
    op: str,
    model: Model,
    num_rows: int,
    variants: dict[str, str],
    num_bytes: float,
    make: Callable[[], tuple[torch.Tensor, ...]],
    run: Callable[..., tuple[torch.Tensor, ...]],
) -> None:
    """Each variant against the torch backend, on copies of one set of tensors; timed over many sets.

    variants: name -> backend, for `run(backend, *tensors)`, which returns what counts of the result.
    """
    sets = [make() for _ in range(bench.copies(num_bytes))]
    first = [tensor.clone() for tensor in sets[0]]  # what is timed writes into its tensors

    def result(backend: str) -> torch.Tensor:
        parts = run(backend, *(tensor.clone() for tensor in first))
        return torch.cat([part.flatten() for part in parts])

    want = result("torch")
    for name, backend in variants.items():
        calls = [lambda s=s, backend=backend: run(backend, *s) for s in sets]
        check = lambda backend=backend: distance(result(backend), want)  # noqa: E731
        record = Record(op, model.name, f"{num_rows} rows", name)
        bench.measure(record, lambda check=check, calls=calls: (check, calls), num_bytes)


def bench_add_norm(bench: Bench, model: Model, num_rows: int, variants: dict[str, str]) -> None:
    from phalanx.kernels import add_rms_norm

    weight = bench.randn(model.hidden)

    def run(backend: str, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if backend == THEIRS:
            flashinfer_ops.add_rms_norm(x, residual, weight)
        else:
            add_rms_norm(x, residual, weight, EPS, backend=backend)
        return x, residual

    num_bytes = 4 * num_rows * model.hidden * 2
    make = lambda: (bench.randn(num_rows, model.hidden), bench.randn(num_rows, model.hidden))  # noqa: E731
    compare(bench, "add_rms_norm", model, num_rows, variants, num_bytes, make, run)


def bench_norm(bench: Bench, model: Model, num_rows: int, variants: dict[str, str]) -> None:
    from phalanx.kernels import rms_norm

    weight = bench.randn(model.hidden)

    def run(backend: str, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if backend == THEIRS:
            flashinfer_ops.rms_norm(x, weight, out)
        else:
            rms_norm(x, weight, EPS, out=out, backend=backend)
        return (out,)

    num_bytes = 2 * num_rows * model.hidden * 2
    make = lambda: (bench.randn(num_rows, model.hidden), bench.randn(num_rows, model.hidden))  # noqa: E731
    compare(bench, "rms_norm", model, num_rows, variants, num_bytes, make, run)


def bench_silu(bench: Bench, model: Model, num_rows: int, variants: dict[str, str]) -> None:
    from phalanx.kernels import silu_mul

    def run(backend: str, gate_up: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if backend == THEIRS:
            flashinfer_ops.silu_mul(gate_up, out)
        else:
            silu_mul(gate_up, out=out, backend=backend)
        return (out,)

    def make() -> tuple[torch.Tensor, ...]:
        return bench.randn(num_rows, 2 * model.intermediate), bench.randn(num_rows, model.intermediate)

    num_bytes = 3 * num_rows * model.intermediate * 2
    compare(bench, "silu_mul", model, num_rows, variants, num_bytes, make, run)


def bench_rope(bench: Bench, model: Model, num_rows: int, variants: dict[str, str]) -> None:
    """The whole of what lies between the QKV projection and attention; ours is one launch."""
    from phalanx.kernels import rope

    split = [model.num_q_heads, model.num_kv_heads, model.num_kv_heads]
    angles = torch.rand(4096, model.head_dim // 2, device=bench.device) * 6.28
    cache = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 2 * bench.mean_len, (num_rows,), device=bench.device)
    norms = {}
    if model.qk_norm:
        norms = {"q_norm": bench.randn(model.head_dim), "k_norm": bench.randn(model.head_dim)}
    num_slots = 4 * num_rows
    slots = torch.randperm(num_slots, device=bench.device)[:num_rows]
    places: list[Any] = []

    def run(
        backend: str, qkv: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.split(split, 1)
        if backend == THEIRS:
            if not places:  # found once for a step, as the slots are: not timed
                places.append(flashinfer_ops.OneTokenEach(slots))
            flashinfer_ops.rope_and_store(q, k, v, positions, cache, k_pool, v_pool, places[0], **norms)
        else:
            store = {"v": v, "k_pool": k_pool, "v_pool": v_pool, "slot_mapping": slots}
            rope(q, k, positions, cache, backend=backend, eps=EPS, **norms, **store)
        return q, k_pool, v_pool

    def make() -> tuple[torch.Tensor, ...]:
        pool = (num_slots, model.num_kv_heads, model.head_dim)
        return bench.randn(num_rows, sum(split), model.head_dim), bench.randn(*pool), bench.randn(*pool)

    num_bytes = 2 * num_rows * sum(split) * model.head_dim * 2
    compare(bench, "rope + store", model, num_rows, variants, num_bytes, make, run)
