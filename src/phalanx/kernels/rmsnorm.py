"""RMSNorm, alone and together with the residual addition before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels.checks import check_tensor, pick_with_numba
from phalanx.kernels.decode_attention import FLOATS

MAX_HIDDEN = 65536  # one program holds a row in registers


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension, in fp32 with one rounding at the end.

    x: [num_tokens, hidden] fp32, bf16 or fp16; any token stride, last stride 1. weight: [hidden], x's dtype,
        contiguous. out: like x (x itself is fine); allocated if None. Returned.
    backend: "torch", "triton", "numba" or "auto" (Triton on CUDA, numba on a CPU in fp32 and bf16).
    Capturable in a CUDA graph; 0 tokens launch nothing. Raises TypeError or ValueError naming the argument.
    """
    _check(x, weight, {"out": out})
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chosen = pick_with_numba(backend, x.device, x.dtype)
    if chosen == "torch":
        out.copy_(F.rms_norm(x, weight.shape, weight, eps))
    elif not x.shape[0]:
        return out
    elif chosen == "numba":
        from phalanx.kernels import rmsnorm_numba

        rmsnorm_numba.rms_norm(x, None, weight, eps, out)
    else:
        from phalanx.kernels import rmsnorm_triton

        rmsnorm_triton.rms_norm(x, None, weight, eps, out)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    backend: str = "auto",
) -> None:
    """In place: residual += x, then x = rms_norm(residual). The norm reads the rounded sum.

    x, residual: [num_tokens, hidden], one dtype; any token strides, last stride 1; not overlapping.
    weight, eps, backend and errors: as in `rms_norm`.
    """
    _check(x, weight, {"residual": residual})
    chosen = pick_with_numba(backend, x.device, x.dtype)
    if chosen == "torch":
        residual.add_(x)
        x.copy_(F.rms_norm(residual, weight.shape, weight, eps))
    elif not x.shape[0]:
        return
    elif chosen == "numba":
        from phalanx.kernels import rmsnorm_numba

        rmsnorm_numba.rms_norm(x, residual, weight, eps, x)
    else:
        from phalanx.kernels import rmsnorm_triton

        rmsnorm_triton.rms_norm(x, residual, weight, eps, x)


def _check(x: torch.Tensor, weight: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    check_tensor("x", x, dtypes=FLOATS, shape=(None, None))
    hidden = x.shape[1]
    if not 1 <= hidden <= MAX_HIDDEN:
        raise ValueError(f"x must have 1 to {MAX_HIDDEN} columns, got {hidden}")
    check_tensor("weight", weight, dtypes=(x.dtype,), shape=(hidden,), device=x.device, contiguous=True)
    for name, tensor in {"x": x, **others}.items():
        if tensor is None:
            continue
        check_tensor(name, tensor, dtypes=(x.dtype,), shape=x.shape, device=x.device)
        if tensor.numel() and tensor.stride(1) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")
