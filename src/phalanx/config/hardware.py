"""What machine this is, found out without importing torch (the launcher never loads it)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from pathlib import Path

import msgspec


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that `resolve` decides by.

    Attributes:
        num_cpus: cores this process may use.
        cpu_has_bf16: the CPU multiplies bfloat16 (AVX512-BF16, AMX or Arm BF16).
        gpu_name: name of GPU 0, or None without one. gpu_bytes: its memory.
        has_triton, has_flashinfer, has_numba: these packages can be imported.
    """

    num_cpus: int
    cpu_has_bf16: bool
    gpu_name: str | None = None
    gpu_bytes: int = 0
    has_triton: bool = False
    has_flashinfer: bool = False
    has_numba: bool = False


def detect() -> Hardware:
    """Look at this machine. Creates no CUDA context."""
    name, size = _first_gpu()
    return Hardware(
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_has_bf16=_cpu_has_bf16(),
        gpu_name=name,
        gpu_bytes=size,
        has_triton=importlib.util.find_spec("triton") is not None,
        has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
        has_numba=importlib.util.find_spec("numba") is not None,
    )


def _cpu_has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.system() == "Darwin" and platform.machine() == "arm64"
    return any(word in flags for word in ("avx512_bf16", "amx_bf16", " bf16"))


def _first_gpu() -> tuple[str | None, int]:
    """Name and memory of GPU 0 through the CUDA driver library; (None, 0) without a usable one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, 0
    count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return None, 0
    name = ctypes.create_string_buffer(128)
    if cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None, 0
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return name.value.decode(errors="replace"), size.value
