"""The Triton backend of `find_long_rows`, and decode attention to the pieces of long rows."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from phalanx.kernels.decode_attention import piece_config
from phalanx.kernels.decode_attention_long import MAX_LONG, LongRows
from phalanx.kernels.decode_attention_triton import UNSEEN, attend_range, interpreted
from phalanx.kernels.kv_indices_triton import device_guard

_NEVER = tl.constexpr(1 << 30)  # a piece number that does not come
_PROGRAMS = 1024  # of the launch over pieces: a GPU's worth, each takes every so-many-th piece
_MERGE_ROWS = 16  # programs a query head; each takes every so-many-th row
_MERGE_PIECES = 16  # joined at a time


@triton.jit
def find_rows(
    seq_lens,
    short_lens,
    counts,
    lanes,
    first_piece,
    bs,
    long_tokens,
    times_mean,
    max_pieces,
    PIECE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program over the whole batch."""
    lane = tl.arange(0, BLOCK)
    length = tl.load(seq_lens + lane, mask=lane < bs, other=0)
    total = tl.sum(length.to(tl.int64), 0)
    is_long = (length > long_tokens) & (length.to(tl.int64) * bs > total * times_mean)
    pieces = tl.where(is_long, (length + PIECE - 1) // PIECE, 0).to(tl.int32)
    end = tl.cumsum(pieces, 0)
    rank = tl.cumsum(is_long.to(tl.int32), 0) - 1
    # Both only grow, so that the rows that are cut are the first ones and their pieces leave no gap.
    cut = is_long & (end <= max_pieces) & (rank < MAX_ROWS)
    tl.store(lanes + rank, lane, mask=cut)
    tl.store(first_piece + rank, end - pieces, mask=cut)
    tl.store(short_lens + lane, tl.where(cut, 0, length), mask=lane < bs)
    tl.store(counts, tl.max(tl.where(cut, end, 0), 0))
    tl.store(counts + 1, tl.sum(cut.to(tl.int32), 0))


@triton.jit(do_not_specialize=["table_stride"])
def attend_pieces(
    q,
    q_row_stride,
    q_head_stride,
    k_pool,
    v_pool,
    table,
    table_stride,
    rows,
    seq_lens,
    counts,
    lanes,
    first_piece,
    partial,
    scale,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
    PIECE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Every so-many-th piece, for one KV head: its sum of values, highest score and sum of weights.

    scale, UPCAST: as in `attend_range`.
    """
    head = tl.program_id(0)
    num_pieces = tl.load(counts)
    num_rows = tl.load(counts + 1)
    group, dim = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    q_head = head * GROUP + group
    q_mask = (group < GROUP) & (dim < DIM)
    rank = tl.arange(0, MAX_ROWS)
    for piece in range(tl.program_id(1), num_pieces, tl.num_programs(1)):
        begins = tl.load(first_piece + rank, mask=rank < num_rows, other=_NEVER)
        owner = tl.sum((begins <= piece).to(tl.int32), 0) - 1
        lane = tl.load(lanes + owner).to(tl.int64)
        begin = (piece - tl.load(first_piece + owner)) * PIECE
        end = tl.minimum(begin + PIECE, tl.load(seq_lens + lane).to(tl.int32))
        source = table + tl.load(rows + lane).to(tl.int64) * table_stride
        query = tl.load(q + lane * q_row_stride + q_head * q_head_stride + dim, mask=q_mask, other=0.0)
        peak, total, acc = attend_range(
            query, k_pool, v_pool, source, begin, end, head, scale,
            GROUP_BLOCK, KV_HEADS, DIM, DIM_BLOCK, PAGE, TOKENS, AHEAD, STAGES, UPCAST,
        )  # fmt: skip
        base = partial + (piece * (KV_HEADS * GROUP) + q_head) * (DIM + 2)
        tl.store(base + dim, acc, mask=q_mask)
        tl.store(base + DIM, peak[:, None], mask=group < GROUP)
        tl.store(base + (DIM + 1), total[:, None], mask=group < GROUP)


@triton.jit
def merge_rows(
    partial,
    seq_lens,
    counts,
    lanes,
    first_piece,
    out,
    out_row_stride,
    out_head_stride,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join the pieces of every so-many-th row that is cut, for one query head."""
    head = tl.program_id(0)
    num_rows = tl.load(counts + 1)
    dim = tl.arange(0, DIM_BLOCK)
    number = tl.arange(0, BLOCK)
    for rank in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        lane = tl.load(lanes + rank).to(tl.int64)
        first = tl.load(first_piece + rank).to(tl.int64)
        count = (tl.load(seq_lens + lane).to(tl.int32) + PIECE - 1) // PIECE
        peak = UNSEEN + 0.0
        total = 0.0
        acc = tl.zeros([DIM_BLOCK], tl.float32)
        for start in range(0, count, BLOCK):
            used = start + number < count
            base = partial + ((first + start + number) * Q_HEADS + head) * (DIM + 2)
            peaks = tl.load(base + DIM, mask=used, other=UNSEEN)
            new_peak = tl.maximum(peak, tl.max(peaks, 0))
            share = tl.where(used, tl.exp2(peaks - new_peak), 0.0)
            shrink = tl.exp2(peak - new_peak)
            mask = used[:, None] & (dim < DIM)[None, :]
            values = tl.load(base[:, None] + dim[None, :], mask=mask, other=0.0)
            weights = tl.load(base + (DIM + 1), mask=used, other=0.0)
            acc = acc * shrink + tl.sum(values * share[:, None], 0)
            total = total * shrink + tl.sum(weights * share, 0)
            peak = new_peak
        target = out + lane * out_row_stride + head * out_head_stride + dim
        tl.store(target, (acc / total).to(out.dtype.element_ty), mask=dim < DIM)


def find(seq_lens: torch.Tensor, found: LongRows, long_tokens: int, times_mean: int) -> None:
    """Fill `found` from lengths of at least one row."""
    with device_guard(seq_lens):
        find_rows[(1,)](
            seq_lens,
            found.short_lens,
            found.counts,
            found.lanes,
            found.first_piece,
            len(seq_lens),
            long_tokens,
            times_mean,
            found.max_pieces,
            PIECE=found.piece_tokens,
            MAX_ROWS=MAX_LONG,
            BLOCK=max(16, triton.next_power_of_2(len(seq_lens))),
            num_warps=8,
        )


def attend_long(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    long_rows: LongRows,
    *,
    page_size: int,
    scale: float,
) -> None:
    """Write `out` for the rows that are cut and no other; arguments as `decode_attention_triton.attend`."""
    _, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    dim_block = max(16, triton.next_power_of_2(head_dim))
    size = long_rows.workspace_size(num_q_heads, head_dim)
    partial = torch.empty(size, dtype=torch.float32, device=q.device)
    where = (long_rows.counts, long_rows.lanes, long_rows.first_piece)
    programs = min(long_rows.max_pieces, max(1, _PROGRAMS // num_kv_heads))
    config = piece_config(head_dim)
    with device_guard(q):
        attend_pieces[(num_kv_heads, programs)](
            q,
            q.stride(0),
            q.stride(1),
            k_pool,
            v_pool,
            req_to_token,
            req_to_token.stride(0),
            rows,
            seq_lens,
            *where,
            partial,
            scale * math.log2(math.e),
            GROUP=num_q_heads // num_kv_heads,
            GROUP_BLOCK=max(16, triton.next_power_of_2(num_q_heads // num_kv_heads)),
            KV_HEADS=num_kv_heads,
            DIM=head_dim,
            DIM_BLOCK=dim_block,
            PAGE=page_size,
            TOKENS=config.tokens,
            AHEAD=config.ahead,
            PIECE=long_rows.piece_tokens,
            MAX_ROWS=MAX_LONG,
            STAGES=config.num_stages,
            UPCAST=interpreted(attend_pieces),
            num_warps=config.num_warps,
        )
        merge_rows[(num_q_heads, _MERGE_ROWS)](
            partial,
            seq_lens,
            *where,
            out,
            out.stride(0),
            out.stride(1),
            Q_HEADS=num_q_heads,
            DIM=head_dim,
            DIM_BLOCK=dim_block,
            PIECE=long_rows.piece_tokens,
            BLOCK=_MERGE_PIECES,
            num_warps=4,
        )
