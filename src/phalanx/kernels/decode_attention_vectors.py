"""The inner loops of decode attention on the CPU: scores of a tile of tokens, and weighted values."""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from phalanx.kernels.cpu_vectors import FLOAT, I64, WIDEST, Emitter, literal, width

AHEAD = 16  # tokens: how far before its use a key is fetched into the cache
_ACCUMULATORS = 16 if WIDEST == 16 else 12  # of 32 and 16 vector registers


def token_block(group: int, dim: int) -> int:
    """Tokens whose scores with `group` queries are summed together, a power of two."""
    block = 1
    while block * 2 * group <= width(dim):
        block *= 2
    return block


@intrinsic(prefer_literal=True)
def block_scores(
    typingctx: Any,
    queries: Any,
    keys: Any,
    values: Any,
    offsets: Any,
    scores: Any,
    row_bytes: Any,
    largest: Any,
    group: Any,
    dim: Any,
    kind: Any,
) -> Any:
    """Products of `group` queries with the keys of token_block tokens.

    queries: `group` rows as of `load_row`, one after another. keys + offsets[t]: key t. The keys AHEAD, and
    the values of these tokens, are fetched into the cache. scores + g * row_bytes: where the products of
    query g go. largest: token_block floats of each query, the maxima so far.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        queries_at, keys_at, values_at, offsets_at, scores_at, stride, largest_at = args[:7]
        heads = literal(group)
        emit = Emitter(builder, literal(dim), literal(kind))
        block = token_block(heads, literal(dim))
        for t in range(block):
            ahead = builder.add(keys_at, emit.load(offsets_at, I64, 8 * (t + AHEAD)))
            emit.prefetch(ahead, emit.pairs * emit.pair_bytes)
            value = builder.add(values_at, emit.load(offsets_at, I64, 8 * t))
            emit.prefetch(value, emit.pairs * emit.pair_bytes)
        key = [builder.add(keys_at, emit.load(offsets_at, I64, 8 * t)) for t in range(block)]
        sums = [[emit.zeros()] * block for _ in range(heads)]
        for pair in range(emit.pairs):
            query = [
                [
                    emit.load(queries_at, emit.floats, 4 * (g * literal(dim) + (2 * pair + i) * emit.width))
                    for i in range(2)
                ]
                for g in range(heads)
            ]
            for t in range(block):
                for i, vector in enumerate(emit.load_pair(key[t], pair)):
                    for g in range(heads):
                        sums[g][t] = emit.fma(query[g][i], vector, sums[g][t])
        flat = [vector for head in sums for vector in head]
        at_once = min(emit.width, _power_of_two(heads * block))
        for start in range(0, len(flat), at_once):
            total = emit.sums(flat[start : start + at_once])
            for i in range(0, min(at_once, len(flat) - start), block):
                g = (start + i) // block
                found = emit.shuffle(total, total, list(range(i, i + block)))
                emit.store(found, builder.add(scores_at, builder.mul(stride, I64(g))))
                top = emit.load(largest_at, found.type, 4 * g * block)
                emit.store(emit.maximum(top, found), largest_at, 4 * g * block)
        return context.get_dummy_value()

    address = types.int64
    signature = types.void(
        address, address, address, address, address, types.int64, address, group, dim, kind
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
        heads = literal(group)
        emit = Emitter(builder, literal(dim), literal(kind))
        row = 4 * literal(dim)
        weight_rows = [builder.add(weights_at, builder.mul(stride, I64(g))) for g in range(heads)]
        scale = [emit.splat(emit.load(factors_at, FLOAT, 4 * g)) for g in range(heads)]
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
                value = builder.add(values_at, emit.load(_at(builder, offsets_at, loop.index, 3), I64))
                weight = [emit.splat(emit.load(_at(builder, w, loop.index, 2), FLOAT)) for w in weight_rows]
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
    return builder.add(address, builder.shl(index, I64(shift)))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
