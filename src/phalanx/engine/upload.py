"""A plan's arrays to the device: one buffer, one copy, no waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 256  # bytes; Triton compiles for alignment, and a view of any dtype must be aligned
_DTYPES = {"int32": torch.int32, "int64": torch.int64}


def upload(
    arrays: dict[str, npt.NDArray[Any]], device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Copies of one-dimensional int32 and int64 host arrays, by name, of the same dtypes.

    Returns the uint8 tensor that all of them are views of, in the order of `arrays`, and the copies. Arrays
    of the same sizes lie at the same places.

    On CUDA all of them go through one pinned buffer and one copy on the current stream; the host waits for
    nothing. torch reuses a pinned buffer only when the copies out of it are done.
    """
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    raw = host.numpy()
    for name, array in arrays.items():
        raw[places[name] : places[name] + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    whole = host.to(device, non_blocking=True)
    return whole, {
        name: whole[places[name] : places[name] + array.nbytes].view(_DTYPES[array.dtype.name])
        for name, array in arrays.items()
    }
