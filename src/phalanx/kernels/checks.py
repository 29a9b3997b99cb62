"""Argument checks shared by the kernels. Each raises TypeError or ValueError that names the argument."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import torch

BACKENDS = ("auto", "torch", "triton")
WITH_NUMBA = (*BACKENDS, "numba")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Raise unless `tensor` is one, of an allowed dtype, shape (None: any size), device and layout.

    A wrong type or dtype is a TypeError; a wrong shape, device or layout is a ValueError.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {str(tensor.dtype).removeprefix('torch.')}")
    fits = tensor.ndim == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors are on {device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_page_size(page_size: int) -> None:
    """Raise unless `page_size` is an integer of at least 1."""
    if isinstance(page_size, bool) or not isinstance(page_size, int):
        raise TypeError(f"page_size must be an int, got {type(page_size).__name__}")
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")


def pick_backend(backend: str, device: torch.device, known: Sequence[str] = BACKENDS) -> str:
    """The backend to run: "auto" is Triton on CUDA and torch elsewhere.

    Raises ValueError if it is unknown, or is Triton for tensors that Triton cannot reach.
    """
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")
    if backend == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"backend 'triton' needs CUDA tensors, got {device}")
    return backend


def pick_with_numba(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """`pick_backend` of an op that numba has too: "auto" on a CPU is numba where it can run.

    Raises ValueError, also for numba where it cannot run.
    """
    if backend == "auto" and device.type == "cpu" and numba_problem(dtype) is None:
        return "numba"
    if backend == "numba":
        problem = f"tensors are on {device}" if device.type != "cpu" else numba_problem(dtype)
        if problem is not None:
            raise ValueError(f"backend 'numba' is not possible: {problem}")
    return pick_backend(backend, device, WITH_NUMBA)


@functools.cache
def numba_problem(dtype: torch.dtype) -> str | None:
    """Why the numba kernels cannot run on a CPU in this dtype, or None if they can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"no kernel for {str(dtype).removeprefix('torch.')}"
    try:
        import numba  # noqa: F401
    except Exception as error:  # ImportError, or one that numba raises for a NumPy it does not know
        return f"numba cannot be imported ({type(error).__name__}: {error})"
    return None
