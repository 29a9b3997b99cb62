"""Head norms, rotation and the KV store on the CPU, one pass over the projection of each token."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic

from phalanx.kernels.cpu_jit import (
    KINDS,
    compiled,
    fetch_add,
    float_bits,
    float_of,
    get,
    inlined_sums,
    int64s,
    row_at,
)
from phalanx.kernels.cpu_parallel import HEADER, Kernel, chunks_of
from phalanx.kernels.cpu_vectors import BF16, FP32, Emitter, copy_row, literal

_ARGUMENTS = 22


@inlined_sums
def _norm_factor(x_at, dim, eps, kind):
    x = row_at(x_at, dim)
    total = np.float32(0.0)
    for i in range(dim):
        value = get(x, i, kind)
        total += value * value
    return np.float32(1.0) / np.sqrt(total / np.float32(dim) + eps)


@intrinsic(prefer_literal=True)
def rotate(
    typingctx: Any,
    source: Any,
    target: Any,
    angles: Any,
    weight: Any,
    factor: Any,
    normed: Any,
    dim: Any,
    kind: Any,
) -> Any:
    """Rotary embedding of a head: halves a, b become a*cos - b*sin, b*cos + a*sin. target may be source.

    angles: dim floats, cosines then sines. normed: 1 if the head is first multiplied by factor (float32) and
    the row `weight`, and rounded.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_at, target_at, angles_at, weight_at, scale = args[:5]
        half = literal(dim) // 2
        emit = Emitter(builder, literal(dim), literal(kind))
        plain = Emitter(builder, literal(dim), FP32)
        factors = emit.splat(scale)

        def read(index: int) -> Any:
            value = emit.load_plain(source_at, index)
            if not literal(normed):
                return value
            scaled = builder.fmul(builder.fmul(value, factors), emit.load_plain(weight_at, index))
            return emit.as_stored(scaled)

        for i in range(0, half, emit.width):
            a, b = read(i), read(half + i)
            cos, sin = plain.load_plain(angles_at, i), plain.load_plain(angles_at, half + i)
            first = builder.fsub(builder.fmul(a, cos), builder.fmul(b, sin))
            second = builder.fadd(builder.fmul(b, cos), builder.fmul(a, sin))
            emit.store_plain(first, target_at, i)
            emit.store_plain(second, target_at, half + i)
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, address, address, types.float32, normed, dim, kind), codegen


def _build(normed: int, dim: int, kind: int):
    @compiled(normed, dim, kind)
    def run(address):
        a = int64s(address, HEADER + _ARGUMENTS)
        num_tokens, per_chunk, num_q_heads, num_kv_heads = a[2], a[3], a[4], a[5]
        size = 2 if kind == BF16 else 4
        q_at, q_token, q_head, k_at, k_token, k_head = a[6], a[7], a[8], a[9], a[10], a[11]
        v_at, v_token, v_head, k_pool, v_pool, num_slots = a[12], a[13], a[14], a[15], a[16], a[17]
        positions, slots = int64s(a[18], num_tokens), int64s(a[19], num_tokens)
        cache, q_norm, k_norm, eps = a[20], a[21], a[22], float_of(a[23])
        head = dim * size
        while True:
            chunk = fetch_add(address, 1)
            if chunk >= a[1]:
                break
            for token in range(chunk * per_chunk, min((chunk + 1) * per_chunk, num_tokens)):
                angles = cache + positions[token] * dim * 4
                for h in range(num_q_heads):
                    at = q_at + token * q_token + h * q_head
                    factor = _norm_factor(at, dim, eps, kind) if normed == 1 else np.float32(1.0)
                    rotate(at, at, angles, q_norm, factor, normed, dim, kind)
                if k_pool == 0:
                    for h in range(num_kv_heads):
                        at = k_at + token * k_token + h * k_head
                        factor = _norm_factor(at, dim, eps, kind) if normed == 1 else np.float32(1.0)
                        rotate(at, at, angles, k_norm, factor, normed, dim, kind)
                elif 0 <= slots[token] < num_slots:
                    base = slots[token] * num_kv_heads * head
                    for h in range(num_kv_heads):
                        at = base + h * head
                        source = k_at + token * k_token + h * k_head
                        factor = _norm_factor(source, dim, eps, kind) if normed == 1 else np.float32(1.0)
                        rotate(source, k_pool + at, angles, k_norm, factor, normed, dim, kind)
                        copy_row(v_at + token * v_token + h * v_head, v_pool + at, dim, kind)

    return run


@functools.cache
def kernel(normed: bool, dim: int, kind: int) -> Kernel:
    """Compiled for heads with a norm or without, of head_dim `dim`, in one kind of memory."""
    return Kernel(_build(int(normed), dim, kind).address, _ARGUMENTS)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    v: torch.Tensor | None,
    k_pool: torch.Tensor | None,
    v_pool: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
) -> None:
    """`kernels.rope` of checked arguments."""
    num_tokens, num_q_heads, dim = q.shape
    num_kv_heads, size = k.shape[1], q.element_size()
    positions = positions.long()
    slots = positions if slot_mapping is None else slot_mapping.long()
    per_chunk, chunks = chunks_of(num_tokens, (num_q_heads + 2 * num_kv_heads) * dim)
    kernel(q_norm is not None, dim, KINDS[q.dtype])(
        chunks,
        num_tokens,
        per_chunk,
        num_q_heads,
        num_kv_heads,
        q.data_ptr(),
        q.stride(0) * size,
        q.stride(1) * size,
        k.data_ptr(),
        k.stride(0) * size,
        k.stride(1) * size,
        0 if v is None else v.data_ptr(),
        0 if v is None else v.stride(0) * size,
        0 if v is None else v.stride(1) * size,
        0 if k_pool is None else k_pool.data_ptr(),
        0 if v_pool is None else v_pool.data_ptr(),
        0 if k_pool is None else k_pool.shape[0],
        positions.data_ptr(),
        slots.data_ptr(),
        cos_sin_cache.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        float_bits(eps),
    )
