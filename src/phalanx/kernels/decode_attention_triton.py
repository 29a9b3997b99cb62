"""The Triton backend of `decode_attention`.

Grid: (groups of KV heads, rows, splits). The KV heads of a row run next to each other, so that the whole
lines of its tokens are read at about the same time. Strides, batch and table width are run-time values.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from phalanx.kernels.decode_attention import SPLIT_TOKENS, DecodeConfig
from phalanx.kernels.kv_indices_triton import device_guard

_UNSEEN = tl.constexpr(-1.0e30)  # running maximum before the first score; finite, so that no inf - inf arises


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
def piece_size(length, splits, TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr):
    """Tokens of one piece of a split row, a multiple of TOKENS."""
    piece = tl.maximum((length + splits - 1) // splits, SPLIT_TOKENS)
    return (piece + TOKENS - 1) // TOKENS * TOKENS


@triton.jit(do_not_specialize=["table_stride"])
def attend_dot(
    q,
    q_row_stride,
    q_head_stride,
    k_pool,
    v_pool,
    table,
    table_stride,
    rows,
    seq_lens,
    out,
    out_row_stride,
    out_head_stride,
    partial,
    scale,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """HEADS KV heads of one row (or of one piece of it) on the matrix units.

    scale includes log2(e). UPCAST: dots on fp32 copies, for the interpreter, which has no bf16 product.
    """
    lane = tl.program_id(1).to(tl.int64)
    length = tl.load(seq_lens + lane).to(tl.int32)
    source = table + tl.load(rows + lane).to(tl.int64) * table_stride
    begin, end = 0, length
    if SPLIT:
        piece = piece_size(length, tl.num_programs(2), TOKENS, SPLIT_TOKENS)
        begin = tl.program_id(2) * piece
        if (begin >= length) & (begin > 0):
            return
        end = tl.minimum(begin + piece, length)
    first_head = tl.program_id(0) * HEADS
    token = tl.arange(0, TOKENS)
    # Shapes: queries [GROUP_BLOCK, DIM], K and V [TOKENS, DIM]; a head axis in front where HEADS > 1.
    if HEADS == 1:
        group, dim = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
        head = first_head
        line = token[:, None]
        peak = tl.full([GROUP_BLOCK], _UNSEEN, tl.float32)
        total = tl.zeros([GROUP_BLOCK], tl.float32)
        acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    else:
        group, dim = tl.arange(0, GROUP_BLOCK)[None, :, None], tl.arange(0, DIM_BLOCK)[None, None, :]
        head = first_head + tl.arange(0, HEADS)[:, None, None]
        line = token[None, :, None]
        peak = tl.full([HEADS, GROUP_BLOCK], _UNSEEN, tl.float32)
        total = tl.zeros([HEADS, GROUP_BLOCK], tl.float32)
        acc = tl.zeros([HEADS, GROUP_BLOCK, DIM_BLOCK], tl.float32)
    AXIS: tl.constexpr = 1 if HEADS == 1 else 2
    q_head = head * GROUP + group
    q_mask = (group < GROUP) & (dim < DIM)
    query = tl.load(q + lane * q_row_stride + q_head * q_head_stride + dim, mask=q_mask, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    for first in tl.range(begin, end, TOKENS, num_stages=STAGES):
        live = first + token < end
        slot = token_slots(source, first + token, live, PAGE)
        if HEADS == 1:
            offset = slot[:, None] * (KV_HEADS * DIM) + head * DIM + dim
        else:
            offset = slot[None, :, None] * (KV_HEADS * DIM) + head * DIM + dim
        mask = (first + line < end) & (dim < DIM) if DIM_BLOCK > DIM else first + line < end
        k = tl.load(k_pool + offset, mask=mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        if HEADS == 1:
            score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        else:
            score = tl.dot(query, tl.trans(k, 0, 2, 1), input_precision="ieee") * scale
        score = tl.where(live[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, AXIS))
        p = tl.exp2(score - tl.expand_dims(new_peak, AXIS))
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, AXIS)
        peak = new_peak
        v = tl.load(v_pool + offset, mask=mask, other=0.0)
        if UPCAST:
            v = v.to(tl.float32)
        acc = tl.dot(p.to(v.dtype), v, acc * tl.expand_dims(shrink, AXIS), input_precision="ieee")
    if SPLIT:
        if piece < length:  # a row of several pieces: `merge_pieces` joins them
            slot64 = (lane * (KV_HEADS * GROUP) + q_head) * tl.num_programs(2) + tl.program_id(2)
            base = partial + slot64 * (DIM + 2)
            tl.store(base + dim, acc, mask=q_mask)
            tl.store(base + DIM, tl.expand_dims(peak, AXIS), mask=group < GROUP)
            tl.store(base + (DIM + 1), tl.expand_dims(total, AXIS), mask=group < GROUP)
            return
    total = tl.where(total > 0, total, 1.0)
    result = acc / tl.expand_dims(total, AXIS)
    target = out + lane * out_row_stride + q_head * out_head_stride + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["table_stride"])
def attend_lanes(
    q,
    q_row_stride,
    q_head_stride,
    k_pool,
    v_pool,
    table,
    table_stride,
    rows,
    seq_lens,
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
    SPLIT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One KV head of one row (or piece) by multiply and sum.

    Each of the TOKENS lanes keeps a softmax of its own over the tokens it meets; the lanes are merged once at
    the end, so that the loop needs no exchange between warps and no shared memory.
    """
    lane = tl.program_id(1).to(tl.int64)
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
    token = tl.arange(0, TOKENS)
    group, dim = tl.arange(0, GROUP_BLOCK)[:, None, None], tl.arange(0, DIM_BLOCK)[None, None, :]
    q_mask = (group < GROUP) & (dim < DIM)
    q_offset = lane * q_row_stride + (head * GROUP + group) * q_head_stride + dim
    query = tl.load(q + q_offset, mask=q_mask, other=0.0).to(tl.float32) * scale
    peak = tl.full([GROUP_BLOCK, TOKENS], _UNSEEN, tl.float32)
    total = tl.zeros([GROUP_BLOCK, TOKENS], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, TOKENS, DIM_BLOCK], tl.float32)
    next_slot = token_slots(source, begin + token, begin + token < end, PAGE)
    for first in tl.range(begin, end, TOKENS, num_stages=STAGES):
        live = first + token < end
        offset = next_slot[None, :, None] * (KV_HEADS * DIM) + head * DIM + dim
        # One tile ahead, so that K and V never wait for the table.
        ahead = first + TOKENS + token
        next_slot = token_slots(source, ahead, ahead < end, PAGE)
        mask = live[None, :, None]
        if DIM_BLOCK > DIM:
            mask = mask & (dim < DIM)
        k = tl.load(k_pool + offset, mask=mask, other=0.0)
        v = tl.load(v_pool + offset, mask=mask, other=0.0)
        score = tl.sum(query * k.to(tl.float32), 2)
        score = tl.where(live[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, score)
        p = tl.exp2(score - new_peak)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + p
        acc = acc * shrink[:, :, None] + p[:, :, None] * v.to(tl.float32)
        peak = new_peak
    top = tl.max(peak, 1)
    share = tl.exp2(peak - top[:, None])
    # A lane that saw no token weighs 0 also where no lane did: its total and acc are 0.
    row_total = tl.sum(total * share, 1)
    row_acc = tl.sum(acc * share[:, :, None], 1)
    group, dim = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    q_head = head * GROUP + group
    q_mask = (group < GROUP) & (dim < DIM)
    if SPLIT:
        if piece < length:
            slot64 = (lane * (KV_HEADS * GROUP) + q_head) * tl.num_programs(2) + tl.program_id(2)
            base = partial + slot64 * (DIM + 2)
            tl.store(base + dim, row_acc, mask=q_mask)
            tl.store(base + DIM, top[:, None], mask=group < GROUP)
            tl.store(base + (DIM + 1), row_total[:, None], mask=group < GROUP)
            return
    row_total = tl.where(row_total > 0, row_total, 1.0)
    result = row_acc / row_total[:, None]
    target = out + lane * out_row_stride + q_head * out_head_stride + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)


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
    peak = tl.load(base + DIM, mask=used & (number < splits), other=_UNSEEN)
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
    shape = {
        "GROUP": group,
        "GROUP_BLOCK": max(16 if config.dot else 1, triton.next_power_of_2(group)),
        "KV_HEADS": num_kv_heads,
        "DIM": head_dim,
        "DIM_BLOCK": max(16, dim_block) if config.dot else dim_block,
        "PAGE": page_size,
        "TOKENS": config.tokens,
        "SPLIT": num_splits > 1,
        "SPLIT_TOKENS": SPLIT_TOKENS,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    if config.dot:
        shape |= {"HEADS": config.heads, "UPCAST": interpreted(attend_dot)}
    kernel = attend_dot if config.dot else attend_lanes
    with device_guard(q):
        kernel[(num_kv_heads // config.heads, bs, num_splits)](
            q,
            q.stride(0),
            q.stride(1),
            k_pool,
            v_pool,
            req_to_token,
            req_to_token.stride(0),
            rows,
            seq_lens,
            out,
            out.stride(0),
            out.stride(1),
            workspace,
            scale * math.log2(math.e),
            **shape,
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
