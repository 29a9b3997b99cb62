"""The paged KV pool: the only place that owns K and V bytes."""

from __future__ import annotations

import math

import numpy as np
import torch

from phalanx.config.groups import ModelConfig

_CACHE_LINE = 64


class KVPool:
    """K and V of all layers.

    k, v: one tensor per layer, [num_slots, num_kv_heads, head_dim], contiguous; num_slots is
    num_pages * page_size. Slot s lies in page s // page_size; page 0 takes the writes of padding rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        shape = (self.num_slots, config.num_kv_heads, config.head_dim)
        # Zeros, not empty: a masked-out slot is multiplied by zero, and 0 * NaN is NaN.
        self.k = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self.v = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU they are NumPy's: memory is taken when a page is first written, not at the start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _CACHE_LINE - 1, np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE  # torch aligns so, NumPy does not
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
