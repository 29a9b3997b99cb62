"""Root-mean-square norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in fp32 inside."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (size,)
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def targets(self, name: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the tensor to fill."""
        return {f"{name}.weight": self.weight}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]. Returns the same shape and dtype."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)
