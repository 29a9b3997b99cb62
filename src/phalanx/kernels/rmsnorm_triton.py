"""The Triton backend of `rms_norm` and `add_rms_norm`: one program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phalanx.kernels.kv_indices_triton import device_guard

VALUES_PER_WARP = 512  # 16 values a thread


@triton.jit
def norm_rows(
    x,
    x_stride,
    residual,
    residual_stride,
    weight,
    out,
    out_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Norm one row; with ADD the row is residual + x, which is written back to residual first."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < HIDDEN
    value = tl.load(x + token * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        place = residual + token * residual_stride + col
        rounded = (value + tl.load(place, mask=mask, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(place, rounded, mask=mask)
        value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    scaled = value * factor * tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + col, scaled.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """`phalanx.kernels.rms_norm`, or `add_rms_norm` where residual is given, on checked arguments."""
    num_tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    with device_guard(x):
        norm_rows[(num_tokens,)](
            x,
            x.stride(0),
            residual,
            0 if residual is None else residual.stride(0),
            weight,
            out,
            out.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK=block,
            ADD=residual is not None,
            num_warps=max(1, min(16, block // VALUES_PER_WARP)),
        )
