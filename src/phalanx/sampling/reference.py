"""One row at a time, in float64 and plain steps: what `Sampler` must do. Slow; for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from phalanx.core.sampling_params import SamplingParams
from phalanx.sampling.choose import DRAW_BLOCK
from phalanx.sampling.uniform import reference_exponentials

Float64 = npt.NDArray[np.float64]


def adjusted_logits(
    logits: Float64,
    params: SamplingParams,
    stop_ids: Sequence[int],
    prompt: Sequence[int],
    output: Sequence[int],
) -> Float64:
    """Raw logits [vocab] after penalties, bias and min_new_tokens."""
    x = np.array(logits, np.float64)
    for token in sorted({*prompt, *output}):
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
        count = list(output).count(token)
        x[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_new_tokens:
        for token in stop_ids:
            if 0 <= token < len(x):
                x[token] = -math.inf
    return x


def distribution(adjusted: Float64, params: SamplingParams) -> Float64:
    """Probabilities [vocab] to draw from, not renormalised after the filters. Not for greedy rows."""
    scaled = (adjusted - adjusted.max()) / params.temperature
    probs = np.exp(scaled)
    probs /= probs.sum()
    order = np.lexsort((np.arange(len(scaled)), -scaled))  # likeliest first, equal ones by token id
    rank = np.empty(len(scaled), np.int64)
    rank[order] = np.arange(len(scaled))
    likelier = (np.cumsum(probs[order]) - probs[order])[rank]  # mass of the tokens ranked above each one
    keep = probs >= params.min_p * probs.max()
    if params.top_k > 0:
        keep &= rank < params.top_k
    if params.top_p < 1:
        keep &= (likelier < params.top_p) | (rank == 0)
    return np.where(keep, probs, 0.0)


def reference_sample(
    logits: Float64,
    params: SamplingParams,
    *,
    stop_ids: Sequence[int] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> int | None:
    """The token of one row with raw logits [vocab] after these tokens; None if the logits are not finite.

    `params.sampling_seed` must be set unless the row is greedy.
    """
    if np.isnan(logits).any() or not math.isfinite(logits.max()):
        return None
    adjusted = adjusted_logits(logits, params, stop_ids, prompt, output)
    if not math.isfinite(adjusted.max()):
        return None
    if params.is_greedy:
        return int(np.argmax(adjusted))
    assert params.sampling_seed is not None
    heats = race(distribution(adjusted, params), params.sampling_seed, len(output))
    return int(np.argmax(heats[0])) * DRAW_BLOCK + int(np.argmax(heats[1][np.argmax(heats[0])]))


def race(probs: Float64, seed: int, num_generated: int) -> tuple[Float64, Float64]:
    """Speeds of `choose.draw_rows`: of blocks [b], and of the indices of each block [b, DRAW_BLOCK].

    The fastest block wins, then its fastest index.
    """
    num_blocks = -(-len(probs) // DRAW_BLOCK)
    blocks = np.zeros(num_blocks * DRAW_BLOCK)
    blocks[: len(probs)] = probs
    noise = reference_exponentials(seed, num_generated, np.arange(num_blocks + len(blocks)))
    inside = (blocks / noise[num_blocks:]).reshape(num_blocks, DRAW_BLOCK)
    return blocks.reshape(num_blocks, DRAW_BLOCK).sum(1) / noise[:num_blocks], inside
