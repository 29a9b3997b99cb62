"""Attention by this package's Triton kernels, straight from the request-to-token table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.attention.base import ForwardBatch
from phalanx.config.groups import ModelConfig
from phalanx.kernels import (
    LongRows,
    PrefillTiles,
    decode_attention,
    find_long_rows,
    longest_first,
    prefill_attention,
    prefill_tiles,
)
from phalanx.kernels.decode_attention import default_long_tokens
from phalanx.kvcache.pool import KVPool

# Rows. Of more than these the last ones to be read are too few to matter, and ordering takes their square.
MAX_ORDERED = 16384


@dataclass(frozen=True, slots=True)
class StepState:
    """batch: the step. long_rows: its decode rows far longer than the rest; None: the context has no room.

    order: in which its decode rows are begun; None: as they come. tiles: of its prompt chunks, if it has any.
    """

    batch: ForwardBatch
    long_rows: LongRows | None
    order: torch.Tensor | None
    tiles: PrefillTiles | None


class TritonAttention:
    """One launch for the decode rows and one for the chunks; needs no CSR and no plan.

    Decode rows are begun longest first. Where the context is long enough for a row to hold others up, two
    more launches take the rows that are. Takes any head_dim, page size and mix. Nothing is read on the host,
    so it can be captured.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.scale = config.head_dim**-0.5
        self._group = config.num_q_heads // config.num_kv_heads

    def begin(self, batch: ForwardBatch, pool: KVPool) -> StepState:
        """Find the long rows and the order of the rest, which are the same in all layers."""
        long_rows = order = None
        if batch.decode is not None and batch.req_to_token.is_cuda:
            max_context = batch.req_to_token.shape[1]
            limit = default_long_tokens(batch.num_decode, pool.k[0].shape[1], max_context)
            long_rows = find_long_rows(batch.decode.seq_lens, max_context, long_tokens=limit)
            if batch.num_decode <= MAX_ORDERED:
                order = longest_first(batch.decode.seq_lens if long_rows is None else long_rows.short_lens)
        return StepState(batch, long_rows, order, tiles_of(batch, self._group))

    def forward(self, layer: int, q: torch.Tensor, pool: KVPool, state: StepState) -> torch.Tensor:
        """q: [T, num_q_heads, head_dim], last stride 1. Returns the same shape, contiguous."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        batch = state.batch
        decode, split = batch.decode, batch.num_decode
        if decode is not None:
            decode_attention(
                q[:split],
                pool.k[layer],
                pool.v[layer],
                batch.req_to_token,
                decode.rows,
                decode.seq_lens,
                page_size=pool.page_size,
                sm_scale=self.scale,
                out=out[:split],
                order=state.order,
                long_rows=state.long_rows,
            )
        if batch.prefill is not None:
            attend_chunks(layer, q[split:], pool, batch, self.scale, out[split:], state.tiles)
        return out


def tiles_of(batch: ForwardBatch, group: int) -> PrefillTiles | None:
    """How Triton cuts the prompt chunks of a step; None without any, and off a GPU, where it is not used."""
    part = batch.prefill
    if part is None or part.indptr is None or not batch.req_to_token.is_cuda:
        return None
    num_tokens = len(batch.input_ids) - batch.num_decode
    return prefill_tiles(part.indptr, num_tokens, longest=part.longest, group=group)


def attend_chunks(
    layer: int,
    q: torch.Tensor,
    pool: KVPool,
    batch: ForwardBatch,
    scale: float,
    out: torch.Tensor,
    tiles: PrefillTiles | None,
) -> None:
    """Attention of the prompt chunks. q, out: [chunk tokens, num_q_heads, head_dim]. tiles: of `tiles_of`."""
    part = batch.prefill
    assert part is not None and part.indptr is not None and part.device_starts is not None
    if not part.lens:  # a captured step: its padding tokens are in no chunk, and must stay finite
        out.zero_()
    prefill_attention(
        q,
        pool.k[layer],
        pool.v[layer],
        batch.req_to_token,
        part.indptr,
        part.rows,
        part.device_starts,
        max_chunk_len=part.longest,
        page_size=pool.page_size,
        sm_scale=scale,
        out=out,
        tiles=tiles,
    )
