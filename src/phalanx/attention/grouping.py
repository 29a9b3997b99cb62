"""How rows of unequal length are grouped into padded rectangles. NumPy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

GROUP_COST = 1500  # what one more group costs in fixed work per layer, in padded cells; measured on two cores
QUERY_BLOCK = 256  # longest run of query tokens in one rectangle
MAX_CELLS = 4 << 20  # scores of one head in one rectangle; bounds memory


def query_blocks(starts: IntArray, lens: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut chunks into blocks of at most QUERY_BLOCK query tokens, so that each sees only its own past.

    starts, lens: [m], tokens before each chunk and in it. Returns, per block: its chunk, the position of its
    first token, its number of tokens, and the index of its first token among all chunk tokens.
    """
    counts = -(-lens // QUERY_BLOCK)
    chunk = np.repeat(np.arange(len(lens)), counts)
    nth = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = nth * QUERY_BLOCK
    size = np.minimum(lens[chunk] - offset, QUERY_BLOCK)
    first_token = np.cumsum(lens) - lens
    return chunk, starts[chunk] + offset, size, first_token[chunk] + offset


def group_by_length(query_lens: IntArray, kv_lens: IntArray) -> list[IntArray]:
    """Partition items so that each group, padded to its longest query and longest KV, wastes little.

    query_lens, kv_lens: [n], n >= 1. Returns disjoint index arrays that cover 0 .. n-1, shortest KV first.
    Splits greedily where a cut saves the most cells, while that is more than a group costs.
    """
    pending, groups = [np.argsort(kv_lens, kind="stable")], []
    while pending:
        items = pending.pop()
        cut = _best_cut(query_lens[items], kv_lens[items])
        if cut is None:
            groups.append(items)
        else:
            pending += [items[cut:], items[:cut]]
    return groups


def _best_cut(query_lens: IntArray, kv_lens: IntArray) -> int | None:
    """Where to cut items sorted by KV length, or None. Cost is counted in cells, queries times KV tokens."""
    n = len(kv_lens)
    if n == 1:
        return None
    count = np.arange(1, n)
    widest_before = np.maximum.accumulate(query_lens)
    widest_after = np.maximum.accumulate(query_lens[::-1])[::-1]
    before = count * widest_before[:-1] * kv_lens[:-1]
    after = (n - count) * widest_after[1:] * kv_lens[-1]
    whole = n * widest_before[-1] * kv_lens[-1]
    if whole > MAX_CELLS:
        return int(np.argmin(before + after)) + 1 if n > 2 else 1
    saving = whole - before - after
    best = int(np.argmax(saving))
    return best + 1 if saving[best] > GROUP_COST else None
