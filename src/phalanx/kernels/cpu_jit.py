"""What the numba kernels share: memory by address, claiming chunks, bf16, exp."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from phalanx.kernels.cpu_vectors import BF16, FP32

logger = logging.getLogger(__name__)

# Division by zero is inf, as the hardware has it: a check that raises would keep loops from becoming vectors.
inlined = njit(forceinline=True, error_model="numpy")
inlined_fused = njit(forceinline=True, error_model="numpy", fastmath={"contract"})
# Sums may be reordered too; NaN and infinity keep their meaning.
inlined_sums = njit(forceinline=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
KINDS = {torch.float32: FP32, torch.bfloat16: BF16}


@functools.cache
def _version() -> int:
    """Changes with the code of any kernel and with the CPU."""
    text = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}".encode()
    folder = Path(__file__).parent
    files = sorted([*folder.glob("*_numba.py"), *folder.glob("*_vectors.py"), folder / "cpu_jit.py"])
    return zlib.crc32(b"".join([text, *(file.read_bytes() for file in files)]))


def compiled(*variant: int) -> Callable[[Any], Any]:
    """Decorates a kernel's entry, `void run(int64_t *block)`: compiles it, or reads it from numba's cache.

    numba's cache sees changes of the file that a function is in, not of what it calls, and keeps all variants
    of one function in one index, which two processes that compile different ones at once can spoil. So every
    variant, version and CPU gets a name of its own, under which all processes write the same.
    """

    def decorate(function: Any) -> Any:
        function.__qualname__ = "_".join(map(str, [function.__name__, *variant, _version()]))
        compile_it = cfunc(types.void(types.int64), error_model="numpy", cache=True)
        try:
            return compile_it(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            logger.warning(
                "CPU kernels are compiled at every start: no folder for numba's cache can be written"
            )
            return cfunc(types.void(types.int64), error_model="numpy")(function)

    return decorate


@intrinsic
def _pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address`, atomically. Returns what it held."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _as_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def _as_bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@inlined
def int64s(address: int, count: int) -> Any:
    """The int64 array at an address."""
    return carray(_pointer(address), (count,), np.int64)


@inlined
def int32s(address: int, count: int) -> Any:
    """The int32 array at an address."""
    return carray(_pointer(address), (count,), np.int32)


@inlined
def floats(address: int, count: int) -> Any:
    """The float32 array at an address."""
    return carray(_pointer(address), (count,), np.float32)


@inlined
def halves(address: int, count: int) -> Any:
    """The uint16 array (bf16 bits) at an address."""
    return carray(_pointer(address), (count,), np.uint16)


@inlined_fused
def exp(x: float) -> float:
    """e**x in float32, within 2 units in the last place for |x| <= 87; below that e**-87, above 88.4 inf."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.75) if x > np.float32(88.75) else x  # which rounds to 128: the scale becomes infinity
    # Adding 1.5 * 2**23 rounds to an integer, which is then in the low bits.
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    # ln 2 in two parts, the first with few bits: n times it is exact.
    r = x - n * np.float32(0.693145751953125) - n * np.float32(1.42860677e-06)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * _as_float(np.uint32((_as_bits(shifted) + np.uint32(127)) << np.uint32(23)))


@inlined
def from_bf16(bits: int) -> float:
    """uint16 bits of a bf16 to float32."""
    return _as_float(np.uint32(bits) << np.uint32(16))


@inlined
def to_bf16(value: float) -> int:
    """float32 to the uint16 bits of the nearest bf16, ties to even; NaN stays NaN."""
    bits = _as_bits(value)
    nearest = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    chosen = nearest if value == value else np.uint32(bits | np.uint32(0x400000))
    return np.uint16(chosen >> np.uint32(16))


@inlined
def row_at(address: int, count: int) -> Any:
    """The row of `count` elements at an address, for `get` and `put`."""
    return halves(address, count), floats(address, count)


@inlined
def get(row: Any, i: int, kind: int) -> float:
    """Element i of a row of bf16 or fp32, as float32."""
    return from_bf16(row[0][i]) if kind == BF16 else row[1][i]


@inlined
def put(row: Any, i: int, value: float, kind: int) -> None:
    """Write element i of a row, rounded."""
    if kind == BF16:
        row[0][i] = to_bf16(value)
    else:
        row[1][i] = value


@inlined
def rounded(value: float, kind: int) -> float:
    """A float32 as it would be read back after `put`."""
    return from_bf16(to_bf16(value)) if kind == BF16 else value


@inlined
def float_of(bits: int) -> float:
    """The float32 whose bits lie in an int64, as `float_bits` makes it."""
    return _as_float(np.uint32(bits))


@inlined
def align(address: int) -> int:
    """The next address that is a multiple of a cache line of 64 bytes."""
    return (address + 63) & ~63


def float_bits(value: float) -> int:
    """The bits of a float32, to be passed in a block."""
    return int(np.float32(value).view(np.uint32))
