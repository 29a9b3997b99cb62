"""Address arithmetic of the torch backends that gather ragged rows."""

from __future__ import annotations

import torch


def ragged_addresses(
    first: torch.Tensor, indptr: torch.Tensor, counts: torch.Tensor, total: int, step: int
) -> torch.Tensor:
    """Concatenate the progressions first[b], first[b] + step, ... of counts[b] terms.

    first, counts: [bs] int64; indptr: [bs] int64, exclusive prefix sum of counts; total: their sum.
    Returns [total] int64. A prefix sum over jumps: about twice as fast on a CPU as repeat_interleave.
    """
    base = first - indptr * step
    terms = torch.full((total + 1,), step, dtype=torch.int64, device=first.device)
    terms[:1] = 0
    # Jumps of empty rows fall on the next row's first term and add up there.
    terms.scatter_add_(0, indptr, torch.diff(base, prepend=base.new_zeros(1)))
    return terms.cumsum_(0)[:total]


def flat_view(table: torch.Tensor) -> torch.Tensor:
    """All memory from the first to the last entry of a table with last stride 1, as one vector."""
    size = (table.shape[0] - 1) * table.stride(0) + table.shape[1]
    return table.as_strided((size,), (1,))
