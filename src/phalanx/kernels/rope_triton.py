"""The Triton backend of `rope`. Grid: (tokens, blocks of heads: first those of q, then of k, then of v)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phalanx.kernels.kv_indices_triton import device_guard

HEADS = 8  # heads of one token that a program takes
NUM_WARPS = 2


@triton.jit
def rotate_heads(
    source,
    source_head_stride,
    target,
    target_head_stride,
    weight,
    cos,
    sin,
    eps,
    first_head,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm and rotate HEADS heads of one token from source to target, which may be the same."""
    HALF: tl.constexpr = DIM // 2
    head = first_head + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < NUM_HEADS) & (dim < HALF)
    place = source + head * source_head_stride + dim
    dtype: tl.constexpr = source.dtype.element_ty
    a = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        weight_a = tl.load(weight + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        weight_b = tl.load(weight + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        a = (a * factor * weight_a).to(dtype).to(tl.float32)
        b = (b * factor * weight_b).to(dtype).to(tl.float32)
    goal = target + head * target_head_stride + dim
    tl.store(goal, (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(goal + HALF, (b * cos + a * sin).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def rope_heads(
    q,
    q_token_stride,
    q_head_stride,
    k,
    k_token_stride,
    k_head_stride,
    positions,
    cache,
    q_norm,
    k_norm,
    eps,
    v,
    v_token_stride,
    v_head_stride,
    k_pool,
    v_pool,
    slot_mapping,
    num_slots,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
):
    """HEADS heads of one token; without STORE there are no programs for v and k is rotated in place."""
    HALF: tl.constexpr = DIM // 2
    HALF_BLOCK: tl.constexpr = DIM_BLOCK // 2
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, HALF_BLOCK)[None, :]
    angle = cache + tl.load(positions + token).to(tl.int64) * DIM + half
    cos = tl.load(angle, mask=half < HALF, other=0.0)
    sin = tl.load(angle + HALF, mask=half < HALF, other=0.0)
    if block < Q_BLOCKS:
        q_base = q + token * q_token_stride
        rotate_heads(
            q_base, q_head_stride, q_base, q_head_stride, q_norm, cos, sin, eps, block * HEADS,
            Q_HEADS, DIM, HALF_BLOCK, HEADS, NORM,
        )  # fmt: skip
    else:
        k_base = k + token * k_token_stride
        first_head = (block - Q_BLOCKS) * HEADS
        if STORE:
            slot = tl.load(slot_mapping + token).to(tl.int64)
            if (slot >= 0) & (slot < num_slots):
                pool_offset = slot * (KV_HEADS * DIM)
                if block < Q_BLOCKS + KV_BLOCKS:
                    rotate_heads(
                        k_base, k_head_stride, k_pool + pool_offset, DIM, k_norm, cos, sin, eps, first_head,
                        KV_HEADS, DIM, HALF_BLOCK, HEADS, NORM,
                    )  # fmt: skip
                else:
                    head = first_head - KV_BLOCKS * HEADS + tl.arange(0, HEADS)[:, None]
                    dim = tl.arange(0, DIM_BLOCK)[None, :]
                    mask = (head < KV_HEADS) & (dim < DIM)
                    value = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=mask)
                    tl.store(v_pool + pool_offset + head * DIM + dim, value, mask=mask)
        else:
            rotate_heads(
                k_base, k_head_stride, k_base, k_head_stride, k_norm, cos, sin, eps, first_head,
                KV_HEADS, DIM, HALF_BLOCK, HEADS, NORM,
            )  # fmt: skip


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
    """`phalanx.kernels.rope` on checked arguments with at least one token."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    blocks = triton.cdiv(num_q_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS) * (1 if v is None else 2)
    with device_guard(q):
        rope_heads[(num_tokens, blocks)](
            q,
            q.stride(0),
            q.stride(1),
            k,
            k.stride(0),
            k.stride(1),
            positions,
            cos_sin_cache,
            q_norm,
            k_norm,
            eps,
            v,
            0 if v is None else v.stride(0),
            0 if v is None else v.stride(1),
            k_pool,
            v_pool,
            slot_mapping,
            0 if k_pool is None else k_pool.shape[0],
            Q_HEADS=num_q_heads,
            KV_HEADS=num_kv_heads,
            DIM=head_dim,
            DIM_BLOCK=triton.next_power_of_2(head_dim),
            HEADS=HEADS,
            NORM=q_norm is not None,
            STORE=v is not None,
            num_warps=NUM_WARPS,
        )
