"""A plan's arrays as the device reads them, alone or padded to the fixed sizes of a captured step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.core.step import Int32, Int64, LogprobPlan, PrefillChunks, StepPlan
from phalanx.engine.buckets import MixedShape

HEADER = 4  # entries of the decode inputs before the lanes, so that these lie at a multiple of 16 bytes
Arrays = dict[str, Int32 | Int64]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Host arrays with one entry per prompt token of a step. rows: [t] int32; positions: [t] int64."""

    rows: Int32
    positions: Int64

    @classmethod
    def of(cls, prefill: PrefillChunks) -> PromptTokens:
        """Expand chunks to tokens."""
        ends = np.cumsum(prefill.lens, dtype=np.int64)
        shift = np.repeat(prefill.starts - (ends - prefill.lens), prefill.lens)
        return cls(
            rows=np.repeat(prefill.rows, prefill.lens),
            positions=np.arange(len(shift), dtype=np.int64) + shift,
        )


def decode_inputs(rows: Int32, bucket: int) -> Int32:
    """[4 + bucket] int32: the number of live lanes, three unused, the row of each lane (0: padding)."""
    lanes = np.zeros(HEADER + bucket, np.int32)
    lanes[0] = len(rows)
    lanes[HEADER : HEADER + len(rows)] = rows
    return lanes


def plan_arrays(plan: StepPlan, num_lanes: int) -> Arrays:
    """What the model and the sampler need of a plan, but for the decode rows, which take `num_lanes` tokens.

    sample_rows: [s] int64. num_generated: [s] int32. logits_index: [s + prompt targets] int64. With prompt
    chunks also input_ids, positions, slots, token_rows: [t] int64; chunk_rows: [m] int64; chunk_starts,
    chunk_ends: [m] int32; chunk_indptr: [m+1] int32.
    """
    arrays: Arrays = {
        "sample_rows": plan.sample_rows.astype(np.int64),
        "num_generated": plan.num_generated,
        "logits_index": _logits_index(plan, num_lanes),
    }
    prefill = plan.prefill
    if not prefill.count:
        return arrays
    tokens = PromptTokens.of(prefill)
    indptr = np.zeros(prefill.count + 1, np.int32)
    np.cumsum(prefill.lens, out=indptr[1:])
    return arrays | {
        "input_ids": prefill.input_ids.astype(np.int64),
        "positions": tokens.positions,
        "slots": prefill.slots.astype(np.int64),
        "token_rows": tokens.rows.astype(np.int64),
        "chunk_rows": prefill.rows.astype(np.int64),
        "chunk_starts": prefill.starts,
        "chunk_ends": prefill.starts + prefill.lens,
        "chunk_indptr": indptr,
    }


def padded(arrays: Arrays, shape: MixedShape) -> Arrays:
    """`plan_arrays` at the sizes of a captured step.

    Padding tokens are token 0 at position 0 of row 0, in slot 0; padding chunks are empty; padding samples
    are those of the first token, for row 0.
    """
    sizes = dict.fromkeys(("sample_rows", "num_generated", "logits_index"), shape.lanes + shape.chunks)
    sizes |= dict.fromkeys(("input_ids", "positions", "slots", "token_rows"), shape.tokens)
    sizes |= dict.fromkeys(("chunk_rows", "chunk_starts", "chunk_ends"), shape.chunks)
    sizes["chunk_indptr"] = shape.chunks + 1
    found: Arrays = {}
    for name, array in arrays.items():
        out = found[name] = np.zeros(sizes[name], array.dtype)
        out[: len(array)] = array
    found["chunk_indptr"][len(arrays["chunk_indptr"]) :] = arrays["chunk_indptr"][-1]
    return found


def _logits_index(plan: StepPlan, num_lanes: int) -> Int64:
    """[s + prompt targets] int64: tokens of the step whose logits are wanted."""
    ends = num_lanes + np.cumsum(plan.prefill.lens, dtype=np.int64)
    parts = [np.arange(len(plan.decode_rows), dtype=np.int64), ends[plan.prefill.is_last] - 1]
    if plan.logprobs is not None:
        parts.append(_before_targets(plan.logprobs, plan.prefill, ends))
    return np.concatenate(parts)


def _before_targets(logprobs: LogprobPlan, prefill: PrefillChunks, ends: Int64) -> Int64:
    """Index in the step of the token before each prompt target."""
    chunks = logprobs.prompt_chunk
    counts = np.diff(logprobs.prompt_indptr)
    first = (ends - prefill.lens)[chunks] + logprobs.prompt_start - 1 - prefill.starts[chunks]
    offset = np.arange(len(logprobs.prompt_targets)) - np.repeat(logprobs.prompt_indptr[:-1], counts)
    return np.asarray(np.repeat(first, counts) + offset, np.int64)
