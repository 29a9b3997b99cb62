"""The Triton backend of `step_prep`: lanes are prepared and scanned in blocks, then `copy_rows` runs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phalanx.kernels.kv_indices_triton import SCAN_BLOCK, device_guard, launch_copy
from phalanx.kernels.step_prep import LANES_PER_BLOCK, StepPrepBuffers

assert SCAN_BLOCK == LANES_PER_BLOCK  # both kernels share one scratch layout


@triton.jit(do_not_specialize=["table_stride", "max_context", "ring", "bucket", "page_size"])
def prepare_lanes(
    rows,
    num_live,
    seq_lens,
    table,
    table_stride,
    max_context,
    granted,
    ring,
    out_rows,
    positions,
    slot_mapping,
    out_seq_lens,
    last_page_len,
    scratch,
    bucket,
    page_size,
    BLOCK: tl.constexpr,
):
    """Everything of `step_prep` that is one value a lane, and the scan within each block of lanes."""
    block = tl.program_id(0)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    inside = lane < bucket
    row = tl.load(rows + lane, mask=inside, other=0)
    live = (lane < tl.load(num_live)) & (row > 0) & inside
    row64 = tl.where(live, row, 0).to(tl.int64)
    length = tl.load(seq_lens + row64, mask=live, other=0)
    grows = live & (length < max_context)
    position = tl.minimum(length, max_context - 1)
    page = position // page_size
    offset = position - page * page_size
    page_id = tl.load(granted + row64 * ring + page % ring, mask=grows, other=0).to(tl.int64)
    slot = tl.where(grows, page_id * page_size + offset, 0)
    # Lanes that do not grow write slot 0 into the padding row's first entry.
    entry = tl.where(grows, row64 * table_stride + position, 0)
    tl.store(table + entry, slot.to(tl.int32), mask=inside)
    tl.store(seq_lens + row64, length + 1, mask=grows)
    tl.store(out_rows + lane, row64, mask=inside)
    tl.store(positions + lane, position.to(tl.int64), mask=inside)
    tl.store(slot_mapping + lane, slot, mask=inside)
    tl.store(out_seq_lens + lane, position + 1, mask=inside)
    tl.store(last_page_len + lane, offset + 1, mask=inside)
    count = tl.where(inside, page + 1, 0)
    inclusive = tl.cumsum(count, 0)
    tl.store(scratch + lane, inclusive - count, mask=inside)
    tl.store(scratch + bucket + block, tl.sum(count, 0))


def step_prep(
    rows: torch.Tensor,
    num_live: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    granted_pages: torch.Tensor,
    out: StepPrepBuffers,
    *,
    page_size: int,
) -> None:
    """`phalanx.kernels.step_prep` on checked arguments, in two launches."""
    with device_guard(rows):
        prepare_lanes[(triton.cdiv(out.bucket, LANES_PER_BLOCK),)](
            rows,
            num_live,
            seq_lens,
            req_to_token,
            req_to_token.stride(0),
            req_to_token.shape[1],
            granted_pages,
            granted_pages.shape[1],
            out.rows,
            out.positions,
            out.slot_mapping,
            out.seq_lens,
            out.last_page_len,
            out.scratch,
            out.bucket,
            page_size,
            BLOCK=LANES_PER_BLOCK,
        )
        launch_copy(
            req_to_token,
            out.rows,
            out.seq_lens,
            out.kv_indptr,
            out.scratch,
            None,
            out.kv_indices,
            page_size=page_size,
            scan=True,
        )
