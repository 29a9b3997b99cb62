"""Vector code for the CPU kernels: typed LLVM vectors as numba intrinsics.

LLVM lowers the vectors to what the machine has (AVX-512, AVX2, NEON). Addresses are int64. A float row of
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
_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FEATURES = llvm.get_host_cpu_features()
WIDEST = 16 if _FEATURES.get("avx512f") else 8  # floats in a vector
_CACHE_LINE = 64
AHEAD = 16  # tokens: how far before its use a key is fetched into the cache
_ACCUMULATORS = 16 if WIDEST == 16 else 12  # of 32 and 16 vector registers


def width(dim: int) -> int:
    """W for rows of `dim` elements: the largest power of two that divides half of them."""
    lanes = WIDEST
    while (dim // 2) % lanes:
        lanes //= 2
    return lanes


def token_block(group: int, dim: int) -> int:
    """Tokens whose scores with `group` queries are summed together, a power of two."""
    block = 1
    while block * 2 * group <= width(dim):
        block *= 2
    return block


class _Emitter:
    """Writes vectors of one width and kind of memory into a function."""

    def __init__(self, builder: ir.IRBuilder, dim: int, kind: int) -> None:
        self.builder, self.kind = builder, kind
        self.width = width(dim)
        self.pairs = dim // 2 // self.width
        self.floats = ir.VectorType(_FLOAT, self.width)
        self.words = ir.VectorType(_I32, self.width)
        self.pair_bytes = self.width * (8 if kind == FP32 else 4)

    def pointer(self, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
        if offset:
            address = self.builder.add(address, _I64(offset))
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: ir.Value, kind: ir.Type, offset: int = 0) -> ir.Value:
        return self.builder.load(self.pointer(address, kind, offset), align=4 if self.kind == FP32 else 2)

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
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

    def rounded(self, value: ir.Value) -> ir.Value:
        """fp32 as bits whose upper half is the nearest bf16; NaN stays NaN."""
        builder = self.builder
        bits = builder.bitcast(value, self.words)
        odd = builder.and_(builder.lshr(bits, self.splat_word(16)), self.splat_word(1))
        nearest = builder.add(bits, builder.add(odd, self.splat_word(0x7FFF)))
        quiet = builder.or_(bits, self.splat_word(0x400000))
        return builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest)

    def splat_word(self, value: int) -> ir.Constant:
        return ir.Constant(self.words, [value] * self.width)

    def zeros(self) -> ir.Constant:
        return ir.Constant(self.floats, [0.0] * self.width)

    def splat(self, scalar: ir.Value) -> ir.Value:
        vector = self.builder.insert_element(ir.Constant(self.floats, ir.Undefined), scalar, _I32(0))
        return self.builder.shuffle_vector(vector, vector, ir.Constant(self.words, [0] * self.width))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
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
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        for at in range(0, num_bytes, _CACHE_LINE):
            pointer = self.pointer(address, ir.IntType(8), at)
            self.builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
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


def _literal(kind: types.Type) -> int:
    return int(kind.literal_value)


@intrinsic(prefer_literal=True)
def load_row(typingctx: Any, source: Any, target: Any, scale: Any, dim: Any, kind: Any) -> Any:
    """Read the row of `dim` at `source`, times `scale` (float32); write fp32 vectors to `target`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_at, target_at, factor = args[:3]
        emit = _Emitter(builder, _literal(dim), _literal(kind))
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
        emit = _Emitter(builder, _literal(dim), _literal(kind))
        factors = emit.splat(factor)
        for pair in range(emit.pairs):
            at = 2 * pair * 4 * emit.width
            low = emit.load(source_at, emit.floats, at)
            high = emit.load(source_at, emit.floats, at + 4 * emit.width)
            emit.store_pair(builder.fmul(low, factors), builder.fmul(high, factors), target_at, pair)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, dim, kind), codegen


@intrinsic(prefer_literal=True)
def tile_scores(
    typingctx: Any,
    queries: Any,
    keys: Any,
    values: Any,
    offsets: Any,
    num_blocks: Any,
    scores: Any,
    row_bytes: Any,
    largest: Any,
    group: Any,
    dim: Any,
    kind: Any,
) -> Any:
    """Products of `group` queries with the keys of num_blocks * token_block tokens.

    queries: `group` rows as of `load_row`, one after another. keys + offsets[t]: key t, for AHEAD more tokens
    than are computed; values + offsets[t]: its value, which is fetched into the cache. scores + g *
    row_bytes: the products of query g. largest: `group * token_block` floats; every run of token_block of them
    holds the maxima of one query over its tokens.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        queries_at, keys_at, values_at, offsets_at, blocks, scores_at, stride, largest_at = args[:8]
        heads = _literal(group)
        emit = _Emitter(builder, _literal(dim), _literal(kind))
        block = token_block(heads, _literal(dim))
        query_bytes = 4 * _literal(dim)
        query = [
            [
                emit.load(queries_at, emit.floats, g * query_bytes + i * 4 * emit.width)
                for i in range(2 * emit.pairs)
            ]
            for g in range(heads)
        ]
        part = min(
            emit.width, _power_of_two(heads * block)
        )  # sums at a time: those of `part // block` queries
        tops = [cgutils.alloca_once(builder, ir.VectorType(_FLOAT, block)) for _ in range(heads)]
        for top in tops:
            builder.store(ir.Constant(ir.VectorType(_FLOAT, block), [float("-inf")] * block), top)
        with cgutils.for_range(builder, blocks) as loop:
            at = builder.mul(loop.index, _I64(block))
            first = builder.add(offsets_at, builder.shl(at, _I64(3)))
            key = [builder.add(keys_at, emit.load(first, _I64, 8 * t)) for t in range(block)]
            for t in range(block):
                ahead = builder.add(keys_at, emit.load(first, _I64, 8 * (t + AHEAD)))
                emit.prefetch(ahead, emit.pairs * emit.pair_bytes)
                value = builder.add(values_at, emit.load(first, _I64, 8 * t))
                emit.prefetch(value, emit.pairs * emit.pair_bytes)
            sums = [[emit.zeros()] * block for _ in range(heads)]
            for pair in range(emit.pairs):
                for t in range(block):
                    for i, vector in enumerate(emit.load_pair(key[t], pair)):
                        for g in range(heads):
                            sums[g][t] = emit.fma(query[g][2 * pair + i], vector, sums[g][t])
            flat = [vector for head in sums for vector in head]
            here = builder.add(scores_at, builder.shl(at, _I64(2)))
            for start in range(0, len(flat), part):
                total = emit.sums(flat[start : start + part])
                for i in range(0, min(part, len(flat) - start), block):
                    g = (start + i) // block
                    values = emit.shuffle(total, total, list(range(i, i + block)))
                    emit.store(values, builder.add(here, builder.mul(stride, _I64(g))))
                    builder.store(emit.maximum(builder.load(tops[g]), values), tops[g])
        for g, top in enumerate(tops):
            emit.store(builder.load(top), largest_at, 4 * g * block)
        return context.get_dummy_value()

    address, count = types.int64, types.int64
    signature = types.void(
        address, address, address, address, count, address, types.int64, address, group, dim, kind
    )
    return signature, codegen


@intrinsic(prefer_literal=True)
def tile_values(
    typingctx: Any,
    values: Any,
    offsets: Any,
    num_tokens: Any,
    weights: Any,
    row_bytes: Any,
    factors: Any,
    sums: Any,
    group: Any,
    dim: Any,
    kind: Any,
) -> Any:
    """sums[g] = sums[g] * factors[g] + the values of num_tokens tokens, weighted.

    values + offsets[t]: value t. weights + g * row_bytes: the weights of query g. sums: `group` rows of fp32
    vectors, as `store_row` takes them.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values_at, offsets_at, count, weights_at, stride, factors_at, sums_at = args[:7]
        heads = _literal(group)
        emit = _Emitter(builder, _literal(dim), _literal(kind))
        row = 4 * _literal(dim)
        weight_rows = [builder.add(weights_at, builder.mul(stride, _I64(g))) for g in range(heads)]
        scale = [emit.splat(emit.load(factors_at, _FLOAT, 4 * g)) for g in range(heads)]
        at_once = max(1, _ACCUMULATORS // (2 * heads))
        for start in range(0, emit.pairs, at_once):
            pairs = range(start, min(start + at_once, emit.pairs))
            places = [
                (g, pair, i, g * row + (2 * pair + i) * 4 * emit.width)
                for g in range(heads)
                for pair in pairs
                for i in range(2)
            ]
            total = {}
            for g, pair, i, place in places:
                total[g, pair, i] = cgutils.alloca_once(builder, emit.floats)
                builder.store(
                    builder.fmul(emit.load(sums_at, emit.floats, place), scale[g]), total[g, pair, i]
                )
            with cgutils.for_range(builder, count) as loop:
                value = builder.add(values_at, emit.load(_at(builder, offsets_at, loop.index, 3), _I64))
                weight = [emit.splat(emit.load(_at(builder, w, loop.index, 2), _FLOAT)) for w in weight_rows]
                for pair in pairs:
                    for i, vector in enumerate(emit.load_pair(value, pair)):
                        for g in range(heads):
                            held = total[g, pair, i]
                            builder.store(emit.fma(weight[g], vector, builder.load(held)), held)
            for g, pair, i, place in places:
                emit.store(builder.load(total[g, pair, i]), sums_at, place)
        return context.get_dummy_value()

    address, count = types.int64, types.int64
    signature = types.void(address, address, count, address, types.int64, address, address, group, dim, kind)
    return signature, codegen


def _at(builder: Any, address: Any, index: Any, shift: int) -> Any:
    return builder.add(address, builder.shl(index, _I64(shift)))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
