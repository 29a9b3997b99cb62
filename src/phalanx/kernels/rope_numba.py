"""Head norms, rotation and the KV store on the CPU, one pass over the projection of each token."""

from __future__ import annotations

import functools

import numpy as np
import torch

from phalanx.kernels.cpu_jit import (
    KINDS,
    compiled,
    fetch_add,
    float_bits,
    float_of,
    floats,
    get,
    inlined,
    inlined_fused,
    inlined_sums,
    int64s,
    put,
    rounded,
    row_at,
)
from phalanx.kernels.cpu_parallel import HEADER, Kernel, chunks_of

_ARGUMENTS = 24


@inlined_sums
def _norm_factor(x_at, dim, eps, kind):
    x = row_at(x_at, dim)
    total = np.float32(0.0)
    for i in range(dim):
        value = get(x, i, kind)
        total += value * value
    return np.float32(1.0) / np.sqrt(total / np.float32(dim) + eps)


@inlined_fused
def _rotate(x_at, out_at, weight_at, angles_at, dim, element_bytes, eps, kind):
    """One head. weight_at: 0 without a norm. out_at may be x_at."""
    half = dim // 2
    step = half * element_bytes
    first, second = row_at(x_at, half), row_at(x_at + step, half)
    out_first, out_second = row_at(out_at, half), row_at(out_at + step, half)
    cos, sin = floats(angles_at, half), floats(angles_at + 4 * half, half)
    if weight_at != 0:
        weight_first, weight_second = row_at(weight_at, half), row_at(weight_at + step, half)
        factor = _norm_factor(x_at, dim, eps, kind)
        for i in range(half):
            a = rounded(get(first, i, kind) * factor * get(weight_first, i, kind), kind)
            b = rounded(get(second, i, kind) * factor * get(weight_second, i, kind), kind)
            put(out_first, i, a * cos[i] - b * sin[i], kind)
            put(out_second, i, b * cos[i] + a * sin[i], kind)
    else:
        for i in range(half):
            a, b = get(first, i, kind), get(second, i, kind)
            put(out_first, i, a * cos[i] - b * sin[i], kind)
            put(out_second, i, b * cos[i] + a * sin[i], kind)


@inlined
def _copy(source_at, target_at, dim, kind):
    source, target = row_at(source_at, dim), row_at(target_at, dim)
    for i in range(dim):
        if kind == 0:
            target[1][i] = source[1][i]
        else:
            target[0][i] = source[0][i]


def _build(kind: int):
    @compiled
    def run(address):
        a = int64s(address, HEADER + _ARGUMENTS)
        num_tokens, per_chunk, num_q_heads, num_kv_heads, dim, size = a[2], a[3], a[4], a[5], a[6], a[7]
        q_at, q_token, q_head, k_at, k_token, k_head = a[8], a[9], a[10], a[11], a[12], a[13]
        v_at, v_token, v_head, k_pool, v_pool, num_slots = a[14], a[15], a[16], a[17], a[18], a[19]
        positions, slots = int64s(a[20], num_tokens), int64s(a[21], num_tokens)
        cache, q_norm, k_norm, eps = a[22], a[23], a[24], float_of(a[25])
        head = dim * size
        while True:
            chunk = fetch_add(address, 1)
            if chunk >= a[1]:
                break
            for token in range(chunk * per_chunk, min((chunk + 1) * per_chunk, num_tokens)):
                angles = cache + positions[token] * dim * 4
                for h in range(num_q_heads):
                    at = q_at + token * q_token + h * q_head
                    _rotate(at, at, q_norm, angles, dim, size, eps, kind)
                if k_pool == 0:
                    for h in range(num_kv_heads):
                        at = k_at + token * k_token + h * k_head
                        _rotate(at, at, k_norm, angles, dim, size, eps, kind)
                elif 0 <= slots[token] < num_slots:
                    base = slots[token] * num_kv_heads * head
                    for h in range(num_kv_heads):
                        at = base + h * head
                        source = k_at + token * k_token + h * k_head
                        _rotate(source, k_pool + at, k_norm, angles, dim, size, eps, kind)
                        _copy(v_at + token * v_token + h * v_head, v_pool + at, dim, kind)

    return run


@functools.cache
def kernel(kind: int) -> Kernel:
    """Compiled for one kind of memory."""
    return Kernel(_build(kind).address, _ARGUMENTS)


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
    kernel(KINDS[q.dtype])(
        chunks,
        num_tokens,
        per_chunk,
        num_q_heads,
        num_kv_heads,
        dim,
        size,
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
