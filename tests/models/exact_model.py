"""A model whose logits are the same in any batch, bit for bit, and differ if any token or position is wrong.

It keeps token ids and positions in the KV pool, as integers that fp32 holds exactly, reads them back through
the request table or the page lists, and takes its logits from the line of a table that a hash of them names.
"""

from __future__ import annotations

import msgspec
import torch

from phalanx.attention.base import AttentionBackend, DecodePart, ForwardBatch, PrefillPart
from phalanx.config.groups import ModelConfig
from phalanx.kvcache.pool import KVPool
from phalanx.models.dummy import BUILTIN_CONFIGS

VOCAB = 61
_LINES = 4093  # a prime
CONFIG: ModelConfig = msgspec.structs.replace(
    BUILTIN_CONFIGS["tiny-llama"], vocab_size=VOCAB, num_layers=1, num_kv_heads=1, head_dim=2
)


class ExactModel:
    """max_context: of the longest row. fail_in: None, or "forward", "stored" or "logits" to raise there."""

    def __init__(self, max_context: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._weights = torch.randint(1, _LINES, (max_context,), generator=generator)
        self._table = torch.randn(_LINES, VOCAB, generator=generator) * 2
        self.fail_in: str | None = None

    def forward(self, batch: ForwardBatch, pool: KVPool, attn: AttentionBackend) -> torch.Tensor:
        self._fail("forward")
        kept = pool.k[0][:, 0]
        kept[batch.slot_mapping] = torch.stack([batch.input_ids, batch.positions], 1).float()
        parts = []
        if batch.decode is not None:
            parts.append(self._decode(batch.decode, batch.req_to_token, kept, pool.page_size))
        if batch.prefill is not None:
            positions = batch.positions[batch.num_decode :]
            parts.append(self._prefill(batch.prefill, positions, batch.req_to_token, kept))
        hidden = torch.cat(parts)[:, None]
        self._fail("stored")
        return hidden if batch.logits_index is None else hidden[batch.logits_index]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self._fail("logits")
        found = self._table[hidden[:, 0]]
        return found if out is None else out.copy_(found)

    def _decode(
        self, part: DecodePart, req_to_token: torch.Tensor, kept: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        slots = req_to_token[part.rows]
        if part.kv_indices is not None:
            assert part.kv_indptr is not None and part.last_page_len is not None
            number = torch.arange(slots.shape[1]) // page_size
            first, end = part.kv_indptr[:-1, None], part.kv_indptr[1:, None]
            pages = part.kv_indices[(first + number).clamp_max(len(part.kv_indices) - 1)]
            slots = pages * page_size + torch.arange(slots.shape[1]) % page_size
            lens = (end - first)[:, 0] * page_size - page_size + part.last_page_len
            assert torch.equal(lens, part.seq_lens)
        return self._hash(slots, part.seq_lens, kept)

    def _prefill(
        self, part: PrefillPart, positions: torch.Tensor, req_to_token: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        """Padding tokens of a captured step are in no chunk: they read row 0."""
        assert part.indptr is not None and part.device_starts is not None
        token = torch.arange(len(positions), dtype=torch.int32)
        chunk = torch.searchsorted(part.indptr, token, right=True) - 1
        inside = chunk < len(part.rows)
        chunk = chunk.clamp_max(len(part.rows) - 1)
        at = part.device_starts[chunk] + token - part.indptr[chunk]
        assert torch.equal(at[inside].long(), positions[inside])
        assert part.longest >= int(part.indptr.diff().max())
        rows = torch.where(inside, part.rows[chunk], 0)
        return self._hash(req_to_token[rows], positions + 1, kept)

    def _hash(self, slots: torch.Tensor, lens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """slots: [n, max_context], the first lens [n] of them count. Returns [n] int64, lines of the table"""
        index = torch.arange(slots.shape[1])
        inside = index < lens[:, None]
        ids, positions = kept[torch.where(inside, slots, 0).long()].long().unbind(2)
        terms = (ids + 1 + VOCAB * (positions - index).abs()) * self._weights
        return (terms * inside).sum(1) % _LINES

    def _fail(self, where: str) -> None:
        if self.fail_in == where:
            raise ValueError(f"spoiled in {where}")
