"""Build paged attention's `kv_indices` on the device: ragged rows of a slot table, packed as one CSR stream.

Self-contained: needs torch and NumPy (for the Triton backend also Triton), nothing of this package's engine.
"""

from __future__ import annotations

import torch

from phalanx.kernels.checks import check_page_size, check_tensor, pick_backend
from phalanx.kernels.ragged import gather_rows
from phalanx.kernels.reference import create_kv_indices_naive

BACKENDS = ("auto", "naive", "torch", "triton")
_INT = (torch.int32, torch.int64)
_MAX_TOTAL = 2**31 - 1  # kv_indptr is int32


def create_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_kernel_lens: torch.Tensor,
    kv_indptr: torch.Tensor | None = None,
    kv_start_idx: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    total: int | None = None,
    backend: str = "auto",
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather `kv_indices[kv_indptr[b] + j] = req_to_token[rows[b], start[b] + j]` for 0 <= j < lens[b].

    With page_size p > 1 one page id per page: `req_to_token[rows[b], start[b] + j*p] // p` for
    0 <= j < ceil(lens[b] / p), and kv_indptr counts pages. Nothing else is written.

    req_to_token: [num_rows, max_context] int32, token slots; any row stride, last stride 1.
    req_pool_indices: [bs] int32 or int64, row of each request (`rows`); any stride, duplicates are fine.
    page_kernel_lens: [bs] int32 or int64, tokens of each request (`lens`), >= 0; any stride.
    kv_indptr: [bs+1] int32, contiguous, read (gaps are allowed); None: computed on the device.
    kv_start_idx: [bs] int32 or int64, first column (`start`), a multiple of page_size; None: 0.
    kv_indices: [>= kv_indptr[bs]] int32 or int64, contiguous, written in place. None: allocated, int32, with
        `total` entries, or if that is None too after one synchronising read of the number of entries.
    total: number of entries where the caller knows it (or a bound on it). Allocates without synchronising,
        and a kv_indices shorter than it is refused.
    backend: "naive" (one slice per request and a cat), "torch", "triton" or "auto" (Triton on CUDA, else
        torch). Naive and torch read lengths on the host; Triton does not, and can be captured in a CUDA graph
        when kv_indices or total is given. It takes one launch with kv_indptr given, else two.
    check: also compare rows, starts, lengths and the output's end with the table; synchronises.

    Returns (kv_indptr, kv_indices). A batch of 0 launches no kernel.
    Without `check`, rows and columns must lie in the table; what falls past the end of kv_indices is dropped
    by Triton and a ValueError elsewhere, never written.
    Raises TypeError or ValueError naming the argument at fault.
    """
    _check_arguments(
        req_to_token,
        req_pool_indices,
        page_kernel_lens,
        kv_indptr,
        kv_start_idx,
        kv_indices,
        page_size,
        total,
    )
    chosen = pick_backend(backend, req_to_token.device, BACKENDS)
    table, rows, lens = req_to_token, req_pool_indices, page_kernel_lens
    if rows.shape[0] == 0:
        if kv_indptr is None:
            kv_indptr = torch.zeros(1, dtype=torch.int32, device=table.device)
        return kv_indptr, table.new_empty(total or 0) if kv_indices is None else kv_indices
    if check:
        room = total if kv_indices is None else kv_indices.shape[0]
        check_bounds(table, rows, lens, kv_indptr, kv_start_idx, page_size=page_size, room=room)
    if chosen == "triton":
        from phalanx.kernels import kv_indices_triton

        return kv_indices_triton.create(
            table, rows, lens, kv_indptr, kv_start_idx, kv_indices, page_size=page_size, total=total
        )
    create = create_kv_indices_naive if chosen == "naive" else _create_torch
    if kv_indices is None and (total is not None or kv_indptr is not None):
        size = int(kv_indptr[-1]) if total is None else total
        kv_indices = table.new_empty(size)
    return create(table, rows, lens, kv_indptr, kv_start_idx, kv_indices, page_size=page_size)


def check_bounds(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_kernel_lens: torch.Tensor,
    kv_indptr: torch.Tensor | None,
    kv_start_idx: torch.Tensor | None,
    *,
    page_size: int,
    room: int | None,
) -> None:
    """Raise ValueError naming the first request that leaves the table or the `room` entries of output.

    Arguments as in `create_kv_indices`. Computes on the device and synchronises once if all is well.
    """
    num_rows, width = req_to_token.shape
    rows, lens = req_pool_indices.long(), page_kernel_lens.long()
    starts = torch.zeros_like(lens) if kv_start_idx is None else kv_start_idx.long()
    counts = _counts(lens, page_size)
    ends = counts.cumsum(0) if kv_indptr is None else kv_indptr[:-1] + counts
    faults = {
        f"its row is outside the table's {num_rows} rows": (rows < 0) | (rows >= num_rows),
        "its start is negative": starts < 0,
        f"its start is not a multiple of page_size {page_size}": starts % page_size != 0,
        "its length is negative": lens < 0,
        f"it ends past the table's {width} columns": starts + lens > width,
        f"its kv_indptr leaves the {room} entries of kv_indices": (ends - counts < 0)
        | (ends > (_MAX_TOTAL if room is None else room)),
    }
    bad = torch.stack(list(faults.values()))
    if not bool(bad.any()):
        return
    first = int(bad.any(0).nonzero()[0])
    reason = next(text for text, fault in faults.items() if bool(fault[first]))
    raise ValueError(
        f"req_pool_indices[{first}] = {int(rows[first])} with start {int(starts[first])} and length "
        f"{int(lens[first])}: {reason}"
    )


def _create_torch(
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor | None,
    kv_start_idx: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    *,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = _counts(lens.long(), page_size)
    dense = torch.zeros(len(rows) + 1, dtype=torch.int64, device=table.device)
    torch.cumsum(counts, 0, out=dense[1:])
    total = int(dense[-1])
    if total < 0:
        raise ValueError("page_kernel_lens has a negative length (check=True names the request)")
    if total > _MAX_TOTAL:
        raise ValueError(f"page_kernel_lens sum to {total} entries, kv_indptr (int32) holds {_MAX_TOTAL}")
    first = rows.long() * table.stride(0)
    if kv_start_idx is not None:
        first = first + kv_start_idx
    offsets = None
    if kv_indptr is None:
        kv_indptr = dense.int()
        if kv_indices is None:
            kv_indices = table.new_empty(total)
        elif total > kv_indices.shape[0]:
            raise ValueError(f"kv_indices has {kv_indices.shape[0]} entries, {total} are needed")
    else:
        assert kv_indices is not None  # the caller allocates where kv_indptr is given
        offsets = kv_indptr[:-1].long()
    gather_rows(table, first, counts, dense, kv_indices, page_size=page_size, offsets=offsets)
    return kv_indptr, kv_indices


def _counts(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    return lens if page_size == 1 else (lens + (page_size - 1)) // page_size


def _check_arguments(
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor | None,
    kv_start_idx: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    page_size: int,
    total: int | None,
) -> None:
    check_page_size(page_size)
    check_tensor("req_to_token", table, dtypes=(torch.int32,), shape=(None, None))
    device = table.device
    if table.stride(1) != 1 and table.numel():
        raise ValueError(f"req_to_token must have a last stride of 1, got strides {table.stride()}")
    check_tensor("req_pool_indices", rows, dtypes=_INT, shape=(None,), device=device)
    bs = rows.shape[0]
    if bs and table.numel() == 0:
        raise ValueError(f"req_to_token is empty, shape {list(table.shape)}")
    check_tensor("page_kernel_lens", lens, dtypes=_INT, shape=(bs,), device=device)
    if kv_start_idx is not None:
        check_tensor("kv_start_idx", kv_start_idx, dtypes=_INT, shape=(bs,), device=device)
    if kv_indptr is not None:
        check_tensor(
            "kv_indptr", kv_indptr, dtypes=(torch.int32,), shape=(bs + 1,), device=device, contiguous=True
        )
    if kv_indices is not None:
        check_tensor("kv_indices", kv_indices, dtypes=_INT, shape=(None,), device=device, contiguous=True)
    _check_total(kv_indices, total)


def _check_total(kv_indices: torch.Tensor | None, total: int | None) -> None:
    if total is None:
        return
    if isinstance(total, bool) or not isinstance(total, int):
        raise TypeError(f"total must be an int or None, got {type(total).__name__}")
    if not 0 <= total <= _MAX_TOTAL:
        raise ValueError(f"total must be in [0, {_MAX_TOTAL}], got {total}")
    if kv_indices is not None and kv_indices.shape[0] < total:
        raise ValueError(f"kv_indices has {kv_indices.shape[0]} entries, total asks for {total}")
