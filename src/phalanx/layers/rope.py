"""Rotary position embedding: default, linear and Llama 3.1 scaling (rotate-half layout)."""

from __future__ import annotations

import math

import torch

from phalanx.config.groups import RopeConfig
from phalanx.core.errors import ModelError


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] fp32 on the CPU, the angle per position of each pair; as transformers computes it.

    Raises ModelError for an unknown kind or an odd head_dim.
    """
    if head_dim % 2:
        raise ModelError(f"rotary embedding needs an even head_dim, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inv_freq = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return inv_freq
    if config.kind == "linear":
        return inv_freq / config.factor
    if config.kind == "llama3":
        return _llama3(inv_freq, config)
    raise ModelError(f"rope kind {config.kind!r} is not supported (default, linear, llama3 are)")


def _llama3(inv_freq: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Divide long wavelengths by `factor`, keep short ones, blend between."""
    low, high, original = config.low_freq_factor, config.high_freq_factor, config.original_max_position
    wavelength = 2 * math.pi / inv_freq
    slow = inv_freq / config.factor
    share = (original / wavelength - low) / (high - low)
    blended = (1 - share) * slow + share * inv_freq
    scaled = torch.where(wavelength > original / low, slow, blended)
    return torch.where(wavelength < original / high, inv_freq, scaled)


class RotaryEmbedding:
    """cos and sin for positions 0 .. max_positions-1, kept in fp32.

    cos, sin: [max_positions, head_dim / 2] fp32, views of cache: [max_positions, head_dim], cos then sin.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        inv_freq = inverse_frequencies(config, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        self.cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
        self.cos, self.sin = self.cache.chunk(2, dim=-1)
        self.dtype = dtype

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for one step, shared by all layers.

        positions: [num_tokens] int64. Returns cos and signed sin (first half negated), each
        [num_tokens, 1, head_dim] in the compute dtype.
        """
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        full_cos = torch.cat((cos, cos), dim=-1).to(self.dtype)
        signed_sin = torch.cat((-sin, sin), dim=-1).to(self.dtype)
        return full_cos.unsqueeze(1), signed_sin.unsqueeze(1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate. x: [num_tokens, num_heads, head_dim]; cos, signed_sin from `RotaryEmbedding.tables`.

    Returns a new contiguous tensor like x.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), signed_sin)
