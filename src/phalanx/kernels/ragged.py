"""The gather of ragged rows behind the torch backends of `create_kv_indices` and `step_prep`."""

from __future__ import annotations

import numpy as np
import torch

# Copying whole rows costs about 50 us a call and 60 ns a row, gathering entries 2 ns an entry (AMD EPYC).
COPY_FROM_ENTRIES = 32768
COPY_FROM_MEAN_LENGTH = 32
MAX_COPY = 16384  # entries of a row that one pair of copies moves; longer rows are cut
BLOCK_BYTES = 2**17  # bytes copied through one temporary, which should stay in the L2 cache


def gather_rows(
    table: torch.Tensor,
    first: torch.Tensor,
    counts: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    offsets: torch.Tensor | None = None,
) -> None:
    """out[offsets[b] + j] = table entry first[b] + j * page_size, divided by page_size, for j < counts[b].

    table: [num_rows, width] int32, last stride 1. out: [n] int32 or int64, contiguous; no more is written.
    first: [bs] int64, counted in entries from the table's first one. counts: [bs] int64.
    indptr: [bs+1] int64, exclusive prefix sum of counts. offsets: [bs] int64; None: rows lie densely.
    Raises ValueError if offsets ask for more than out has. On a CPU a row that leaves the table is an error
    too, ValueError or IndexError; on CUDA the caller vouches for the rows.
    """
    size = (table.shape[0] - 1) * table.stride(0) + table.shape[1]
    flat = table.as_strided((size,), (1,))
    total = int(indptr[-1])
    large = total >= COPY_FROM_MEAN_LENGTH * len(first) + COPY_FROM_ENTRIES
    if large and page_size == 1 and flat.device.type == "cpu":
        starts = indptr[:-1] if offsets is None else offsets
        copy_rows(flat.numpy(), first.numpy(), counts.numpy(), starts.numpy(), out.numpy())
        return
    address = ragged_addresses(first, indptr[:-1], counts, total, page_size)
    if offsets is None:
        _gather_entries(flat, address, page_size, out[:total])
        return
    target = ragged_addresses(offsets, indptr[:-1], counts, total, 1)
    if total and int(target.max()) >= out.shape[0]:
        raise ValueError(f"kv_indices has {out.shape[0]} entries, kv_indptr asks for more")
    out.index_copy_(0, target, _gather_entries(flat, address, page_size, out.new_empty(total)))


def copy_rows(
    flat: np.ndarray, first: np.ndarray, counts: np.ndarray, offsets: np.ndarray, out: np.ndarray
) -> None:
    """out[offsets[b] : offsets[b] + counts[b]] = flat[first[b] : first[b] + counts[b]], in no loop over rows.

    flat: [size] int32, contiguous. first, counts, offsets: [bs] int64. out: [n] int32 or int64, contiguous.
    Rows fall into classes between two powers of two. One width then serves a class: two copies, one from a
    row's first entry on and one up to its last, cover any row of the class; where they overlap, both write
    the same. NumPy takes and puts opaque elements of any width, so a class costs two calls and a row four
    memcpys: on short rows half the time of a gather of single entries, on long ones a quarter.
    Raises ValueError, before anything is written, if a row leaves flat or out or has a negative length.
    """
    if not counts.all():
        live = counts != 0
        first, counts, offsets = first[live], counts[live], offsets[live]
    if len(counts) == 0:
        return
    _check_ranges(first, counts, offsets, len(flat), len(out))
    if counts.max() > MAX_COPY:
        first, counts, offsets = _cut(first, counts, offsets)
    octave = np.frexp(counts.astype(np.float64))[1].astype(np.int8)
    order = np.argsort(octave, kind="stable")
    counts = counts[order]
    source, target = np.empty((2, len(order), 2), dtype=np.int64)
    source[:, 0], target[:, 0] = first[order], offsets[order]
    begin = 0
    for num_rows in np.bincount(octave).tolist():  # at most 15 classes, since no row is longer than MAX_COPY
        end = begin + num_rows
        if num_rows:
            width = (int(counts[begin:end].max()) + 1) // 2
            for pairs in (source, target):
                np.add(pairs[begin:end, 0], counts[begin:end] - width, out=pairs[begin:end, 1])
            _copy_windows(flat, source[begin:end], out, target[begin:end], width)
        begin = end


def _copy_windows(
    flat: np.ndarray, source: np.ndarray, out: np.ndarray, target: np.ndarray, width: int
) -> None:
    """out[target : target + width] = flat[source : source + width] for all pairs of a class."""
    reads, writes = _windows(flat, width), _windows(out, width)
    step = max(1, BLOCK_BYTES // (2 * reads.itemsize))
    for begin in range(0, len(source), step):
        taken = reads[source[begin : begin + step]]
        if out.dtype != flat.dtype:
            taken = taken.view(flat.dtype).astype(out.dtype).view(writes.dtype)
        writes[target[begin : begin + step]] = taken


def _windows(flat: np.ndarray, width: int) -> np.ndarray:
    """A view with one opaque element of `width` entries for each entry of flat at which one fits."""
    window = np.dtype((np.void, width * flat.itemsize))
    return np.ndarray((len(flat) - width + 1,), window, flat, strides=(flat.itemsize,))


def _cut(
    first: np.ndarray, counts: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of at most MAX_COPY entries, so that the temporaries of any batch are small."""
    num_parts = -(-counts // MAX_COPY)
    row = np.repeat(np.arange(len(counts)), num_parts)
    done = (np.arange(len(row)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * MAX_COPY
    return first[row] + done, np.minimum(counts[row] - done, MAX_COPY), offsets[row] + done


def _check_ranges(first: np.ndarray, counts: np.ndarray, offsets: np.ndarray, size: int, room: int) -> None:
    if counts.min() < 0:
        raise ValueError("page_kernel_lens has a negative length (check=True names the request)")
    if first.min() < 0 or (first + counts).max() > size:
        raise ValueError(
            "req_pool_indices, with kv_start_idx and page_kernel_lens, leaves req_to_token "
            "(check=True names the request)"
        )
    if offsets.min() < 0:
        raise ValueError("kv_indptr has a negative offset (check=True names the request)")
    if (offsets + counts).max() > room:
        raise ValueError(f"kv_indices has {room} entries, kv_indptr asks for more")


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


def _gather_entries(
    flat: torch.Tensor, address: torch.Tensor, page_size: int, out: torch.Tensor
) -> torch.Tensor:
    """Fill out[i] with flat[address[i]], divided by page_size (slot to page), and return it."""
    if out.dtype == flat.dtype:
        torch.index_select(flat, 0, address, out=out)  # on a CPU a copy through a temporary costs as much
    else:
        out.copy_(flat.index_select(0, address))
    return out if page_size == 1 else out.floor_divide_(page_size)
