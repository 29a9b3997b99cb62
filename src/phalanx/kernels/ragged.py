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


def gather_entries(
    table: torch.Tensor, address: torch.Tensor, page_size: int, out: torch.Tensor
) -> torch.Tensor:
    """Fill out[i] with the entry at address[i], divided by page_size (slot to page).

    table: [num_rows, width] int32, last stride 1. address: [n] int64, counted in entries from its first one.
    out: [n] int32 or int64, contiguous; returned.
    """
    size = (table.shape[0] - 1) * table.stride(0) + table.shape[1]
    flat = table.as_strided((size,), (1,))
    if out.dtype == flat.dtype:
        torch.index_select(flat, 0, address, out=out)  # on a CPU a copy through a temporary costs as much
    else:
        out.copy_(flat.index_select(0, address))
    return out if page_size == 1 else out.floor_divide_(page_size)
