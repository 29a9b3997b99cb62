"""Random numbers that are a pure function of (seed, number of tokens generated, counter)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Float64 = npt.NDArray[np.float64]

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


def row_keys(seeds: torch.Tensor, num_generated: torch.Tensor) -> torch.Tensor:
    """One key per row and output position; all randomness of that token comes from it.

    The seed is mixed before the counter is added, so that neighbouring seeds give unrelated keys.

    Args:
        seeds: [n] int64.
        num_generated: [n] int64 or int32, output tokens the row has so far.

    Returns:
        [n] int64.
    """
    state = _mix(seeds ^ _signed(_SEED_SALT)) + (num_generated.to(torch.int64) + 1) * _signed(_GOLDEN)
    return _mix(state)


def exponentials(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Exponentially distributed numbers of mean 1, a pure function of (key, counter).

    Args:
        keys: [n] int64. counters: [n, m] or [m] int64, not negative.

    Returns:
        [n, m] float64, positive: -log of a uniform number in (0, 1) of 53 bits.
    """
    bits = _mix(keys[:, None] + (counters + 1) * _signed(_GOLDEN))
    return -torch.log((((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53)


def reference_exponentials(seed: int, num_generated: int, counters: npt.NDArray[np.int64]) -> Float64:
    """`exponentials` of one row's key, in NumPy's unsigned arithmetic (the specification of both).

    counters: [m] int64. Returns [m] float64.
    """

    def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
        return x ^ (x >> np.uint64(31))

    golden = np.uint64(_GOLDEN)
    start = mix(np.array([(seed & _MASK64) ^ _SEED_SALT], np.uint64))
    key = mix(start + np.array([num_generated + 1], np.uint64) * golden)
    bits = mix(key + (counters.astype(np.uint64) + np.uint64(1)) * golden)
    return -np.log(((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)
