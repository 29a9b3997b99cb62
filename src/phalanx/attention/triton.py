"""Attention by this package's Triton kernels, straight from the request-to-token table."""

from __future__ import annotations

import torch

from phalanx.attention.base import ForwardBatch
from phalanx.config.groups import ModelConfig
from phalanx.kernels import decode_attention, prefill_attention
from phalanx.kvcache.pool import KVPool


class TritonAttention:
    """One launch for the decode rows and one for the chunks; needs no CSR, no plan and no state.

    Takes any head_dim, page size and mix. Nothing is read on the host, so it can be captured.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.scale = config.head_dim**-0.5

    def begin(self, batch: ForwardBatch, pool: KVPool) -> ForwardBatch:
        """The batch itself is all that the layers share."""
        return batch

    def forward(self, layer: int, q: torch.Tensor, pool: KVPool, state: ForwardBatch) -> torch.Tensor:
        """q: [T, num_q_heads, head_dim], last stride 1. Returns the same shape, contiguous."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode, split = state.decode, state.num_decode
        if decode is not None:
            decode_attention(
                q[:split],
                pool.k[layer],
                pool.v[layer],
                state.req_to_token,
                decode.rows,
                decode.seq_lens,
                page_size=pool.page_size,
                sm_scale=self.scale,
                out=out[:split],
            )
        if state.prefill is not None:
            attend_chunks(layer, q[split:], pool, state, self.scale, out[split:])
        return out


def attend_chunks(
    layer: int, q: torch.Tensor, pool: KVPool, batch: ForwardBatch, scale: float, out: torch.Tensor
) -> None:
    """Attention of the prompt chunks. q, out: [chunk tokens, num_q_heads, head_dim]."""
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
    )
