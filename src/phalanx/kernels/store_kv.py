"""Scatter new K and V into the paged pool, and gather them back."""

from __future__ import annotations

import torch

from phalanx.kernels.checks import check_tensor, pick_backend

_INDEX = (torch.int32, torch.int64)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write token t's K and V into slot `slot_mapping[t]` of one layer's pool.

    k, v: [num_tokens, num_kv_heads, head_dim], the pool's dtype; any token and head stride, last stride 1
        (slices of a joined qkv tensor are fine).
    k_pool, v_pool: [num_slots, num_kv_heads, head_dim], contiguous, written in place.
    slot_mapping: [num_tokens] int32 or int64, contiguous. A negative slot, or one past the pool, is dropped.
        Slots must be distinct, except in padding page 0, where any of the writers wins.
    backend: "torch", "triton" or "auto" (Triton on CUDA).

    Capturable in a CUDA graph with either backend; 0 tokens launch nothing.
    Raises TypeError or ValueError naming the argument at fault.
    """
    _check(k, v, k_pool, v_pool, slot_mapping)
    chosen = pick_backend(backend, k.device)
    if k.shape[0] == 0:
        return
    if chosen == "triton":
        from phalanx.kernels import store_kv_triton

        store_kv_triton.store_kv(k, v, k_pool, v_pool, slot_mapping)
    else:
        _store_torch(k, v, k_pool, v_pool, slot_mapping)


def gather_kv(
    k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the K and V of `slots` out of one layer's pool.

    k_pool, v_pool: [num_slots, num_kv_heads, head_dim]. slots: [n] int32 or int64, all within the pool.
    Returns k, v: [n, num_kv_heads, head_dim], contiguous. Raises TypeError or ValueError naming the argument.
    """
    check_tensor("slots", slots, dtypes=_INDEX, shape=(None,), device=k_pool.device)
    check_tensor("v_pool", v_pool, dtypes=(k_pool.dtype,), shape=k_pool.shape, device=k_pool.device)
    return k_pool.index_select(0, slots), v_pool.index_select(0, slots)


def _store_torch(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    slots = slot_mapping.long()
    dropped = (slots < 0) | (slots >= k_pool.shape[0])
    if k.device.type == "cpu":
        if bool(dropped.any()):
            kept = torch.nonzero(~dropped).squeeze(1)
            slots, k, v = slots[kept], k[kept], v[kept]
    else:  # No synchronisation here: a dropped token rewrites what slot 0 of padding page 0 holds.
        slots = slots.masked_fill(dropped, 0)
        keep = ~dropped[:, None, None]
        k = torch.where(keep, k, k_pool[0])
        v = torch.where(keep, v, v_pool[0])
    k_pool.index_copy_(0, slots, k)
    v_pool.index_copy_(0, slots, v)


def _check(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    device, dtype, (num_tokens, *token_shape) = k.device, k.dtype, k.shape
    check_tensor("k", k, dtypes=(k_pool.dtype,), shape=(None, None, None))
    check_tensor("v", v, dtypes=(dtype,), shape=k.shape, device=device)
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        check_tensor(name, pool, dtypes=(dtype,), shape=(None, *token_shape), device=device, contiguous=True)
    check_tensor("v_pool", v_pool, dtypes=(dtype,), shape=k_pool.shape)
    check_tensor(
        "slot_mapping", slot_mapping, dtypes=_INDEX, shape=(num_tokens,), device=device, contiguous=True
    )
    for name, tensor in (("k", k), ("v", v)):
        if num_tokens and tensor.stride(2) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")
