"""Attention by FlashInfer: its tensor-core decode kernel, planned once per bucket.

With split-KV off a plan depends on the number of rows alone: the kernel reads lengths and pages from the
device arrays that `step_prep` fills. So decode needs no plan per step, eagerly or in a captured graph. The
wrapper is told that there is no CUDA graph: in its graph mode 0.6.x launches padding programs over plan
entries that nobody wrote (flashinfer#4002). Prompt chunks take this package's Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phalanx.attention.base import DecodePart, ForwardBatch
from phalanx.attention.triton import attend_chunks
from phalanx.config.groups import ModelConfig
from phalanx.core.errors import EngineError
from phalanx.kvcache.pool import KVPool

_INT_WORKSPACE_BYTES = 1 << 20  # a plan of 8192 rows takes about 0.2 MB
_SPLIT_ENTRY = 14  # of a plan: whether rows are split


@dataclass(frozen=True, slots=True)
class StepState:
    """batch: the step. wrapper: the planned wrapper of its bucket, None without decode rows."""

    batch: ForwardBatch
    wrapper: Any


class FlashInferAttention:
    """See the module. Decode batches come in whole buckets, whose buffers keep their addresses."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        import flashinfer

        self._wrapper_class = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self._config = config
        self._scale = config.head_dim**-0.5
        self._float_workspace = torch.empty(1 << 20, dtype=torch.uint8, device=device)  # only splits use it
        self._wrappers: dict[int, Any] = {}

    def begin(self, batch: ForwardBatch, pool: KVPool) -> StepState:
        """Find the bucket's wrapper; the first step of a bucket plans it, which reads lengths on the host."""
        wrapper = None
        if batch.decode is not None:
            wrapper = self._wrappers.get(batch.num_decode)
            if wrapper is None:
                wrapper = self._wrappers[batch.num_decode] = self._plan(batch.decode, pool)
        return StepState(batch, wrapper)

    def forward(self, layer: int, q: torch.Tensor, pool: KVPool, state: StepState) -> torch.Tensor:
        """q: [T, num_q_heads, head_dim], last stride 1. Returns the same shape, contiguous."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        split = state.batch.num_decode
        if state.wrapper is not None:
            state.wrapper.run(q[:split], _pages(pool, layer), out=out[:split])
        if state.batch.prefill is not None:
            attend_chunks(layer, q[split:], pool, state.batch, self._scale, out[split:])
        return out

    def _plan(self, decode: DecodePart, pool: KVPool) -> Any:
        if decode.kv_indices is None:
            raise EngineError("FlashInfer reads KV indices, but the batch holds none")
        config, dtype = self._config, pool.k[0].dtype
        wrapper = self._wrapper_class(
            self._float_workspace, "NHD", use_cuda_graph=False, use_tensor_cores=True, backend="fa2"
        )
        room = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=decode.rows.device)
        wrapper.reset_workspace_buffer(self._float_workspace, room)
        # Arrays that lie on the device already are not copied: the wrapper keeps reading them.
        wrapper.plan(
            decode.kv_indptr,
            decode.kv_indices,
            decode.last_page_len,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            pool.page_size,
            q_data_type=dtype,
            kv_data_type=dtype,
            sm_scale=self._scale,
            disable_split_kv=True,
        )
        plan = wrapper._plan_info
        group = config.num_q_heads // config.num_kv_heads
        # A tile holds 16, 64 or 128 (row, head) pairs; a row of one token never takes more than its group.
        tiles = len(decode.rows) * max(1, -(-group // 16))
        if plan[_SPLIT_ENTRY] or not 0 < plan[0] <= tiles:
            raise EngineError(f"FlashInfer planned {len(decode.rows)} rows as {list(plan)}: rows are split")
        if wrapper._paged_kv_indptr_buf.data_ptr() != decode.kv_indptr.data_ptr():
            raise EngineError("this FlashInfer copies the arrays it plans with: only 0.6.x is supported")
        return wrapper


def _pages(pool: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [num_pages, page_size, num_kv_heads, head_dim]."""
    shape = (pool.num_pages, pool.page_size, *pool.k[layer].shape[1:])
    return pool.k[layer].view(shape), pool.v[layer].view(shape)
