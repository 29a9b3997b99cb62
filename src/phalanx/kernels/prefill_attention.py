"""Causal attention of prompt chunks over their rows' whole context, read from the request-to-token table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.kernels.checks import check_tensor, pick_backend
from phalanx.kernels.decode_attention import check_attention

_INT = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How the chunks of a step are cut into query tiles, the same in all layers.

    chunks, firsts: [n] int64, contiguous: the chunk of each tile, and which of that chunk's tiles it is;
    those of chunk m are none. queries: (token, query head of a KV head's group) pairs of a tile.
    """

    chunks: torch.Tensor
    firsts: torch.Tensor
    queries: int


def prefill_tiles(qo_indptr: torch.Tensor, num_tokens: int, *, longest: int, group: int) -> PrefillTiles:
    """Cut chunks into tiles, in device work alone.

    The number of tiles depends on sizes, not on lengths, so the result can be used in a CUDA graph: there is
    one for each full tile of `num_tokens` and one more for each chunk.

    qo_indptr: [m+1] int32, m at least 1, as in `prefill_attention`. num_tokens: at least those of all chunks.
    longest: the longest chunk, in tokens, or more: where all are short, tiles are smaller. group: query heads
    of a KV head.
    """
    from phalanx.kernels.prefill_attention_triton import query_tile

    queries = query_tile(longest, group)
    counts = (qo_indptr.diff() * group + (queries - 1)) // queries
    ends = counts.cumsum(0)
    tile = torch.arange(num_tokens * group // queries + len(counts), device=qo_indptr.device)
    chunks = torch.searchsorted(ends, tile, right=True)
    firsts = tile - (ends - counts).index_select(0, chunks.clamp_max(len(counts) - 1))
    return PrefillTiles(chunks, firsts, queries)


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    qo_indptr: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    max_chunk_len: int,
    page_size: int = 1,
    sm_scale: float | None = None,
    out: torch.Tensor | None = None,
    tiles: PrefillTiles | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend each chunk's tokens to positions 0 .. their own of the chunk's row.

    Chunk i holds tokens qo_indptr[i] .. qo_indptr[i+1]-1 of q; its token j is at position starts[i] + j, and
    K and V of positions up to it are in the pool already.

    q: [num_tokens, num_q_heads, head_dim] fp32, bf16 or fp16; any strides with last stride 1.
    k_pool, v_pool, req_to_token, page_size, sm_scale: as in `decode_attention`.
    qo_indptr: [m+1] int32, contiguous, ascending. rows: [m] int32 or int64; starts: [m] int32 or int64; both
        contiguous. All three are read on the device. A chunk may be empty.
    max_chunk_len: at least the longest chunk, in tokens; it sizes the tiles where none are given.
    out: like q, any strides with last stride 1; allocated if None. Tokens in no chunk keep their bytes.
    tiles: `prefill_tiles` of qo_indptr and q's tokens, for calls that share them; found anew if None.
    backend: "torch", "triton" or "auto" (Triton on CUDA). The torch one reads indptr and starts on the host.

    Softmax and sums are fp32. The Triton backend can be captured in a CUDA graph; without chunks or tokens it
    launches nothing. Raises TypeError or ValueError naming the argument at fault.
    """
    check_attention(q, k_pool, v_pool, req_to_token, out, page_size)
    check_tensor("rows", rows, dtypes=_INT, shape=(None,), device=q.device, contiguous=True)
    m = rows.shape[0]
    check_tensor("starts", starts, dtypes=_INT, shape=(m,), device=q.device, contiguous=True)
    check_tensor(
        "qo_indptr", qo_indptr, dtypes=(torch.int32,), shape=(m + 1,), device=q.device, contiguous=True
    )
    if isinstance(max_chunk_len, bool) or not isinstance(max_chunk_len, int):
        raise TypeError(f"max_chunk_len must be an int, got {type(max_chunk_len).__name__}")
    if tiles is not None:
        for name, tensor in (("tiles.chunks", tiles.chunks), ("tiles.firsts", tiles.firsts)):
            shape = (len(tiles.chunks),)
            check_tensor(name, tensor, dtypes=(torch.int64,), shape=shape, device=q.device, contiguous=True)
        if tiles.queries < 16 or tiles.queries & (tiles.queries - 1):
            raise ValueError(f"tiles.queries must be a power of two of at least 16, got {tiles.queries}")
    if max_chunk_len < 0:
        raise ValueError(f"max_chunk_len must be at least 0, got {max_chunk_len}")
    chosen = pick_backend(backend, q.device)
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if m == 0 or max_chunk_len == 0 or q.shape[0] == 0:
        return out
    if chosen == "triton":
        from phalanx.kernels import prefill_attention_triton

        if tiles is None:
            group = q.shape[1] // k_pool.shape[1]
            tiles = prefill_tiles(qo_indptr, q.shape[0], longest=max_chunk_len, group=group)
        prefill_attention_triton.attend(
            q,
            k_pool,
            v_pool,
            req_to_token,
            qo_indptr,
            rows,
            starts,
            out,
            tile_chunks=tiles.chunks,
            tile_firsts=tiles.firsts,
            queries=tiles.queries,
            page_size=page_size,
            scale=scale,
        )
    else:
        _attend_torch(q, k_pool, v_pool, req_to_token, qo_indptr, rows, starts, page_size, scale, out)
    return out


def _attend_torch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    qo_indptr: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    page_size: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Chunk by chunk, in fp32: a plain specification, not meant to be fast."""
    bounds, num_kv_heads = qo_indptr.tolist(), k_pool.shape[1]
    for row, start, first, stop in zip(rows.tolist(), starts.tolist(), bounds[:-1], bounds[1:], strict=True):
        total = start + stop - first
        col = torch.arange(total, device=q.device)
        slots = table[row, col // page_size * page_size].long() + col % page_size
        queries = q[first:stop].float().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("tkgd,lkd->kgtl", queries, k_pool[slots].float()) * scale
        scores.masked_fill_(col[None, :] > col[start:, None], -torch.inf)
        values = torch.einsum("kgtl,lkd->tkgd", torch.softmax(scores, -1), v_pool[slots].float())
        out[first:stop] = values.flatten(1, 2).to(out.dtype)
