"""Attention in plain torch operations: the backend of the CPU, and correct on any device.

Rows are grouped by length into padded rectangles. Of each rectangle K and V are gathered head by head out of
the pool, and two batched matrix products do the rest; the query heads that share a KV head are rows of one
product. (`scaled_dot_product_attention` takes four times as long for one query per row on two CPU cores.)

With one query per row and few heads per KV head, the sum of V is an `embedding_bag` with the attention
weights as sample weights: it reads the pool in place, which took 485 us where gather and product took 817
(64 rows, 128 tokens, 9 heads on 3, one core).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from phalanx.attention.base import ForwardBatch
from phalanx.attention.grouping import group_by_length, query_blocks
from phalanx.config.groups import ModelConfig
from phalanx.kvcache.pool import KVPool

# A bag reads V once per query head, the gather once per KV head: at 7 heads per KV head the two tie.
MAX_BAG_GROUP = 6


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Items of one group: B items of up to Q query tokens that see up to L KV tokens.

    tokens: [B * Q] int64, the step's token of each query (padding repeats the last one).
    kv_index: [B * num_kv_heads * L] int64, rows of a pool seen as [num_slots * num_kv_heads, head_dim].
    mask: [B, 1, 1, Q, L], 0 or -inf in the compute dtype, or None where all is visible.
    bag_index: [B * num_q_heads * L] int32, the rows of V of every query head, and bag_offsets:
    [B * num_q_heads + 1] int32; None where V is gathered instead.
    """

    size: int
    num_queries: int
    num_kv: int
    tokens: torch.Tensor
    kv_index: torch.Tensor
    mask: torch.Tensor | None
    bag_index: torch.Tensor | None
    bag_offsets: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StepState:
    """What all layers share.

    restore: [T] int64, each token's row among all rectangles' outputs; None where that is the order already.
    gathered: [longest kv_index, head_dim] in the pool's dtype: room for K, then for V, of one rectangle. One
    buffer a step: allocated per layer, 4 MB made gather and product of K a third slower (1244 us for 921).
    """

    rectangles: list[Rectangle]
    restore: torch.Tensor | None
    gathered: torch.Tensor


class TorchNativeAttention:
    """See the module. Takes any head_dim, page size (it reads token slots) and mix of decode rows and chunks.

    Products of bf16 and fp16 inputs accumulate in fp32, as the softmax does.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.num_kv_heads = config.num_kv_heads
        self.group = config.num_q_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5

    def begin(self, batch: ForwardBatch, pool: KVPool) -> StepState:
        """Group the step's rows and build their gather indices and masks."""
        rectangles: list[Rectangle] = []
        order: list[np.ndarray] = []
        for table_rows, first_pos, num_queries, first_token in _items(batch):
            kv_lens = first_pos + num_queries
            for group in group_by_length(num_queries, kv_lens):
                rectangle, padded_row = self._rectangle(
                    batch, pool, table_rows[group], first_pos[group], num_queries[group], first_token[group]
                )
                order.append(padded_row)
                rectangles.append(rectangle)
        longest = max((len(rectangle.kv_index) for rectangle in rectangles), default=0)
        gathered = pool.k[0].new_empty(longest, self.head_dim)
        return StepState(rectangles, _restore(order, batch), gathered)

    def forward(self, layer: int, q: torch.Tensor, pool: KVPool, state: StepState) -> torch.Tensor:
        """q: [T, num_q_heads, head_dim]. Returns the same shape, contiguous."""
        if not state.rectangles:
            return torch.empty_like(q, memory_format=torch.contiguous_format)
        q = q * self.scale
        k_rows, v_rows = pool.k[layer].view(-1, self.head_dim), pool.v[layer].view(-1, self.head_dim)
        outputs = [self._attend(q, k_rows, v_rows, each, state.gathered) for each in state.rectangles]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if state.restore is None else out.index_select(0, state.restore)

    def _attend(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        rectangle: Rectangle,
        gathered: torch.Tensor,
    ) -> torch.Tensor:
        """One rectangle. Returns [B * Q, num_q_heads, head_dim]."""
        size, queries, num_kv = rectangle.size, rectangle.num_queries, rectangle.num_kv
        heads, group, dim = self.num_kv_heads, self.group, self.head_dim
        q = q.index_select(0, rectangle.tokens)
        if queries > 1:
            q = q.view(size, queries, heads, group, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(size * heads, group * queries, dim)
        gathered = gathered[: len(rectangle.kv_index)]
        torch.index_select(k_rows, 0, rectangle.kv_index, out=gathered)
        scores = torch.bmm(q, gathered.view(size * heads, num_kv, dim).mT)
        if rectangle.mask is not None:
            scores.view(size, heads, group, queries, num_kv).add_(rectangle.mask)
        weights = torch.softmax(scores, dim=-1)
        if rectangle.bag_index is not None:
            out, *_ = torch.embedding_bag(
                v_rows,
                rectangle.bag_index,
                rectangle.bag_offsets,
                mode=0,
                per_sample_weights=weights.view(-1),
                include_last_offset=True,
            )
            return out.view(size, heads * group, dim)
        torch.index_select(v_rows, 0, rectangle.kv_index, out=gathered)
        out = torch.bmm(weights, gathered.view(size * heads, num_kv, dim))
        if queries > 1:
            out = out.view(size, heads, group, queries, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(size * queries, heads * group, dim)

    def _rectangle(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        table_rows: np.ndarray,
        first_pos: np.ndarray,
        num_queries: np.ndarray,
        first_token: np.ndarray,
    ) -> tuple[Rectangle, np.ndarray]:
        """Build one rectangle; also returns the token of each of its output rows, -1 for padding."""
        table, device = batch.req_to_token, batch.req_to_token.device
        kv_lens = first_pos + num_queries
        widest, longest = int(num_queries.max()), int(kv_lens.max())
        nth = np.arange(widest)
        inside = np.minimum(nth, num_queries[:, None] - 1)
        tokens = first_token[:, None] + inside
        last_seen = torch.from_numpy(first_pos[:, None] + inside).to(device)
        ahead = torch.arange(longest, device=device) > last_seen[:, :, None]
        slots = table[:, :longest].index_select(0, torch.from_numpy(table_rows).to(device)).long()
        # Beyond its length a row may hold anything; slot 0 is padding, finite and masked out.
        slots = slots.masked_fill_(ahead[:, -1], 0)
        heads = torch.arange(self.num_kv_heads, device=device)
        kv_index = slots[:, None, :] * self.num_kv_heads + heads[:, None]
        mask = None
        if widest > 1 or int(kv_lens.min()) < longest:
            mask = torch.zeros(ahead.shape, dtype=pool.k[0].dtype, device=device)
            mask = mask.masked_fill_(ahead, float("-inf"))[:, None, None]
        bag_index = bag_offsets = None
        if widest == 1 and self.group <= MAX_BAG_GROUP and device.type == "cpu":
            shape = (len(table_rows), self.num_kv_heads, self.group, longest)
            bag_index = kv_index[:, :, None].expand(shape).reshape(-1).int()
            bag_offsets = torch.arange(0, bag_index.numel() + 1, longest, dtype=torch.int32)
        rectangle = Rectangle(
            size=len(table_rows),
            num_queries=widest,
            num_kv=longest,
            tokens=torch.from_numpy(tokens.reshape(-1)).to(device),
            kv_index=kv_index.view(-1),
            mask=mask,
            bag_index=bag_index,
            bag_offsets=bag_offsets,
        )
        return rectangle, np.where(nth < num_queries[:, None], tokens, -1).reshape(-1)


def _items(batch: ForwardBatch) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Decode rows, then blocks of chunks, each [n] int64.

    Per item: its table row, the position of its first query, its number of queries, its first token.
    """
    found = []
    if batch.decode is not None and batch.num_decode:
        rows = batch.decode.rows.cpu().numpy().astype(np.int64)
        lens = batch.decode.seq_lens.cpu().numpy().astype(np.int64)
        found.append((rows, lens - 1, np.ones_like(lens), np.arange(len(lens))))
    if batch.prefill is not None and batch.prefill.lens:
        chunk_rows = batch.prefill.rows.cpu().numpy().astype(np.int64)
        starts, lens = np.array(batch.prefill.starts), np.array(batch.prefill.lens)
        chunk, first_pos, size, token = query_blocks(starts, lens)
        found.append((chunk_rows[chunk], first_pos, size, batch.num_decode + token))
    return found


def _restore(order: list[np.ndarray], batch: ForwardBatch) -> torch.Tensor | None:
    """Where each token's output lies among the rectangles' rows; None where that is the order already."""
    if not order:
        return None
    token = np.concatenate(order)
    num_tokens = len(batch.input_ids)
    if len(token) == num_tokens and (token == np.arange(num_tokens)).all():
        return None
    row = np.flatnonzero(token >= 0)
    restore = np.empty(num_tokens, dtype=np.int64)
    restore[token[row]] = row
    return torch.from_numpy(restore).to(batch.req_to_token.device)
