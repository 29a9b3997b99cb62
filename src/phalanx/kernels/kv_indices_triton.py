"""The Triton backend of `create_kv_indices`; `step_prep` runs `copy_rows` as its second launch.

Rows are copied by a 2-D grid: requests along the first axis, and along the second as many programs a request
as it takes to fill the device, each taking every n-th block of columns. So few long rows and many short ones
both occupy the whole device, and no length is needed on the host. Strides, sizes and the page size are
run-time values: nothing is compiled anew for another batch or table.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

SCAN_BLOCK = 128  # requests whose counts one program scans
# On an H200, up to three blocks of 512 columns a turn and 4 warps were the best of 120 variants over full,
# uniform and short rows together. Tiles of several requests gain 1 us on short rows and lose 2-4 us on uneven
# ones; a persistent grid, an aligned store frame, cache hints and software pipelining gain nothing.
COLS = 512
BLOCKS_PER_TURN = tl.constexpr(3)
NUM_WARPS = 4
TARGET_PROGRAMS = 4096


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


@triton.jit
def load_entries(source, col, mask, page_size, PAGED: tl.constexpr):
    """Entries `col` of a row: slots, or with PAGED the page of every page_size-th slot."""
    if PAGED:
        entry = tl.load(source + col.to(tl.int64) * page_size, mask=mask) // page_size
    else:
        entry = tl.load(source + col, mask=mask)
    return entry


# table_stride alone is specialised, on being a multiple of 16: then rows are loaded 16 bytes at a time.
@triton.jit(do_not_specialize=["rows_stride", "lens_stride", "starts_stride", "bs", "out_size", "page_size"])
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
    COLS: tl.constexpr,
):
    """Copy one ragged row of the table to its place in out. Grid: (bs, splits).

    SCAN: the offset comes from `scan_blocks`' scratch and is written to indptr; else it is read from indptr.
    """
    lane = tl.program_id(0)
    lane64 = lane.to(tl.int64)
    count = tl.load(lens + lane64 * lens_stride).to(tl.int32)
    if PAGED:
        count = (count + page_size - 1) // page_size
    if SCAN:
        offset = tl.load(scratch + lane)
        block = lane // SCAN_BLOCK
        for chunk in range(0, block, SCAN_BLOCK):
            before = chunk + tl.arange(0, SCAN_BLOCK)
            offset += tl.sum(tl.load(scratch + bs + before, mask=before < block, other=0), 0)
        if tl.program_id(1) == 0:
            tl.store(indptr + lane + 1, offset + count)
            if lane == 0:
                tl.store(indptr, 0)
    else:
        offset = tl.load(indptr + lane)
    if COPY:
        source = table + tl.load(rows + lane64 * rows_stride).to(tl.int64) * table_stride
        if HAS_START:
            source += tl.load(starts + lane64 * starts_stride).to(tl.int64)
        target = out + offset.to(tl.int64)
        # What does not fit in the output is dropped, whatever indptr says.
        count = tl.minimum(count.to(tl.int64), out_size - offset.to(tl.int64)).to(tl.int32)
        turn = tl.num_programs(1) * COLS * BLOCKS_PER_TURN
        for first in range(tl.program_id(1) * COLS * BLOCKS_PER_TURN, count, turn):
            # All loads of a turn come before its first store; all blocks but the last are whole.
            col = first + tl.arange(0, COLS)
            if first + 2 * COLS < count:
                mask = col + 2 * COLS < count
                entry = load_entries(source, col, None, page_size, PAGED)
                second = load_entries(source, col + COLS, None, page_size, PAGED)
                third = load_entries(source, col + 2 * COLS, mask, page_size, PAGED)
                tl.store(target + col, entry)
                tl.store(target + col + COLS, second)
                tl.store(target + col + 2 * COLS, third, mask=mask)
            elif first + COLS < count:
                mask = col + COLS < count
                entry = load_entries(source, col, None, page_size, PAGED)
                second = load_entries(source, col + COLS, mask, page_size, PAGED)
                tl.store(target + col, entry)
                tl.store(target + col + COLS, second, mask=mask)
            else:
                mask = col < count
                tl.store(target + col, load_entries(source, col, mask, page_size, PAGED), mask=mask)


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
            scratch_start = (bs + 1 + 3) // 4 * 4  # 16-byte aligned for any bs: Triton compiles for alignment
            buffer = torch.empty(scratch_start + bs + num_blocks, dtype=torch.int32, device=table.device)
            kv_indptr, scratch = buffer[: bs + 1], buffer[scratch_start:]
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
    turns = triton.cdiv(table.shape[1], page_size * COLS * BLOCKS_PER_TURN.value)
    splits = max(1, min(turns, TARGET_PROGRAMS // bs)) if kv_indices is not None else 1
    copy_rows[(bs, splits)](
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
        COLS=COLS,
        num_warps=NUM_WARPS,
    )


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current: Triton launches on the current device's current stream."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else nullcontext()
