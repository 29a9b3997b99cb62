"""SiLU-gated feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels import silu_mul
from phalanx.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up merged into one matrix."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.gate_up = Linear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.down = Linear(
            intermediate_size, {"down_proj": hidden_size}, bias=bias, dtype=dtype, device=device
        )

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the view to fill; `prefix` ends in a dot."""
        return self.gate_up.targets(prefix) | self.down.targets(prefix)

    def pack(self) -> None:
        """Pack the weights; see `Linear.pack`."""
        self.gate_up.pack()
        self.down.pack()

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual: [num_tokens, hidden_size]. Returns residual + mlp(x)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), add=residual)

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns mlp(x), without the residual."""
        return self.down(silu_mul(self.gate_up(x)))
