"""Attention of the CPU: decode rows by this package's numba kernel, prompt chunks by torch.

The kernel reads the paged pool in place, through the request table, one task per row and no padding. Prompt
chunks have many queries per row, where the matrix products of `torch_native` are as good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from phalanx.attention import torch_native
from phalanx.attention.base import ForwardBatch
from phalanx.config.groups import ModelConfig
from phalanx.kernels import decode_attention_numba
from phalanx.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class StepState:
    """What all layers share.

    batch: the step. cut: who computes which decode rows, None without any. chunks: `torch_native`'s state of
    the prompt chunks, None without any.
    """

    batch: ForwardBatch
    cut: decode_attention_numba.DecodePlan | None
    chunks: torch_native.StepState | None


class NumbaAttention:
    """See the module. Takes any head_dim, page size and mix of decode rows and chunks, in fp32 and bf16.

    A decode row's result depends on nothing but that row: not on the batch, not on the number of threads.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.num_kv_heads = config.num_kv_heads
        self.scale = config.head_dim**-0.5
        self.prefill = torch_native.TorchNativeAttention(config)

    def begin(self, batch: ForwardBatch, pool: KVPool) -> StepState:
        """Share out the decode rows; build the chunks' indices and masks."""
        cut = chunks = None
        if batch.decode is not None and batch.num_decode:
            cut = decode_attention_numba.plan(batch.decode.seq_lens, self.num_kv_heads)
        if batch.prefill is not None and batch.prefill.lens:
            rest = replace(batch, input_ids=batch.input_ids[batch.num_decode :], num_decode=0, decode=None)
            chunks = self.prefill.begin(rest, pool)
        return StepState(batch, cut, chunks)

    def forward(self, layer: int, q: torch.Tensor, pool: KVPool, state: StepState) -> torch.Tensor:
        """q: [T, num_q_heads, head_dim], last stride 1. Returns the same shape, contiguous."""
        batch, split = state.batch, state.batch.num_decode
        if state.cut is None and state.chunks is not None:
            return self.prefill.forward(layer, q, pool, state.chunks)
        out = torch.empty(q.shape, dtype=q.dtype)
        if state.cut is not None and batch.decode is not None:
            decode_attention_numba.attend(
                q[:split],
                pool.k[layer],
                pool.v[layer],
                batch.req_to_token,
                batch.decode.rows,
                batch.decode.seq_lens,
                pool.page_size,
                self.scale,
                out[:split],
                state.cut,
            )
        if state.chunks is not None:
            out[split:] = self.prefill.forward(layer, q[split:], pool, state.chunks)
        return out
