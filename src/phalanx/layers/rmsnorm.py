"""Root-mean-square norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels import add_rms_norm, rms_norm


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

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        """The same in one kernel. x: [num_tokens, size]."""
        return rms_norm(x, self.weight, self.eps)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """In place: residual += x, then x = norm(residual). Both [num_tokens, size]; returns x."""
        add_rms_norm(x, residual, self.weight, self.eps)
        return x
