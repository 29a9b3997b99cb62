"""One uniform number per row: a pure function of (seed, number of tokens generated)."""

from __future__ import annotations

import torch

_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of this unsigned 64-bit value."""
    return value - (1 << 64) if value >> 63 else value


# The constants of splitmix64 (Steele, Lea, Flood 2014): its output function passes BigCrush on a counter.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_SEED_SALT = 0x6A09E667F3BCC909  # sqrt(2): keeps these streams apart from seeds that were themselves mixed


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function; int64 arithmetic wraps, `>>` is arithmetic and is masked to logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def row_uniforms(seeds: torch.Tensor, num_generated: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1).

    The seed is mixed before the counter is added, so that neighbouring seeds give unrelated streams.

    Args:
        seeds: [n] int64.
        num_generated: [n] int64 or int32, output tokens the row has so far.

    Returns:
        [n] float64, multiples of 2**-53.
    """
    state = _mix(seeds ^ _signed(_SEED_SALT)) + (num_generated.to(torch.int64) + 1) * _signed(_GOLDEN)
    return ((_mix(state) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def reference_uniform(seed: int, num_generated: int) -> float:
    """`row_uniforms` for one row in plain Python integers (the specification of it)."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * _MIX1) & _MASK64
        x = ((x ^ (x >> 27)) * _MIX2) & _MASK64
        return x ^ (x >> 31)

    state = mix((seed & _MASK64) ^ _SEED_SALT) + (num_generated + 1) * _GOLDEN
    return (mix(state & _MASK64) >> 11) * 2.0**-53
