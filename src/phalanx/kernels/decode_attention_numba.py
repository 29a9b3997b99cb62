"""Decode attention on the CPU: each K and V row is read once, where it lies in the pool.

A row of the batch is walked in tiles of tokens with a running maximum (online softmax, fp32). What a row
gets depends on its own length alone: the batch and the number of threads decide only who computes it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.kernels.cpu_jit import (
    KINDS,
    align,
    compiled,
    exp,
    fetch_add,
    float_bits,
    float_of,
    floats,
    inlined,
    inlined_sums,
    int32s,
    int64s,
)
from phalanx.kernels.cpu_parallel import HEADER, Kernel
from phalanx.kernels.cpu_vectors import load_row, store_row
from phalanx.kernels.decode_attention_vectors import AHEAD, block_scores, tile_values, token_block

TILE = 64  # tokens, a multiple of every token block
MAX_GROUP = 8  # queries that share one read of K and V
_CHUNKS_PER_THREAD = 4
_LEAST_WORK = 512  # tokens times KV heads in a chunk, some 10 us: as long as another thread needs to wake
_ARGUMENTS = 21


@inlined
def _tile_offsets(table, start, count, page_size, slot_bytes, offsets):
    """Byte offsets of the row's tokens start .. start+count-1; the last one again to the end of offsets."""
    within = start % page_size
    base = np.int64(table[start - within])
    for i in range(count):
        if within == page_size:
            within = 0
            base = np.int64(table[start + i])
        offsets[i] = (base + within) * slot_bytes
        within += 1
    for i in range(count, len(offsets)):
        offsets[i] = offsets[count - 1]


@inlined_sums
def _exponentials(scores, count, largest):
    """Replace scores by exp(score - largest); returns their sum."""
    total = np.float32(0.0)
    for i in range(count):
        weight = exp(scores[i] - largest)
        scores[i] = weight
        total += weight
    return total


def _build(group: int, dim: int, kind: int, block: int):
    @compiled(group, dim, kind)
    def run(address):
        a = int64s(address, HEADER + _ARGUMENTS)
        bounds = int32s(a[2], a[1] + 1)
        parts, num_blocks, blocks_per_kv_head = a[3], a[4], a[5]
        q, q_token_bytes, q_head_bytes, element_bytes = a[6], a[7], a[8], a[9]
        k, v, slot_bytes = a[10], a[11], a[12]
        table, table_stride, page_size = a[13], a[14], a[15]
        num_rows = a[16]
        rows, lens = int64s(a[17], num_rows), int32s(a[18], num_rows)
        out, out_token_bytes, out_head_bytes, scale = a[19], a[20], a[21], float_of(a[22])
        row_floats = group * dim  # of the queries that share a read
        held = num_blocks * row_floats
        scratch = np.empty(2 * held + num_blocks * group * (TILE + block + 2) + group + 16, np.float32)
        queries = align(scratch.ctypes.data)
        sums = queries + 4 * held
        scores = sums + 4 * held
        tops = scores + 4 * num_blocks * group * TILE
        state = tops + 4 * num_blocks * group * block
        top, total = (
            floats(state, num_blocks * group),
            floats(state + 4 * num_blocks * group, num_blocks * group),
        )
        factors_at = state + 8 * num_blocks * group
        factors, found, accumulated = (
            floats(factors_at, group),
            floats(tops, num_blocks * group * block),
            floats(sums, held),
        )
        offsets = np.zeros(TILE + AHEAD, np.int64)
        offsets_at = offsets.ctypes.data
        while True:
            chunk = fetch_add(address, 1)
            if chunk >= a[1]:
                break
            for task in range(bounds[chunk], bounds[chunk + 1]):
                row, part = task // parts, task % parts
                first, end = part * num_blocks // parts, (part + 1) * num_blocks // parts
                for i in range(first * group, end * group):
                    load_row(
                        q + row * q_token_bytes + i * q_head_bytes, queries + 4 * i * dim, scale, dim, kind
                    )
                    top[i] = -np.inf
                    total[i] = 0.0
                accumulated[first * row_floats : end * row_floats] = 0.0
                length = np.int64(lens[row])
                row_table = int32s(table + 4 * rows[row] * table_stride, length)
                for start in range(0, length, TILE):
                    count = min(TILE, length - start)
                    _tile_offsets(row_table, start, count, page_size, slot_bytes, offsets)
                    found[first * group * block : end * group * block] = -np.inf
                    # Token by token, as the pool lies in memory; a head at a time would skip through it.
                    for at in range(0, count, block):
                        for b in range(first, end):
                            head_at = b // blocks_per_kv_head * dim * element_bytes
                            block_scores(
                                queries + 4 * b * row_floats,
                                k + head_at,
                                v + head_at,
                                offsets_at + 8 * at,
                                scores + 4 * (b * group * TILE + at),
                                4 * TILE,
                                tops + 4 * b * group * block,
                                group,
                                dim,
                                kind,
                            )
                    for b in range(first, end):
                        head_at = b // blocks_per_kv_head * dim * element_bytes
                        for g in range(group):
                            i = b * group + g
                            new = top[i]
                            for j in range(i * block, (i + 1) * block):
                                new = max(new, found[j])
                            factors[g] = exp(top[i] - new)
                            line = floats(scores + 4 * i * TILE, TILE)
                            total[i] = total[i] * factors[g] + _exponentials(line, count, new)
                            top[i] = new
                        tile_values(
                            v + head_at,
                            offsets_at,
                            count,
                            scores + 4 * b * group * TILE,
                            4 * TILE,
                            factors_at,
                            sums + 4 * b * row_floats,
                            group,
                            dim,
                            kind,
                        )
                for i in range(first * group, end * group):
                    inverse = np.float32(1.0) / total[i] if length > 0 else np.float32(0.0)
                    store_row(
                        sums + 4 * i * dim,
                        out + row * out_token_bytes + i * out_head_bytes,
                        inverse,
                        dim,
                        kind,
                    )
        scratch[0] = 0.0  # numba frees an array after its last use, whoever holds its address

    return run


@functools.cache
def kernel(group: int, dim: int, kind: int) -> Kernel:
    """Compiled for `shared_group` queries of head_dim `dim` in one kind of memory."""
    return Kernel(_build(group, dim, kind, token_block(group, dim)).address, _ARGUMENTS)


def shared_group(group: int) -> int:
    """How many of the `group` queries of a KV head share one read: its largest divisor up to MAX_GROUP."""
    return max(size for size in range(1, MAX_GROUP + 1) if group % size == 0)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a batch is cut for `attend`, the same for all layers.

    bounds: [chunks + 1] int32, the first task of each chunk. parts: tasks of a row, which share its heads.
    """

    bounds: torch.Tensor
    parts: int


def plan(seq_lens: torch.Tensor, num_kv_heads: int) -> DecodePlan:
    """Cut rows into chunks of about equal numbers of tokens.

    seq_lens: [bs] int32 on the CPU, bs >= 1.
    """
    num_rows, threads = len(seq_lens), torch.get_num_threads()
    lens = seq_lens.numpy()
    work = int(lens.sum(dtype=np.int64)) * num_kv_heads
    chunks = 1 if threads == 1 else min(_CHUNKS_PER_THREAD * threads, max(1, work // _LEAST_WORK))
    if chunks == 1:
        return DecodePlan(torch.tensor([0, num_rows], dtype=torch.int32), 1)
    parts = 1 if num_rows >= chunks else num_kv_heads
    done = np.cumsum(np.repeat(lens, parts), dtype=np.int64)
    inner = np.searchsorted(done, done[-1] * np.arange(1, chunks) // chunks)
    bounds = np.unique(np.concatenate(([0], inner, [num_rows * parts]))).astype(np.int32)
    return DecodePlan(torch.from_numpy(bounds), parts)


def attend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    scale: float,
    out: torch.Tensor,
    cut: DecodePlan,
) -> None:
    """`kernels.decode_attention` of checked arguments. rows: int64, seq_lens: int32, cut: their `plan`."""
    num_rows, num_heads, dim = q.shape
    _, num_kv_heads, _ = k_pool.shape
    group = shared_group(num_heads // num_kv_heads)
    size = q.element_size()
    kernel(group, dim, KINDS[q.dtype])(
        len(cut.bounds) - 1,
        cut.bounds.data_ptr(),
        cut.parts,
        num_heads // group,
        num_heads // num_kv_heads // group,
        q.data_ptr(),
        q.stride(0) * size,
        q.stride(1) * size,
        size,
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        num_kv_heads * dim * size,
        table.data_ptr(),
        table.stride(0),
        page_size,
        num_rows,
        rows.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
        out.stride(0) * size,
        out.stride(1) * size,
        float_bits(scale),
    )
