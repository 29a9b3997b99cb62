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
from phalanx.attention.triton import attend_chunks, tiles_of
from phalanx.config.groups import ModelConfig
from phalanx.core.errors import EngineError
from phalanx.kernels import PrefillTiles
from phalanx.kvcache.pool import KVPool

_INT_WORKSPACE_BYTES = 1 << 20  # a plan of 8192 rows takes about 0.2 MB
# Of the 15 entries of a plan (`PrefillPlanInfo`): the tiles that are launched, the rows that it was made for,
# (row, head) pairs of a tile, whether there may be more tiles than work, and whether rows are split.
_NUM_ENTRIES = 15
_TILES, _ROWS, _TILE_PAIRS, _PADDED, _SPLIT = 0, 1, 3, 13, 14


@dataclass(frozen=True, slots=True)
class StepState:
    """batch: the step. wrapper: the planned wrapper of its bucket, None without decode rows.

    tiles: see `tiles_of`.
    """

    batch: ForwardBatch
    wrapper: Any
    tiles: PrefillTiles | None


class FlashInferAttention:
    """See the module. Decode batches come in whole buckets, whose buffers keep their addresses."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        import flashinfer

        self._wrapper_class = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self._config = config
        self._scale = config.head_dim**-0.5
        self._group = config.num_q_heads // config.num_kv_heads
        self._float_workspace = torch.empty(1 << 20, dtype=torch.uint8, device=device)  # only splits use it
        self._wrappers: dict[int, Any] = {}

    def begin(self, batch: ForwardBatch, pool: KVPool) -> StepState:
        """Find the bucket's wrapper; the first step of a bucket plans it, which reads lengths on the host."""
        wrapper = None
        if batch.decode is not None:
            wrapper = self._wrappers.get(batch.num_decode)
            if wrapper is None:
                wrapper = self._wrappers[batch.num_decode] = self._plan(batch.decode, pool)
        return StepState(batch, wrapper, tiles_of(batch, self._group))

    def forward(self, layer: int, q: torch.Tensor, pool: KVPool, state: StepState) -> torch.Tensor:
        """q: [T, num_q_heads, head_dim], last stride 1. Returns the same shape, contiguous."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        split = state.batch.num_decode
        if state.wrapper is not None:
            state.wrapper.run(q[:split], _pages(pool, layer), out=out[:split])
        if state.batch.prefill is not None:
            attend_chunks(layer, q[split:], pool, state.batch, self._scale, out[split:], state.tiles)
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
        _check_plan(list(wrapper._plan_info), len(decode.rows), self._group)
        for kept, ours in (
            (wrapper._paged_kv_indptr_buf, decode.kv_indptr),
            (wrapper._paged_kv_indices_buf, decode.kv_indices),
            (wrapper._paged_kv_last_page_len_buf, decode.last_page_len),
        ):
            if ours is None or kept.data_ptr() != ours.data_ptr():
                raise EngineError("this FlashInfer copies the arrays it plans with: only 0.6.x is supported")
        return wrapper


def _check_plan(plan: list[int], num_rows: int, group: int) -> None:
    """Raise EngineError for a plan that would not hold for other lengths, or does not compute every row.

    A row of one token that is not split is as many tiles as hold its `group` query heads of a KV head; then
    what is launched is exactly that, whatever the lengths.
    """
    shown = f"FlashInfer planned {num_rows} rows with {group} query heads a KV head as {plan}"
    if len(plan) != _NUM_ENTRIES:
        raise EngineError(f"{shown}, not in {_NUM_ENTRIES} numbers: only 0.6.x is supported")
    if plan[_SPLIT] or plan[_PADDED]:
        raise EngineError(f"{shown}: it splits rows or launches more than there is, so it holds for one step")
    pairs = plan[_TILE_PAIRS]
    tiles = num_rows * -(-group // pairs) if pairs > 0 else 0
    if plan[_ROWS] != num_rows or not tiles or plan[_TILES] != tiles:
        raise EngineError(f"{shown}: {num_rows} rows, each in whole tiles, were to be computed")


def _pages(pool: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [num_pages, page_size, num_kv_heads, head_dim]."""
    shape = (pool.num_pages, pool.page_size, *pool.k[layer].shape[1:])
    return pool.k[layer].view(shape), pool.v[layer].view(shape)
