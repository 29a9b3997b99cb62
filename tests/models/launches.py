"""Which Triton kernels a CUDA engine asks for, found on a CPU: launches are noted and not run.

Triton compiles a kernel anew for another constant, and for another alignment or type of an argument. The
engine decides these on the host, so they can be told without a device. All memory is zeros: tokens as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_CHOOSERS = ("pick_backend", "pick_with_numba")
_MODULES = (
    "decode_attention",
    "decode_attention_long",
    "kv_indices",
    "prefill_attention",
    "rmsnorm",
    "rope",
    "row_order",
    "sample",
    "silu_mul",
    "step_prep",
    "store_kv",
)
Kind = tuple[str, tuple[object, ...], tuple[object, ...]]


def kind_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Kind:
    """The kernel's name, each argument as Triton's cache sees it, and the options, e.g. num_warps."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    seen: list[object] = []
    for param in parameters(kernel):
        value = given.pop(param.name)
        if not param.is_constexpr:
            aligned = not param.do_not_specialize_on_alignment
            chosen = param.is_const, not param.do_not_specialize, aligned
            value = native_specialize_impl(BaseBackend, value, *chosen)
        seen.append((param.name, value))
    return kernel.fn.__name__, tuple(seen), tuple(sorted(given.items()))


@functools.cache
def parameters(kernel: Any) -> list[Any]:
    """Of a kernel, also of one that is interpreted, as those are that the tests of kernels have loaded."""
    if isinstance(kernel, InterpretedFunction):
        named = ("do_not_specialize", "do_not_specialize_on_alignment")
        kernel = JITFunction(kernel.fn, **{name: kernel.kwargs.get(name) for name in named})
    return list(kernel.params)


@contextlib.contextmanager
def noted_launches() -> Iterator[set[Kind]]:
    """Inside `stand_in`: every op takes its Triton kernel. Yields the kinds of launches up to now."""
    found: set[Kind] = set()

    def run(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        found.add(kind_of(kernel, args, options))

    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)

    def choose(backend: str, *args: object) -> str:
        return "triton" if backend == "auto" else backend

    with pytest.MonkeyPatch.context() as patch:
        if isinstance(tl.cdiv, InterpretedFunction):
            # The specialiser imports this, which refuses a library made for the interpreter without the knob.
            patch.setattr(knobs.runtime, "interpret", True)
            importlib.import_module("triton.experimental.gluon")
            patch.undo()
        for kind in (JITFunction, InterpretedFunction):
            patch.setattr(kind, "run", run)
        for name in _MODULES:
            module = importlib.import_module(f"phalanx.kernels.{name}")
            for chooser in _CHOOSERS:
                patch.setattr(module, chooser, choose, raising=False)
        patch.setattr(torch, "empty", zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
        yield found
