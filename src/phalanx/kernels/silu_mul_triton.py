"""The Triton backend of `silu_mul`. Grid: (tokens, column blocks)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phalanx.kernels.kv_indices_triton import device_guard

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def silu_mul_block(gate_up, gate_up_stride, out, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    source = gate_up + token * gate_up_stride + col
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # of a negative number, so that nothing overflows
    silu = gate * (tl.where(gate >= 0, 1.0, small) / (1.0 + small))
    silu = silu.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * out_stride + col, (silu * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """`phalanx.kernels.silu_mul` on checked arguments that are not empty."""
    num_tokens, size = out.shape
    with device_guard(out):
        silu_mul_block[(num_tokens, triton.cdiv(size, BLOCK))](
            gate_up,
            gate_up.stride(0),
            out,
            out.stride(0),
            SIZE=size,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
