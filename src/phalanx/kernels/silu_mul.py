"""silu(gate) * up on the merged output of the gate and up projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels.checks import check_tensor, pick_with_numba
from phalanx.kernels.decode_attention import FLOATS


def silu_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto"
) -> torch.Tensor:
    """silu(gate_up[:, :size]) * gate_up[:, size:]; silu is rounded to the dtype before the product.

    gate_up: [num_tokens, 2 * size] fp32, bf16 or fp16; any token stride, last stride 1.
    out: [num_tokens, size], any token stride, last stride 1, not overlapping; allocated if None. Returned.
    backend: "torch", "triton", "numba" or "auto" (Triton on CUDA, numba on a CPU in fp32 and bf16).
    Capturable in a CUDA graph; 0 tokens launch nothing. Raises TypeError or ValueError naming the argument.
    """
    check_tensor("gate_up", gate_up, dtypes=FLOATS, shape=(None, None))
    num_tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up must have an even number of columns, got {width}")
    size = width // 2
    if out is None:
        out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    check_tensor("out", out, dtypes=(gate_up.dtype,), shape=(num_tokens, size), device=gate_up.device)
    for name, tensor in (("gate_up", gate_up), ("out", out)):
        if tensor.numel() and tensor.stride(1) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")
    chosen = pick_with_numba(backend, gate_up.device, gate_up.dtype)
    if chosen == "torch":
        torch.mul(F.silu(gate_up[:, :size]), gate_up[:, size:], out=out)
    elif not out.numel():
        return out
    elif chosen == "numba":
        from phalanx.kernels import silu_mul_numba

        silu_mul_numba.silu_mul(gate_up, out)
    else:
        from phalanx.kernels import silu_mul_triton

        silu_mul_triton.silu_mul(gate_up, out)
    return out
