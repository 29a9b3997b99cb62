"""The Triton backend of `sample`: reduce blocks of the vocabulary, then choose a block and a token in it.

The first launch reads every logit once and keeps a maximum and a sum of exponentials a block. The second
picks the block from these and reads that one block again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phalanx.core.step import Finish
from phalanx.kernels.kv_indices_triton import device_guard
from phalanx.kernels.sample import CHUNK, GOLDEN, MIX1, MIX2, SEED_SALT

REDUCE_WARPS = 4
CHOOSE_WARPS = 4
_GOLDEN = tl.constexpr(GOLDEN)
_MIX1 = tl.constexpr(MIX1)
_MIX2 = tl.constexpr(MIX2)
_SEED_SALT = tl.constexpr(SEED_SALT)
_NONE = tl.constexpr(int(Finish.NONE))
_STOP = tl.constexpr(int(Finish.STOP))
_ERROR = tl.constexpr(int(Finish.ERROR))


@triton.jit
def mix64(x):
    """splitmix64's output function on uint64."""
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    return x ^ (x >> 31)


@triton.jit
def row_uniform(seed, generated):
    """A multiple of 2**-53 in [0, 1): a pure function of the seed and the number of generated tokens."""
    state = mix64(seed.to(tl.uint64) ^ _SEED_SALT) + (generated + 1).to(tl.uint64) * _GOLDEN
    return (mix64(state) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def load_block(logits, col, vocab):
    """A block of logits in fp32; NaN becomes +inf, so that a maximum shows it, and -inf pads."""
    x = tl.load(logits + col, mask=col < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def exponentials(x, peak, heat):
    """exp((x - peak) / heat) for x up to peak; 0 for all of a block that holds nothing but -inf."""
    # No inf - inf: a row with a peak of +inf ends in an error anyway.
    peak = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    return tl.exp2(tl.minimum(x - peak, 0.0) * (1.4426950408889634 / tl.maximum(heat, 1.0e-30)))


@triton.jit
def first_past(ends, weights, goal, index, SIZE: tl.constexpr):
    """The first index of some weight whose cumulative sum passes the goal; else the last of some weight.

    Never one of weight 0, also where rounding makes the sums fall or end before the goal.
    """
    found = tl.min(tl.where((ends > goal) & (weights > 0), index, SIZE), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    return tl.minimum(found, last)


@triton.jit(do_not_specialize=["temperature_stride"])
def reduce_blocks(
    logits, logits_stride, temperature, temperature_stride, rows, partial, vocab, CHUNK: tl.constexpr
):
    """Maximum and, for temperature rows, sum of exponentials of one block. Grid: (lanes, blocks).

    partial: [lanes, 2, blocks] fp32 out.
    """
    lane, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    x = load_block(logits + lane * logits_stride, block * CHUNK + tl.arange(0, CHUNK), vocab)
    peak = tl.max(x, 0)
    place = partial + lane * (2 * num_blocks) + block
    tl.store(place, peak)
    heat = tl.load(temperature + tl.load(rows + lane).to(tl.int64) * temperature_stride)
    if heat > 0:
        tl.store(place + num_blocks, tl.sum(exponentials(x, peak, heat), 0))


@triton.jit(
    do_not_specialize=["temperature_stride", "seeds_stride", "stop_stride", "offsets_stride", "num_blocks"]
)
def choose_tokens(
    logits,
    logits_stride,
    temperature,
    temperature_stride,
    seeds,
    seeds_stride,
    rows,
    stop_ids,
    stop_stride,
    counts,
    offsets,
    offsets_stride,
    partial,
    tokens,
    finish,
    vocab,
    num_blocks,
    HAS_OFFSETS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    STOPS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Pick one lane's block and token, and its finish flag. Grid: (lanes,)."""
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + lane).to(tl.int64)
    heat = tl.load(temperature + row * temperature_stride)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    place = partial + lane * (2 * num_blocks) + block
    peaks = tl.load(place, mask=inside, other=float("-inf"))
    peak = tl.max(peaks, 0)
    good = (peak > float("-inf")) & (peak < float("inf"))
    col = tl.arange(0, CHUNK)
    token = 0
    if good:
        if heat > 0:
            sums = tl.load(place + num_blocks, mask=inside, other=0.0)
            shares = (sums * exponentials(peaks, peak, heat)).to(tl.float64)
            ends = tl.cumsum(shares, 0)
            generated = tl.load(counts + lane).to(tl.int64)
            if HAS_OFFSETS:
                generated -= tl.load(offsets + row * offsets_stride).to(tl.int64)
            goal = row_uniform(tl.load(seeds + row * seeds_stride), generated) * tl.max(ends, 0)
            picked = first_past(ends, shares, goal, block, BLOCKS)
            before = tl.max(tl.where(block < picked, ends, 0.0), 0)
            x = load_block(logits + lane * logits_stride, picked * CHUNK + col, vocab)
            # Relative to the row's maximum here: the block's share again, up to rounding.
            weights = exponentials(x, peak, heat).to(tl.float64)
            token = picked * CHUNK + first_past(tl.cumsum(weights, 0), weights, goal - before, col, CHUNK)
        else:
            picked = tl.min(tl.where(peaks == peak, block, BLOCKS), 0)
            x = load_block(logits + lane * logits_stride, picked * CHUNK + col, vocab)
            token = picked * CHUNK + tl.min(tl.where(x == peak, col, CHUNK), 0)
    tl.store(tokens + lane, token)
    stop = tl.arange(0, STOPS_BLOCK)
    stops = tl.load(stop_ids + row * stop_stride + stop, mask=stop < NUM_STOPS, other=-1)
    hit = tl.max((stops == token).to(tl.int32), 0)
    flag = tl.where(good, tl.where(hit > 0, _STOP, _NONE), _ERROR)
    tl.store(finish + lane, flag.to(tl.uint8))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    rows: torch.Tensor,
    stop_ids: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    tokens: torch.Tensor,
    finish: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """`phalanx.kernels.sample` on checked arguments with at least one lane, in two launches."""
    bs, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, CHUNK)
    with device_guard(logits):
        reduce_blocks[(bs, num_blocks)](
            logits,
            logits.stride(0),
            temperature,
            temperature.stride(0),
            rows,
            workspace,
            vocab_size,
            CHUNK=CHUNK,
            num_warps=REDUCE_WARPS,
        )
        choose_tokens[(bs,)](
            logits,
            logits.stride(0),
            temperature,
            temperature.stride(0),
            seeds,
            seeds.stride(0),
            rows,
            stop_ids,
            stop_ids.stride(0),
            counts,
            offsets,
            0 if offsets is None else offsets.stride(0),
            workspace,
            tokens,
            finish,
            vocab_size,
            num_blocks,
            HAS_OFFSETS=offsets is not None,
            NUM_STOPS=stop_ids.shape[1],
            STOPS_BLOCK=triton.next_power_of_2(max(1, stop_ids.shape[1])),
            CHUNK=CHUNK,
            BLOCKS=triton.next_power_of_2(num_blocks),
            num_warps=CHOOSE_WARPS,
        )
