"""The Triton backend of `create_kv_indices`; `step_prep` runs `copy_rows` as its second launch.

Rows are copied by a 2-D grid: ROWS requests at a time along the first axis, and along the second axis as many
programs as it takes to fill the device, each taking every n-th block of columns. So few long rows and many
short ones both occupy the whole device, and no length is needed on the host. Strides, sizes and the page size
are run-time values: nothing is compiled anew for another batch or table.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

SCAN_BLOCK = 128  # requests whose counts one program scans; a multiple of ROWS
MAX_ROWS = 8
COLS = 128
TARGET_PROGRAMS = 4096
NUM_WARPS = 4


@triton.jit(do_not_specialize=["lens_stride", "bs", "page_size"])
def scan_blocks(lens, lens_stride, scratch, bs, page_size, PAGED: tl.constexpr, BLOCK: tl.constexpr):
    """Scan counts within blocks of BLOCK requests.

    scratch: [bs + num_blocks] int32 out; exclusive prefix sums inside each block, then each block's sum.
    """
    block = tl.program_id(0)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    live = lane < bs
    count = tl.load(lens + lane.to(tl.int64) * lens_stride, mask=live, other=0).to(tl.int32)
    if PAGED:
        count = (count + page_size - 1) // page_size
    inclusive = tl.cumsum(count, 0)
    tl.store(scratch + lane, inclusive - count, mask=live)
    tl.store(scratch + bs + block, tl.sum(count, 0))


@triton.jit(
    do_not_specialize=[
        "table_stride",
        "rows_stride",
        "lens_stride",
        "starts_stride",
        "bs",
        "out_size",
        "page_size",
    ]
)
def copy_rows(
    table,
    table_stride,
    rows,
    rows_stride,
    lens,
    lens_stride,
    starts,
    starts_stride,
    indptr,
    scratch,
    out,
    bs,
    out_size,
    page_size,
    HAS_START: tl.constexpr,
    PAGED: tl.constexpr,
    SCAN: tl.constexpr,
    COPY: tl.constexpr,
    SCAN_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Copy ROWS ragged rows of the table to their place in out. Grid: (ceil(bs / ROWS), splits).

    SCAN: offsets come from `scan_blocks`' scratch and are written to indptr; else they are read from indptr.
    """
    first_lane = tl.program_id(0) * ROWS
    lane = first_lane + tl.arange(0, ROWS)
    live = lane < bs
    lane64 = lane.to(tl.int64)
    count = tl.load(lens + lane64 * lens_stride, mask=live, other=0).to(tl.int32)
    if PAGED:
        count = (count + page_size - 1) // page_size
    if SCAN:
        offset = tl.load(scratch + lane, mask=live, other=0)
        block = first_lane // SCAN_BLOCK
        for chunk in range(0, block, SCAN_BLOCK):
            before = chunk + tl.arange(0, SCAN_BLOCK)
            offset += tl.sum(tl.load(scratch + bs + before, mask=before < block, other=0), 0)
        if tl.program_id(1) == 0:
            tl.store(indptr + lane + 1, offset + count, mask=live)
            tl.store(indptr + lane, tl.zeros_like(offset), mask=lane == 0)
    else:
        offset = tl.load(indptr + lane, mask=live, other=0)
    if COPY:
        row = tl.load(rows + lane64 * rows_stride, mask=live, other=0).to(tl.int64)
        source = table + row * table_stride
        if HAS_START:
            source += tl.load(starts + lane64 * starts_stride, mask=live, other=0).to(tl.int64)
        target = out + offset.to(tl.int64)
        # What does not fit in the output is dropped, whatever indptr says.
        count = tl.minimum(count.to(tl.int64), out_size - offset.to(tl.int64)).to(tl.int32)
        longest = tl.max(count, 0)
        for first in range(tl.program_id(1) * COLS, longest, tl.num_programs(1) * COLS):
            col = (first + tl.arange(0, COLS))[None, :]
            mask = col < count[:, None]
            if PAGED:
                slot = tl.load(source[:, None] + col.to(tl.int64) * page_size, mask=mask, other=0)
                tl.store(target[:, None] + col, slot // page_size, mask=mask)
            else:
                slot = tl.load(source[:, None] + col, mask=mask, other=0)
                tl.store(target[:, None] + col, slot, mask=mask)


def create(
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor | None,
    kv_start_idx: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    *,
    page_size: int,
    total: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`create_kv_indices` on checked arguments with bs > 0: one launch, or two where kv_indptr is None."""
    bs = rows.shape[0]
    with device_guard(table):
        scan = kv_indptr is None
        scratch = kv_indptr
        if scan:
            num_blocks = triton.cdiv(bs, SCAN_BLOCK)
            buffer = torch.empty(2 * bs + 1 + num_blocks, dtype=torch.int32, device=table.device)
            kv_indptr, scratch = buffer[: bs + 1], buffer[bs + 1 :]
            scan_blocks[(num_blocks,)](
                lens, lens.stride(0), scratch, bs, page_size, PAGED=page_size > 1, BLOCK=SCAN_BLOCK
            )
        if kv_indices is None:
            if total is None:  # the one documented synchronisation
                total = int(scratch[bs:].sum() if scan else kv_indptr[-1])
            kv_indices = table.new_empty(total)
        launch_copy(
            table, rows, lens, kv_indptr, scratch, kv_start_idx, kv_indices, page_size=page_size, scan=scan
        )
    return kv_indptr, kv_indices


def launch_copy(
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    scratch: torch.Tensor,
    kv_start_idx: torch.Tensor | None,
    kv_indices: torch.Tensor | None,
    *,
    page_size: int,
    scan: bool,
) -> None:
    """Launch `copy_rows`; with kv_indices None it only turns `scratch` into kv_indptr."""
    bs = rows.shape[0]
    num_rows = min(MAX_ROWS, triton.next_power_of_2(triton.cdiv(bs, 64)))
    groups = triton.cdiv(bs, num_rows)
    cols = COLS * MAX_ROWS // num_rows
    widest = triton.cdiv(table.shape[1], page_size * cols)
    splits = max(1, min(widest, TARGET_PROGRAMS // groups, 65535)) if kv_indices is not None else 1
    copy_rows[(groups, splits)](
        table,
        table.stride(0),
        rows,
        rows.stride(0),
        lens,
        lens.stride(0),
        kv_start_idx,
        0 if kv_start_idx is None else kv_start_idx.stride(0),
        kv_indptr,
        scratch,
        kv_indices,
        bs,
        0 if kv_indices is None else kv_indices.shape[0],
        page_size,
        HAS_START=kv_start_idx is not None,
        PAGED=page_size > 1,
        SCAN=scan,
        COPY=kv_indices is not None,
        SCAN_BLOCK=SCAN_BLOCK,
        ROWS=num_rows,
        COLS=cols,
        num_warps=NUM_WARPS,
    )


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device's current stream."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else nullcontext()
