"""The paged KV pool: the only place that owns K and V bytes."""

from __future__ import annotations

import torch

from phalanx.config.groups import ModelConfig


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
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
