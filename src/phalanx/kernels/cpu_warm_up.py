"""Compile the numba kernels of a model before the first step, or read them from numba's cache on disk."""

from __future__ import annotations

import torch

from phalanx.kernels import decode_attention_numba, rmsnorm_numba, rope_numba, silu_mul_numba
from phalanx.kernels.cpu_jit import KINDS


def compile_kernels(dtype: torch.dtype, group: int, head_dim: int, head_norm: bool) -> None:
    """Make ready what a decoder runs.

    dtype: of weights, activations and KV, one that `checks.numba_problem` has nothing against. group: query
    heads per KV head. head_norm: Q and K are normed head by head.
    """
    kind = KINDS[dtype]
    decode_attention_numba.kernel(decode_attention_numba.shared_group(group), head_dim, kind)
    rmsnorm_numba.kernel(kind)
    rope_numba.kernel(head_norm, head_dim, kind)
    silu_mul_numba.kernel(kind)
