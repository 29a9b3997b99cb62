"""What a step looks like to the model, and what an attention backend is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from phalanx.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Decode rows: the first `n` tokens of the step, one token each.

    rows: [n] int64, rows of req_to_token. seq_lens: [n] int32, tokens to attend to, the new one included.
    kv_indptr: [n+1] int32 and kv_indices: page ids (CSR), with last_page_len: [n] int32 tokens in the last
    page; or None where the backend reads req_to_token. With padded batches n is the bucket; padding lanes are
    row 0 with a length of 1.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Prompt chunks: the tokens after the decode rows, chunk after chunk.

    rows: [m] int64. starts, lens: [m] Python ints, tokens already in the pool and tokens of the chunk; the
    chunk attends causally to its row's positions 0 .. starts+lens-1, all stored by then. device_starts: [m]
    int32, starts on the device; indptr: [m+1] int32 there, first token of each chunk among the chunk tokens;
    longest: at least the longest chunk, which sizes tiles. A captured step has these three alone, its lists
    are empty.
    """

    rows: torch.Tensor
    starts: list[int]
    lens: list[int]
    device_starts: torch.Tensor | None = None
    indptr: torch.Tensor | None = None
    longest: int = 0


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Device tensors of one step, built once by `engine.batch`.

    input_ids, positions: [T] int64. slot_mapping: [T] int64, the KV slot of each token (slots below
    page_size belong to padding page 0). req_to_token: [rows, max_context] int32 token slots.
    logits_index: [S] int64, the tokens whose logits are wanted; None: all tokens, in order.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    req_to_token: torch.Tensor
    logits_index: torch.Tensor | None
    num_decode: int
    decode: DecodePart | None
    prefill: PrefillPart | None


class AttentionBackend(Protocol):
    """Attention over the paged pool. Storing K and V is not its work (`kernels.store_kv` is)."""

    def begin(self, batch: ForwardBatch, pool: KVPool) -> Any:
        """Build what all layers of this step share (gather indices, masks, wrappers)."""
        ...

    def forward(self, layer: int, q: torch.Tensor, pool: KVPool, state: Any) -> torch.Tensor:
        """Attend. q: [T, num_q_heads, head_dim]; K and V of all T tokens are in the pool. Returns like q."""
        ...
