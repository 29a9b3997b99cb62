"""Vector code for the CPU kernels: typed LLVM vectors as numba intrinsics.

LLVM lowers the vectors to what the machine has (tested: AVX-512, AVX2). Addresses are int64. A float row of
`dim` elements is read in pairs of vectors `lo, hi` of W floats: of fp32 memory they are W elements and the W
after them; of bf16 memory the even and the odd ones of 2W elements, since a 32-bit lane holds two bf16 and
either becomes fp32 by one shift or mask. What goes in that way comes out that way (`store_row`).
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

FP32, BF16 = 0, 1  # kinds of memory
I32, I64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FEATURES = llvm.get_host_cpu_features()
WIDEST = 16 if _FEATURES.get("avx512f") else 8  # floats in a vector
_CACHE_LINE = 64


def width(dim: int) -> int:
    """W for rows of `dim` elements: the largest power of two that divides half of them."""
    lanes = WIDEST
    while (dim // 2) % lanes:
        lanes //= 2
    return lanes


class Emitter:
    """Writes vectors into a function, of the width and kind of memory of rows of `dim` elements."""

    def __init__(self, builder: ir.IRBuilder, dim: int, kind: int) -> None:
        self.builder, self.kind = builder, kind
        self.width = width(dim)
        self.pairs = dim // 2 // self.width
        self.floats = ir.VectorType(FLOAT, self.width)
        self.words = ir.VectorType(I32, self.width)
        self.pair_bytes = self.width * (8 if kind == FP32 else 4)

    def pointer(self, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
        """An address, moved by some bytes, as a pointer to `kind`."""
        if offset:
            address = self.builder.add(address, I64(offset))
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
        """Read a `kind` from memory that is aligned to its elements only."""
        return self.builder.load(self.pointer(address, kind, offset), align=4 if self.kind == FP32 else 2)

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
        """Write a value to memory that is aligned to its elements only."""
        self.builder.store(value, self.pointer(address, value.type, offset), align=2)

    def load_pair(self, address: ir.Value, pair: int) -> tuple[ir.Value, ir.Value]:
        """Pair number `pair` of the row at `address`, as fp32."""
        builder, at = self.builder, pair * self.pair_bytes
        if self.kind == FP32:
            return self.load(address, self.floats, at), self.load(address, self.floats, at + 4 * self.width)
        words = self.load(address, self.words, at)
        low = builder.shl(words, self.splat_word(16))
        high = builder.and_(words, self.splat_word(0xFFFF0000))
        return builder.bitcast(low, self.floats), builder.bitcast(high, self.floats)

    def store_pair(self, low: ir.Value, high: ir.Value, address: ir.Value, pair: int) -> None:
        """The reverse of `load_pair`, rounded to nearest even."""
        builder, at = self.builder, pair * self.pair_bytes
        if self.kind == FP32:
            self.store(low, address, at)
            self.store(high, address, at + 4 * self.width)
            return
        low = builder.lshr(self.rounded(low), self.splat_word(16))
        high = builder.and_(self.rounded(high), self.splat_word(0xFFFF0000))
        self.store(builder.or_(low, high), address, at)

    def load_plain(self, address: ir.Value, index: int) -> ir.Value:
        """W elements in order, from element `index` of the row at `address` on, as fp32."""
        builder = self.builder
        if self.kind == FP32:
            return self.load(address, self.floats, 4 * index)
        halves = self.load(address, ir.VectorType(ir.IntType(16), self.width), 2 * index)
        return builder.bitcast(
            builder.shl(builder.zext(halves, self.words), self.splat_word(16)), self.floats
        )

    def store_plain(self, value: ir.Value, address: ir.Value, index: int) -> None:
        """The reverse of `load_plain`, rounded to nearest even."""
        builder = self.builder
        if self.kind == FP32:
            self.store(value, address, 4 * index)
            return
        high = builder.lshr(self.rounded(value), self.splat_word(16))
        self.store(builder.trunc(high, ir.VectorType(ir.IntType(16), self.width)), address, 2 * index)

    def as_stored(self, value: ir.Value) -> ir.Value:
        """fp32 as it would be read back."""
        if self.kind == FP32:
            return value
        bits = self.builder.and_(self.rounded(value), self.splat_word(0xFFFF0000))
        return self.builder.bitcast(bits, self.floats)

    def rounded(self, value: ir.Value) -> ir.Value:
        """fp32 as bits whose upper half is the nearest bf16; NaN stays NaN."""
        builder = self.builder
        bits = builder.bitcast(value, self.words)
        odd = builder.and_(builder.lshr(bits, self.splat_word(16)), self.splat_word(1))
        nearest = builder.add(bits, builder.add(odd, self.splat_word(0x7FFF)))
        quiet = builder.or_(bits, self.splat_word(0x400000))
        return builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest)

    def splat_word(self, value: int) -> ir.Constant:
        """A 32-bit constant in every lane."""
        return ir.Constant(self.words, [value] * self.width)

    def zeros(self) -> ir.Constant:
        """0.0 in every lane."""
        return ir.Constant(self.floats, [0.0] * self.width)

    def splat(self, scalar: ir.Value) -> ir.Value:
        """A float in every lane."""
        vector = self.builder.insert_element(ir.Constant(self.floats, ir.Undefined), scalar, I32(0))
        return self.builder.shuffle_vector(vector, vector, ir.Constant(self.words, [0] * self.width))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, rounded once."""
        kind = a.type
        name = f"llvm.fma.v{self.width}f32"
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(kind, [kind, kind, kind]), name
        )
        return self.builder.call(function, [a, b, c])

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger of two vectors of any width, lane by lane; the other where one is NaN."""
        name = f"llvm.maxnum.v{a.type.count}f32"
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(a.type, [a.type, a.type]), name
        )
        return self.builder.call(function, [a, b])

    def prefetch(self, address: ir.Value, num_bytes: int) -> None:
        """Ask for the cache lines of a row."""
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        for at in range(0, num_bytes, _CACHE_LINE):
            pointer = self.pointer(address, ir.IntType(8), at)
            self.builder.call(function, [pointer, I32(0), I32(3), I32(1)])

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        """The lanes of a, then b, that are listed."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return self.builder.shuffle_vector(a, b, mask)

    def sums(self, vectors: list[ir.Value]) -> ir.Value:
        """The sum over the lanes of each of up to W vectors, as one vector of (a power of two) sums.

        A tree: two vectors of s segments become one of 2s segments of half the length.
        """
        count = 1
        while count < len(vectors):
            count *= 2
        level = vectors + [self.zeros()] * (count - len(vectors))
        lanes, segment = self.width, self.width
        while len(level) > 1:
            half = segment // 2
            first = [i for start in range(0, 2 * lanes, segment) for i in range(start, start + half)]
            second = [i + half for i in first]
            level = [
                self.builder.fadd(self.shuffle(a, b, first), self.shuffle(a, b, second))
                for a, b in zip(level[::2], level[1::2], strict=True)
            ]
            segment = half
        (total,) = level
        while segment > 1:
            half = segment // 2
            first = [i for start in range(0, lanes, segment) for i in range(start, start + half)]
            second = [i + half for i in first]
            total = self.builder.fadd(self.shuffle(total, total, first), self.shuffle(total, total, second))
            lanes, segment = lanes // 2, half
        return total


def literal(kind: types.Type) -> int:
    """The value of an argument that is a constant where the kernel is built."""
    return int(kind.literal_value)


@intrinsic(prefer_literal=True)
def load_row(typingctx: Any, source: Any, target: Any, scale: Any, dim: Any, kind: Any) -> Any:
    """Read the row of `dim` at `source`, times `scale` (float32); write fp32 vectors to `target`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_at, target_at, factor = args[:3]
        emit = Emitter(builder, literal(dim), literal(kind))
        factors = emit.splat(factor)
        for pair in range(emit.pairs):
            for i, vector in enumerate(emit.load_pair(source_at, pair)):
                emit.store(builder.fmul(vector, factors), target_at, (2 * pair + i) * 4 * emit.width)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, dim, kind), codegen


@intrinsic(prefer_literal=True)
def store_row(typingctx: Any, source: Any, target: Any, scale: Any, dim: Any, kind: Any) -> Any:
    """The reverse of `load_row`: fp32 vectors at `source`, times `scale`, become the row at `target`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_at, target_at, factor = args[:3]
        emit = Emitter(builder, literal(dim), literal(kind))
        factors = emit.splat(factor)
        for pair in range(emit.pairs):
            at = 2 * pair * 4 * emit.width
            low = emit.load(source_at, emit.floats, at)
            high = emit.load(source_at, emit.floats, at + 4 * emit.width)
            emit.store_pair(builder.fmul(low, factors), builder.fmul(high, factors), target_at, pair)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, dim, kind), codegen


@intrinsic(prefer_literal=True)
def copy_row(typingctx: Any, source: Any, target: Any, dim: Any, kind: Any) -> Any:
    """Copy a row of `dim` elements."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(builder, literal(dim), literal(kind))
        element = ir.IntType(16) if literal(kind) == BF16 else I32
        vector, size = ir.VectorType(element, emit.width), element.width // 8
        for i in range(0, literal(dim), emit.width):
            emit.store(emit.load(args[0], vector, i * size), args[1], i * size)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, dim, kind), codegen
