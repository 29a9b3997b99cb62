"""RMSNorm on the CPU, with or without the residual addition, one pass over a row that stays in cache."""

from __future__ import annotations

import functools

import numpy as np
import torch

from phalanx.kernels.cpu_jit import (
    KINDS,
    compiled,
    fetch_add,
    float_bits,
    float_of,
    get,
    inlined,
    inlined_sums,
    int64s,
    put,
    row_at,
)
from phalanx.kernels.cpu_parallel import HEADER, Kernel, chunks_of

_ARGUMENTS = 11


@inlined_sums
def _add_squares(x, residual, hidden, kind):
    """residual += x; returns the sum of the squares of what was stored."""
    total = np.float32(0.0)
    for i in range(hidden):
        put(residual, i, get(x, i, kind) + get(residual, i, kind), kind)
        value = get(residual, i, kind)
        total += value * value
    return total


@inlined_sums
def _squares(x, hidden, kind):
    total = np.float32(0.0)
    for i in range(hidden):
        value = get(x, i, kind)
        total += value * value
    return total


@inlined
def _scale(x, weight, out, hidden, factor, kind):
    for i in range(hidden):
        put(out, i, get(x, i, kind) * factor * get(weight, i, kind), kind)


def _build(kind: int):
    @compiled(kind)
    def run(address):
        a = int64s(address, HEADER + _ARGUMENTS)
        num_tokens, per_chunk, hidden, eps = a[2], a[3], a[4], float_of(a[5])
        x_at, x_bytes, residual_at, residual_bytes, out_at, out_bytes = a[6], a[7], a[8], a[9], a[10], a[11]
        weight = row_at(a[12], hidden)
        while True:
            chunk = fetch_add(address, 1)
            if chunk >= a[1]:
                break
            for token in range(chunk * per_chunk, min((chunk + 1) * per_chunk, num_tokens)):
                x, out = row_at(x_at + token * x_bytes, hidden), row_at(out_at + token * out_bytes, hidden)
                if residual_at != 0:
                    residual = row_at(residual_at + token * residual_bytes, hidden)
                    total = _add_squares(x, residual, hidden, kind)
                else:
                    residual = x
                    total = _squares(x, hidden, kind)
                factor = np.float32(1.0) / np.sqrt(total / np.float32(hidden) + eps)
                _scale(residual, weight, out, hidden, factor, kind)

    return run


@functools.cache
def kernel(kind: int) -> Kernel:
    """Compiled for one kind of memory."""
    return Kernel(_build(kind).address, _ARGUMENTS)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """`rms_norm` of x, or with a residual `add_rms_norm`; of checked arguments."""
    num_tokens, hidden = x.shape
    size = x.element_size()
    per_chunk, chunks = chunks_of(num_tokens, hidden)
    kernel(KINDS[x.dtype])(
        chunks,
        num_tokens,
        per_chunk,
        hidden,
        float_bits(eps),
        x.data_ptr(),
        x.stride(0) * size,
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0) * size,
        out.data_ptr(),
        out.stride(0) * size,
        weight.data_ptr(),
    )
