"""The order in which a decode batch's rows are best begun."""

from __future__ import annotations

import torch

from phalanx.kernels.checks import check_tensor, pick_backend


def longest_first(seq_lens: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Rows by falling length, equal ones as they come: one launch, no sort.

    A GPU begins the programs of a launch in order. Where a long row comes late, the others are done while it
    still reads; begun first, it ends with them (longest processing time first, Graham 1969).

    seq_lens: [bs] int32 or int64, contiguous. Returns [bs] int32. backend: "torch", "triton" or "auto"
    (Triton on CUDA). Raises TypeError or ValueError naming the argument at fault.
    """
    check_tensor("seq_lens", seq_lens, dtypes=(torch.int32, torch.int64), shape=(None,), contiguous=True)
    chosen = pick_backend(backend, seq_lens.device)
    if chosen == "torch" or not len(seq_lens):
        return torch.argsort(seq_lens, descending=True, stable=True).int()
    from phalanx.kernels import row_order_triton

    return row_order_triton.longest_first(seq_lens)
