"""Token embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Embedding:
    """Rows of [vocab_size, hidden_size] by token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def targets(self, name: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor to fill."""
        return {f"{name}.weight": self.weight}

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] int32 or int64. Returns [num_tokens, hidden_size]."""
        return F.embedding(token_ids, self.weight)
