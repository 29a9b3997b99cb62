"""The Triton backend of `prefill_attention`: flash attention, a KV head's query heads in one tile."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from phalanx.kernels.decode_attention_triton import interpreted, token_slots
from phalanx.kernels.kv_indices_triton import device_guard

QUERIES = 64  # rows of the query tile, at most: (token, query head of the group) pairs
TOKENS = 64  # K and V rows at a time, at most
NUM_WARPS = 4
NUM_STAGES = 3  # against 2, on an H200: 1.2 to 1.4 times as fast from 512 tokens on, 2 us slower at 16
_MOST_WARPS = {16: 2, 32: 4, 64: 4}  # of the tile of short prompts


@triton.jit(do_not_specialize=["table_stride", "num_chunks"])
def attend_chunks(
    q,
    q_token_stride,
    q_head_stride,
    k_pool,
    v_pool,
    table,
    table_stride,
    indptr,
    rows,
    starts,
    tile_chunks,
    tile_firsts,
    out,
    out_token_stride,
    out_head_stride,
    scale,
    num_chunks,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """QUERIES (token, head) pairs of one chunk and one KV head. Grid: (query tiles x KV heads).

    Pair r of the chunk is token r // GROUP and query head r % GROUP, so K and V are read once for the group.
    scale includes log2(e). UPCAST: dots on fp32 copies, for the interpreter.
    """
    tile = tl.program_id(0) // KV_HEADS
    chunk = tl.load(tile_chunks + tile)
    if chunk >= num_chunks:
        return
    first_token = tl.load(indptr + chunk)
    num_pairs = (tl.load(indptr + chunk + 1) - first_token) * GROUP
    first_pair = tl.load(tile_firsts + tile).to(tl.int32) * QUERIES
    start = tl.load(starts + chunk).to(tl.int32)
    source = table + tl.load(rows + chunk).to(tl.int64) * table_stride
    kv_head = tl.program_id(0) % KV_HEADS
    pair = first_pair + tl.arange(0, QUERIES)
    dim, token = tl.arange(0, DIM_BLOCK), tl.arange(0, TOKENS)
    position = start + pair // GROUP
    q_token = (first_token + pair // GROUP).to(tl.int64)
    q_head = kv_head * GROUP + pair % GROUP
    q_mask = (pair < num_pairs)[:, None] & (dim < DIM)[None, :]
    q_offset = q_token[:, None] * q_token_stride + q_head[:, None] * q_head_stride + dim[None, :]
    query = tl.load(q + q_offset, mask=q_mask, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    # Every query sees position 0 in the first tile, so the running maximum is finite from then on.
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
    last_pair = tl.minimum(first_pair + QUERIES, num_pairs) - 1
    end = start + last_pair // GROUP + 1
    for first in tl.range(0, end, TOKENS, num_stages=STAGES):
        col = first + token
        live = col < end
        slot = token_slots(source, col, live, PAGE)
        offset = slot[:, None] * (KV_HEADS * DIM) + kv_head * DIM + dim[None, :]
        mask = live[:, None] & (dim < DIM)[None, :] if DIM_BLOCK > DIM else live[:, None]
        k = tl.load(k_pool + offset, mask=mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(col[None, :] <= position[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        peak = new_peak
        v = tl.load(v_pool + offset, mask=mask, other=0.0)
        if UPCAST:
            v = v.to(tl.float32)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    result = acc / total[:, None]
    target = out + q_token[:, None] * out_token_stride + q_head[:, None] * out_head_stride + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)


def query_tile(max_chunk_len: int, group: int) -> int:
    """Pairs that a program takes: fewer than QUERIES where all chunks are shorter than that."""
    return min(QUERIES, max(16, triton.next_power_of_2(max_chunk_len * group)))


def key_tile(head_dim: int, itemsize: int) -> int:
    """K and V rows at a time: fp32 tiles of 64 spill registers, wide ones are more than some cards hold."""
    return TOKENS if itemsize == 2 and head_dim <= 128 else TOKENS // 2


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    qo_indptr: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    *,
    tile_chunks: torch.Tensor,
    tile_firsts: torch.Tensor,
    queries: int,
    page_size: int,
    scale: float,
) -> None:
    """`phalanx.kernels.prefill_attention` on checked arguments with at least one chunk and one token."""
    _, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    with device_guard(q):
        attend_chunks[(len(tile_chunks) * num_kv_heads,)](
            q,
            q.stride(0),
            q.stride(1),
            k_pool,
            v_pool,
            req_to_token,
            req_to_token.stride(0),
            qo_indptr,
            rows,
            starts,
            tile_chunks,
            tile_firsts,
            out,
            out.stride(0),
            out.stride(1),
            scale * math.log2(math.e),
            rows.shape[0],
            GROUP=num_q_heads // num_kv_heads,
            KV_HEADS=num_kv_heads,
            DIM=head_dim,
            DIM_BLOCK=max(16, triton.next_power_of_2(head_dim)),
            PAGE=page_size,
            QUERIES=queries,
            TOKENS=key_tile(head_dim, q.itemsize),
            STAGES=NUM_STAGES,
            UPCAST=interpreted(attend_chunks),
            num_warps=min(NUM_WARPS, _MOST_WARPS.get(queries, 8)),
        )
