"""The two ways to choose a token: the largest logit, and one draw from a distribution.

Both work in two levels (blocks, then inside one block): one pass over the logits, no sort, no full cumulative
sum. Each row's result depends on that row alone, not on how many rows share the call.
"""

from __future__ import annotations

import torch

# Columns per block. Measured on 2 Zen 4 cores, 1024 rows of 49152 bf16 logits: amax over blocks of 512 takes
# 7 ms, of 128 14 ms; `max` with indices over the whole row 21 ms, `argmax` 90 ms.
_ARGMAX_BLOCK = 512
DRAW_BLOCK = 256


def argmax_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest index of each row's largest logit.

    Args:
        logits: [n, vocab], any float dtype.

    Returns:
        indices: [n] int64 (any index where the maximum is NaN).
        maxima: [n], dtype of logits; NaN if the row has a NaN anywhere.
    """
    vocab = logits.shape[1]
    whole = vocab // _ARGMAX_BLOCK * _ARGMAX_BLOCK
    parts = []
    if whole:
        parts.append(logits[:, :whole].unflatten(1, (-1, _ARGMAX_BLOCK)).amax(2))
    if whole < vocab:
        parts.append(logits[:, whole:].amax(1, keepdim=True))
    block_maxima = torch.cat(parts, 1)
    maxima, block = block_maxima.max(1, keepdim=True)
    lanes = torch.arange(min(_ARGMAX_BLOCK, vocab), device=logits.device)
    # In a short last block the clamp repeats the last column, which cannot win over itself at a lower lane.
    columns = (block * _ARGMAX_BLOCK + lanes).clamp_(max=vocab - 1)
    inside = logits.gather(1, columns).max(1).indices
    return columns.gather(1, inside[:, None]).squeeze(1), maxima.squeeze(1)


def draw_rows(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one index per row by inverting its cumulative distribution, in index order.

    The lowest index whose cumulative weight exceeds uniform * total. An index of weight 0 is never drawn.

    Args:
        weights: [n, width] fp32, contiguous, not negative, width a multiple of DRAW_BLOCK; need not sum to 1.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64; in range, but meaningless, for rows that hold NaN or only zeros.
    """
    blocks = weights.unflatten(1, (-1, DRAW_BLOCK))
    sums = blocks.sum(2).double()
    block, before, total = _invert(sums, uniforms)
    index = block[:, None, None].expand(-1, 1, DRAW_BLOCK)
    inside = blocks.gather(1, index).squeeze(1).double()
    # Rounding may put the rest a hair outside of the block's own cumulative sum: both ends are clamped.
    lane, _, _ = _invert(inside, None, rest=(uniforms * total - before).clamp_(min=0.0))
    return block * DRAW_BLOCK + lane


def _invert(
    weights: torch.Tensor, uniforms: torch.Tensor | None, rest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first column whose cumulative sum exceeds `rest` or uniform * total, sum before it, total)."""
    cumulative = weights.cumsum(1)
    total = cumulative[:, -1]
    if rest is None:
        assert uniforms is not None
        rest = uniforms * total
    column = (cumulative <= rest[:, None]).sum(1)
    last = (cumulative < total[:, None]).sum(1)  # the last column that adds something
    column = torch.minimum(column, last).clamp_(max=weights.shape[1] - 1)
    before = cumulative.gather(1, (column - 1).clamp(min=0)[:, None]).squeeze(1)
    return column, torch.where(column > 0, before, torch.zeros_like(before)), total
