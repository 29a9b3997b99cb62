"""What happens to Q, K and V between the projection and attention, in one launch.

Rotary embedding (rotate-half layout), the RMSNorm over each head before it where a model has one, and the
store of K and V into the paged pool where a caller wants it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels.checks import check_tensor, pick_with_numba
from phalanx.kernels.decode_attention import FLOATS
from phalanx.kernels.store_kv import store_kv


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    v: torch.Tensor | None = None,
    k_pool: torch.Tensor | None = None,
    v_pool: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Rotate q and k in place: halves a, b of a head become a*cos - b*sin, b*cos + a*sin.

    q: [num_tokens, num_q_heads, head_dim], k: [num_tokens, num_kv_heads, head_dim]; fp32, bf16 or fp16, any
        token and head strides, last stride 1 (views of a merged qkv are meant). head_dim is even.
    positions: [num_tokens] int64 (or int32), contiguous, each below max_positions.
    cos_sin_cache: [max_positions, head_dim] fp32, contiguous; the first half of a row is cos, the rest sin.
    q_norm, k_norm: [head_dim] weights of an RMSNorm over each head before the rotation, rounded to the dtype
        in between; both or none.
    v, k_pool, v_pool, slot_mapping: all or none. Given: the rotated K and v go to slot slot_mapping[t] of
        the pools as in `store_kv` (a slot outside the pool is dropped), and k itself keeps its bytes.
    backend: "torch", "triton", "numba" or "auto" (Triton on CUDA, numba on a CPU in fp32 and bf16).

    Computed in fp32 and rounded once. Capturable in a CUDA graph; 0 tokens launch nothing.
    Raises TypeError or ValueError naming the argument at fault.
    """
    _check(q, k, positions, cos_sin_cache)
    head_dim, device = q.shape[2], q.device
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together, only one is given")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, dtypes=(q.dtype,), shape=(head_dim,), device=device, contiguous=True)
    store = (v, k_pool, v_pool, slot_mapping)
    if any(part is None for part in store) and any(part is not None for part in store):
        raise ValueError("v, k_pool, v_pool and slot_mapping go together, only some are given")
    if v is not None and k_pool is not None and v_pool is not None and slot_mapping is not None:
        _check_store(k, v, k_pool, v_pool, slot_mapping)
    chosen = pick_with_numba(backend, device, q.dtype)
    if chosen == "torch":
        _rope_torch(q, k, positions, cos_sin_cache, q_norm, k_norm, eps, v, k_pool, v_pool, slot_mapping)
    elif not q.shape[0]:
        return
    elif chosen == "numba":
        from phalanx.kernels import rope_numba

        rope_numba.rope(q, k, positions, cos_sin_cache, q_norm, k_norm, eps, v, k_pool, v_pool, slot_mapping)
    else:
        from phalanx.kernels import rope_triton

        rope_triton.rope(q, k, positions, cos_sin_cache, q_norm, k_norm, eps, v, k_pool, v_pool, slot_mapping)


def _rope_torch(
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
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)

    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = F.rms_norm(x, weight.shape, weight, eps)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    q.copy_(rotated(q, q_norm))
    if v is None or k_pool is None or v_pool is None or slot_mapping is None:
        k.copy_(rotated(k, k_norm))
    else:
        store_kv(rotated(k, k_norm), v, k_pool, v_pool, slot_mapping, backend="torch")


def _check(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> None:
    check_tensor("q", q, dtypes=FLOATS, shape=(None, None, None))
    num_tokens, _, head_dim = q.shape
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"q must have an even head_dim, got {head_dim}")
    check_tensor("k", k, dtypes=(q.dtype,), shape=(num_tokens, None, head_dim), device=q.device)
    check_tensor(
        "positions",
        positions,
        dtypes=(torch.int64, torch.int32),
        shape=(num_tokens,),
        device=q.device,
        contiguous=True,
    )
    check_tensor(
        "cos_sin_cache",
        cache,
        dtypes=(torch.float32,),
        shape=(None, head_dim),
        device=q.device,
        contiguous=True,
    )
    for name, tensor in (("q", q), ("k", k)):
        if tensor.numel() and tensor.stride(2) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")


def _check_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    check_tensor("v", v, dtypes=(k.dtype,), shape=k.shape, device=k.device)
    if v.numel() and v.stride(2) != 1:
        raise ValueError(f"v must have a last stride of 1, got strides {v.stride()}")
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        shape = (None, *k.shape[1:])
        check_tensor(name, pool, dtypes=(k.dtype,), shape=shape, device=k.device, contiguous=True)
    check_tensor("v_pool", v_pool, dtypes=(k.dtype,), shape=k_pool.shape)
    check_tensor(
        "slot_mapping",
        slot_mapping,
        dtypes=(torch.int64, torch.int32),
        shape=(k.shape[0],),
        device=k.device,
        contiguous=True,
    )
