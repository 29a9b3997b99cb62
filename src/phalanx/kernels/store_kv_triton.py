"""The Triton backend of `store_kv`: one program a token, K and V in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phalanx.kernels.kv_indices_triton import device_guard


@triton.jit(do_not_specialize=["num_slots"])
def scatter_tokens(
    k,
    k_token_stride,
    k_head_stride,
    v,
    v_token_stride,
    v_head_stride,
    k_pool,
    v_pool,
    slot_mapping,
    num_slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Copy one token's [HEADS, DIM] of K and of V to its slot, unless the slot is outside the pool."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        head = tl.arange(0, HEADS_BLOCK)[:, None]
        dim = tl.arange(0, DIM_BLOCK)[None, :]
        mask = (head < HEADS) & (dim < DIM)
        target = slot * (HEADS * DIM) + head * DIM + dim
        k_value = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=mask)
        v_value = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        tl.store(k_pool + target, k_value, mask=mask)
        tl.store(v_pool + target, v_value, mask=mask)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`phalanx.kernels.store_kv` on checked arguments with at least one token."""
    num_tokens, heads, dim = k.shape
    with device_guard(k):
        scatter_tokens[(num_tokens,)](
            k,
            k.stride(0),
            k.stride(1),
            v,
            v.stride(0),
            v.stride(1),
            k_pool,
            v_pool,
            slot_mapping,
            k_pool.shape[0],
            HEADS=heads,
            DIM=dim,
            HEADS_BLOCK=triton.next_power_of_2(heads),
            DIM_BLOCK=triton.next_power_of_2(dim),
        )
