"""The Triton backend of `decode_attention`.

Grid: (KV heads, rows, splits). The KV heads of a row run next to each other, so that the whole lines of its
tokens are read at about the same time. Strides, batch and table width are run-time values.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from phalanx.kernels.decode_attention import SPLIT_TOKENS, DecodeConfig
from phalanx.kernels.kv_indices_triton import device_guard

UNSEEN = tl.constexpr(-1.0e30)  # running maximum before the first score; finite, so that no inf - inf arises


@triton.jit
def token_slots(source, col, live, PAGE: tl.constexpr):
    """Pool slots of a row's columns; with pages of PAGE tokens only entries at multiples of it are read."""
    if PAGE == 1:
        slot = tl.load(source + col, mask=live, other=0).to(tl.int64)
    else:
        entry = col // PAGE * PAGE
        slot = tl.load(source + entry, mask=live, other=0).to(tl.int64) + (col - entry)
    return slot


@triton.jit
def tile_slots(source, first, end, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """Pool slots of columns first .. first+TOKENS-1; of a tile that lies within one page only the first.

    first: a multiple of TOKENS.
    """
    if PAGE % TOKENS == 0:
        entry = first // PAGE * PAGE
        slot = tl.load(source + entry, mask=first < end, other=0).to(tl.int64) + (first - entry)
    else:
        col = first + tl.arange(0, TOKENS)
        slot = token_slots(source, col, col < end, PAGE)
    return slot


@triton.jit
def attend_range(
    query,
    k_pool,
    v_pool,
    source,
    begin,
    end,
    head,
    scale,
    GROUP_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Queries [GROUP_BLOCK, DIM_BLOCK] against one row's columns begin .. end-1 of one KV head.

    Returns the highest score, the sum of weights and the sum of weighted values of each query. scale includes
    log2(e). UPCAST: dots on fp32 copies, for the interpreter, which has no bf16 product.
    """
    token, dim = tl.arange(0, TOKENS), tl.arange(0, DIM_BLOCK)[None, :]
    if UPCAST:
        query = query.to(tl.float32)
    peak = tl.full([GROUP_BLOCK], UNSEEN, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    if AHEAD:
        next_slot = tile_slots(source, begin, end, PAGE, TOKENS)
    for first in tl.range(begin, end, TOKENS, num_stages=STAGES):
        live = first + token < end
        if AHEAD:
            if PAGE % TOKENS == 0:
                slot = next_slot + token
            else:
                slot = next_slot
            next_slot = tile_slots(source, first + TOKENS, end, PAGE, TOKENS)
        else:
            slot = token_slots(source, first + token, live, PAGE)
        offset = slot[:, None] * (KV_HEADS * DIM) + head * DIM + dim
        mask = live[:, None] & (dim < DIM) if DIM_BLOCK > DIM else live[:, None]
        k = tl.load(k_pool + offset, mask=mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(live[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        peak = new_peak
        v = tl.load(v_pool + offset, mask=mask, other=0.0)
        if UPCAST:
            v = v.to(tl.float32)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return peak, total, acc


@triton.jit
def piece_size(length, splits, TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr):
    """Tokens of one piece of a split row, a multiple of TOKENS."""
    piece = tl.maximum((length + splits - 1) // splits, SPLIT_TOKENS)
    return (piece + TOKENS - 1) // TOKENS * TOKENS


@triton.jit(do_not_specialize=["table_stride"])
def attend_rows(
    q,
    q_row_stride,
    q_head_stride,
    k_pool,
    v_pool,
    table,
    table_stride,
    rows,
    seq_lens,
    order,
    out,
    out_row_stride,
    out_head_stride,
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
    ORDERED: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One KV head of one row, or of one piece of it. scale, UPCAST: as in `attend_range`."""
    lane = tl.program_id(1).to(tl.int64)
    if ORDERED:
        lane = tl.load(order + lane).to(tl.int64)
    length = tl.load(seq_lens + lane).to(tl.int32)
    source = table + tl.load(rows + lane).to(tl.int64) * table_stride
    begin, end = 0, length
    if SPLIT:
        piece = piece_size(length, tl.num_programs(2), TOKENS, SPLIT_TOKENS)
        begin = tl.program_id(2) * piece
        if (begin >= length) & (begin > 0):
            return
        end = tl.minimum(begin + piece, length)
    head = tl.program_id(0)
    group, dim = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    q_head = head * GROUP + group
    q_mask = (group < GROUP) & (dim < DIM)
    query = tl.load(q + lane * q_row_stride + q_head * q_head_stride + dim, mask=q_mask, other=0.0)
    peak, total, acc = attend_range(
        query, k_pool, v_pool, source, begin, end, head, scale,
        GROUP_BLOCK, KV_HEADS, DIM, DIM_BLOCK, PAGE, TOKENS, AHEAD, STAGES, UPCAST,
    )  # fmt: skip
    if SPLIT:
        if piece < length:  # a row of several pieces: `merge_pieces` joins them
            slot64 = (lane * (KV_HEADS * GROUP) + q_head) * tl.num_programs(2) + tl.program_id(2)
            base = partial + slot64 * (DIM + 2)
            tl.store(base + dim, acc, mask=q_mask)
            tl.store(base + DIM, peak[:, None], mask=group < GROUP)
            tl.store(base + (DIM + 1), total[:, None], mask=group < GROUP)
            return
    total = tl.where(total > 0, total, 1.0)
    target = out + lane * out_row_stride + q_head * out_head_stride + dim
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["splits"])
def merge_pieces(
    partial,
    seq_lens,
    out,
    out_row_stride,
    out_head_stride,
    splits,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
):
    """Join the pieces of one query head of one row; rows of a single piece are done already."""
    head, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(seq_lens + lane).to(tl.int32)
    piece = piece_size(length, splits, TOKENS, SPLIT_TOKENS)
    if piece >= length:
        return
    dim = tl.arange(0, DIM_BLOCK)
    number = tl.arange(0, SPLITS_BLOCK)
    used = number * piece < length
    base = partial + ((lane * Q_HEADS + head) * splits + number) * (DIM + 2)
    peak = tl.load(base + DIM, mask=used & (number < splits), other=UNSEEN)
    total = tl.load(base + (DIM + 1), mask=used & (number < splits), other=0.0)
    share = tl.exp2(peak - tl.max(peak, 0))
    mask = (used & (number < splits))[:, None] & (dim < DIM)[None, :]
    acc = tl.load(base[:, None] + dim[None, :], mask=mask, other=0.0)
    result = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    target = out + lane * out_row_stride + head * out_head_stride + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=dim < DIM)


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    order: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    *,
    page_size: int,
    scale: float,
    num_splits: int,
    config: DecodeConfig,
) -> None:
    """`phalanx.kernels.decode_attention` on checked arguments with at least one row."""
    bs, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    group = num_q_heads // num_kv_heads
    dim_block = triton.next_power_of_2(head_dim)
    with device_guard(q):
        attend_rows[(num_kv_heads, bs, num_splits)](
            q,
            q.stride(0),
            q.stride(1),
            k_pool,
            v_pool,
            req_to_token,
            req_to_token.stride(0),
            rows,
            seq_lens,
            order,
            out,
            out.stride(0),
            out.stride(1),
            workspace,
            scale * math.log2(math.e),
            GROUP=group,
            GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
            KV_HEADS=num_kv_heads,
            DIM=head_dim,
            DIM_BLOCK=max(16, dim_block),
            PAGE=page_size,
            TOKENS=config.tokens,
            AHEAD=config.ahead,
            ORDERED=order is not None,
            SPLIT=num_splits > 1,
            SPLIT_TOKENS=SPLIT_TOKENS,
            STAGES=config.num_stages,
            UPCAST=interpreted(attend_rows),
            num_warps=config.num_warps,
        )
        if num_splits > 1:
            merge_pieces[(num_q_heads, bs)](
                workspace,
                seq_lens,
                out,
                out.stride(0),
                out.stride(1),
                num_splits,
                Q_HEADS=num_q_heads,
                DIM=head_dim,
                DIM_BLOCK=dim_block,
                TOKENS=config.tokens,
                SPLIT_TOKENS=SPLIT_TOKENS,
                SPLITS_BLOCK=triton.next_power_of_2(num_splits),
                num_warps=4,
            )


def interpreted(kernel: object) -> bool:
    """Whether Triton's interpreter runs this kernel; its `dot` has no bf16 and takes fp32 copies instead."""
    return not isinstance(kernel, triton.JITFunction)
