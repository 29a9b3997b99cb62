"""The Triton backend of `sample`: reduce the vocabulary in chunks, then choose a block and a token in it.

The first launch reads every logit once and keeps a maximum a chunk and a sum of exponentials a block. The
second chooses from these, and reads again the one block (or, for argmax, the one chunk) that holds the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phalanx.core.step import Finish
from phalanx.kernels.kv_indices_triton import device_guard
from phalanx.kernels.sample import CHUNK, DRAW_BLOCK, GOLDEN, MIX1, MIX2, SEED_SALT, sums_start

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
def row_key(seed, generated):
    """One uint64 per seed and number of generated tokens; all randomness of the token comes from it."""
    return mix64(mix64(seed.to(tl.uint64) ^ _SEED_SALT) + (generated + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def fastest(weights, key, counter, index, SIZE: tl.constexpr):
    """The first index of the greatest weight / time; times are Exponential(1), in fp64, by (key, counter)."""
    bits = mix64(key + (counter + 1).to(tl.uint64) * _GOLDEN) >> 11
    speed = weights.to(tl.float64) / -tl.log((bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16)
    return tl.min(tl.where(speed == tl.max(speed, 0), index, SIZE), 0)


@triton.jit
def load_logits(logits, col, vocab):
    """Logits in fp32; NaN becomes +inf, so that a maximum shows it, and -inf pads."""
    x = tl.load(logits + col, mask=col < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def exponentials(x, peak, heat):
    """exp((x - peak) / heat) for x up to peak; 0 for all where peak is -inf."""
    # No inf - inf: a row with a peak of +inf ends in an error anyway.
    peak = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    return tl.exp2(tl.minimum(x - peak, 0.0) * (1.4426950408889634 / tl.maximum(heat, 1.0e-30)))


@triton.jit(do_not_specialize=["temperature_stride", "num_blocks"])
def reduce_chunks(
    logits,
    logits_stride,
    temperature,
    temperature_stride,
    rows,
    peaks,
    sums,
    vocab,
    num_blocks,
    CHUNK: tl.constexpr,
    DRAW_BLOCK: tl.constexpr,
):
    """Maximum of one chunk and, for temperature rows, its blocks' sums relative to it. Grid: (lanes, chunks).

    peaks: [lanes, chunks] fp32 out. sums: [lanes, num_blocks] fp32 out.
    """
    BLOCKS: tl.constexpr = CHUNK // DRAW_BLOCK
    lane, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    col = block[:, None] * DRAW_BLOCK + tl.arange(0, DRAW_BLOCK)[None, :]
    x = load_logits(logits + lane * logits_stride, col, vocab)
    peak = tl.max(tl.max(x, 1), 0)
    tl.store(peaks + lane * tl.num_programs(1) + chunk, peak)
    heat = tl.load(temperature + tl.load(rows + lane).to(tl.int64) * temperature_stride)
    if heat > 0:
        total = tl.sum(exponentials(x, peak, heat), 1)
        tl.store(sums + lane * num_blocks + block, total, mask=block < num_blocks)


@triton.jit(
    do_not_specialize=[
        "temperature_stride",
        "seeds_stride",
        "stop_stride",
        "offsets_stride",
        "num_blocks",
        "num_chunks",
    ]
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
    peaks,
    sums,
    tokens,
    finish,
    vocab,
    num_chunks,
    num_blocks,
    HAS_OFFSETS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    STOPS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    DRAW_BLOCK: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    BLOCKS_BLOCK: tl.constexpr,
):
    """Pick one lane's block and token, and its finish flag. Grid: (lanes,)."""
    lane = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + lane).to(tl.int64)
    heat = tl.load(temperature + row * temperature_stride)
    chunk = tl.arange(0, CHUNKS_BLOCK)
    chunk_peaks = tl.load(peaks + lane * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    peak = tl.max(chunk_peaks, 0)
    good = (peak > float("-inf")) & (peak < float("inf"))
    source = logits + lane * logits_stride
    token = 0
    if good:
        if heat > 0:
            generated = tl.load(counts + lane).to(tl.int64)
            if HAS_OFFSETS:
                generated -= tl.load(offsets + row * offsets_stride).to(tl.int64)
            key = row_key(tl.load(seeds + row * seeds_stride), generated)
            block = tl.arange(0, BLOCKS_BLOCK)
            inside = block < num_blocks
            own_peak = peaks + lane * num_chunks + block // (CHUNK // DRAW_BLOCK)
            scale = exponentials(tl.load(own_peak, mask=inside, other=float("-inf")), peak, heat)
            share = tl.load(sums + lane * num_blocks + block, mask=inside, other=0.0) * scale
            picked = fastest(share, key, block, block, BLOCKS_BLOCK)
            col = picked * DRAW_BLOCK + tl.arange(0, DRAW_BLOCK)
            # Relative to the chunk's maximum, as the sum was: a block with a share has a token with a weight.
            own_peak_value = tl.load(peaks + lane * num_chunks + picked // (CHUNK // DRAW_BLOCK))
            weight = exponentials(load_logits(source, col, vocab), own_peak_value, heat)
            token = fastest(weight, key, num_blocks + col, col, picked * DRAW_BLOCK + DRAW_BLOCK)
        else:
            first = tl.min(tl.where(chunk_peaks == peak, chunk, CHUNKS_BLOCK), 0) * CHUNK
            place = first + tl.arange(0, CHUNK)
            token = tl.min(tl.where(load_logits(source, place, vocab) == peak, place, first + CHUNK), 0)
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
    num_chunks, num_blocks = triton.cdiv(vocab_size, CHUNK), triton.cdiv(vocab_size, DRAW_BLOCK)
    peaks, sums = workspace, workspace[sums_start(bs, vocab_size) :]
    with device_guard(logits):
        reduce_chunks[(bs, num_chunks)](
            logits,
            logits.stride(0),
            temperature,
            temperature.stride(0),
            rows,
            peaks,
            sums,
            vocab_size,
            num_blocks,
            CHUNK=CHUNK,
            DRAW_BLOCK=DRAW_BLOCK,
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
            peaks,
            sums,
            tokens,
            finish,
            vocab_size,
            num_chunks,
            num_blocks,
            HAS_OFFSETS=offsets is not None,
            NUM_STOPS=stop_ids.shape[1],
            STOPS_BLOCK=triton.next_power_of_2(max(1, stop_ids.shape[1])),
            CHUNK=CHUNK,
            DRAW_BLOCK=DRAW_BLOCK,
            CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
            BLOCKS_BLOCK=triton.next_power_of_2(num_blocks),
            num_warps=CHOOSE_WARPS,
        )
