"""Linear layers of one or several checkpoint matrices, prepacked for oneDNN on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN takes prepacked weights of this dtype here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """y = x W^T + b, with W made of the checkpoint's matrices stacked along the output.

    Fill the tensors that `targets` names, then call `pack` once; only then may the layer be called.

    Args:
        in_features: width of x.
        shards: checkpoint name of each part (below the prefix given to `targets`) and its output width, in
            order; {"q_proj": 576, "k_proj": 192, "v_proj": 192} is a merged QKV.
        bias: every part has a bias.
        dtype, device: of weights and activations.
    """

    def __init__(
        self,
        in_features: int,
        shards: dict[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shards = shards
        self.out_features = sum(shards.values())
        self.weight = torch.empty(self.out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(self.out_features, dtype=dtype, device=device) if bias else None
        self.packed = False

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the view to copy that tensor into; `prefix` ends in a dot or is empty."""
        found = {}
        for kind, whole in (("weight", self.weight), ("bias", self.bias)):
            if whole is not None:
                parts = whole.split(list(self.shards.values()))
                found |= {f"{prefix}{n}.{kind}": part for n, part in zip(self.shards, parts, strict=True)}
        return found

    def pack(self) -> None:
        """Reorder the weight into oneDNN's blocks, where it takes them. `targets` is void afterwards.

        Packing without a batch hint serves every batch size; plain weights are repacked in every call.
        """
        if _can_pack(self.weight.dtype, self.weight.device):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
            self.packed = True

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write y to `out`: [num_tokens, out_features]. For plain weights without a bias."""
        return torch.mm(x, self.weight.t(), out=out)

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """x: [num_tokens, in_features]. Returns [num_tokens, out_features], plus `add` of that shape."""
        if self.packed:
            op = torch.ops.mkldnn._linear_pointwise
            if add is None:
                return op(x, self.weight, self.bias, "none", [], "")
            return op(x, add, self.weight, self.bias, "add")
        y = F.linear(x, self.weight, self.bias)
        return y if add is None else y.add_(add)
