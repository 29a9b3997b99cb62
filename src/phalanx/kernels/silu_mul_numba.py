"""silu(gate) * up on the CPU, with an exponential that vectorises."""

from __future__ import annotations

import functools

import numpy as np
import torch

from phalanx.kernels.cpu_jit import (
    KINDS,
    compiled,
    exp,
    fetch_add,
    get,
    inlined_fused,
    int64s,
    put,
    rounded,
    row_at,
)
from phalanx.kernels.cpu_parallel import HEADER, Kernel, chunks_of

_ARGUMENTS = 8


@inlined_fused
def _row(gate, up, out, size, kind):
    for i in range(size):
        x = get(gate, i, kind)
        silu = rounded(x / (np.float32(1.0) + exp(-x)), kind)
        put(out, i, silu * get(up, i, kind), kind)


def _build(kind: int):
    @compiled(kind)
    def run(address):
        a = int64s(address, HEADER + _ARGUMENTS)
        num_tokens, per_chunk, size, element_bytes = a[2], a[3], a[4], a[5]
        gate_at, gate_bytes, out_at, out_bytes = a[6], a[7], a[8], a[9]
        while True:
            chunk = fetch_add(address, 1)
            if chunk >= a[1]:
                break
            for token in range(chunk * per_chunk, min((chunk + 1) * per_chunk, num_tokens)):
                gate = gate_at + token * gate_bytes
                up = row_at(gate + size * element_bytes, size)
                _row(row_at(gate, size), up, row_at(out_at + token * out_bytes, size), size, kind)

    return run


@functools.cache
def kernel(kind: int) -> Kernel:
    """Compiled for one kind of memory."""
    return Kernel(_build(kind).address, _ARGUMENTS)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """`kernels.silu_mul` of checked arguments."""
    num_tokens, size = out.shape
    element_bytes = out.element_size()
    per_chunk, chunks = chunks_of(num_tokens, 2 * size)
    kernel(KINDS[out.dtype])(
        chunks,
        num_tokens,
        per_chunk,
        size,
        element_bytes,
        gate_up.data_ptr(),
        gate_up.stride(0) * element_bytes,
        out.data_ptr(),
        out.stride(0) * element_bytes,
    )
