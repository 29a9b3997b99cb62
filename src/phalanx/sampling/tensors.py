"""Host arrays to device tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy of a host array, also of a read-only one. On CUDA the host does not wait for it."""
    if device.type != "cuda":
        return torch.tensor(array, dtype=dtype, device=device)
    pinned = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


def int32_table(num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """[num_rows, num_columns] int32 zeros. On the CPU, NumPy's: pages never touched take no memory."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_rows, num_columns), np.int32))
    return torch.zeros(num_rows, num_columns, dtype=torch.int32, device=device)
