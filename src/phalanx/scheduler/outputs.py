"""From what a step produced to what its streams are told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.core.errors import EngineError
from phalanx.core.step import (
    Bool,
    Finish,
    Int32,
    Int64,
    PrefillChunks,
    StepOutputs,
    StepResult,
    TokenLogprobs,
    UInt8,
)
from phalanx.scheduler.logprobs import reindex

# Plain integers: NumPy compares a uint8 array with an IntEnum ten times more slowly.
NONE, STOP, LENGTH, ERROR = int(Finish.NONE), int(Finish.STOP), int(Finish.LENGTH), int(Finish.ERROR)
NOT_FINITE = "the model's logits were not finite for this request"


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What `apply` needs to know of a planned step.

    Attributes:
        step_id: of the plan.
        sample_rows: [s] int64, as in the plan (int64: it indexes NumPy columns).
        num_decode: the first of them that decode.
        prefill: the plan's chunks.
        final_index: [f] int64, positions in sample_rows whose row has no token after this one.
        no_token_index: [z] int64, those of them that asked for no token at all.
    """

    step_id: int
    sample_rows: Int64
    num_decode: int
    prefill: PrefillChunks
    final_index: Int64
    no_token_index: Int64

    def all_rows(self) -> Int64:
        """Every row that the step touches: those that sample, then those of chunks that do not."""
        if not self.prefill.count:
            return self.sample_rows
        return np.concatenate((self.sample_rows, self.prefill.rows[~self.prefill.is_last]))


def check_result(step: LaunchedStep, result: StepResult) -> None:
    """Raise EngineError unless the result is of this step and has its shape."""
    size = len(step.sample_rows)
    if result.step_id != step.step_id:
        raise EngineError(f"result of step {result.step_id} where step {step.step_id} was awaited")
    if result.tokens.shape != (size,) or result.finish.shape != (size,):
        raise EngineError(
            f"step {step.step_id} sampled {size} rows, its result has {result.tokens.shape} tokens and "
            f"{result.finish.shape} finish flags"
        )


def settle(step: LaunchedStep, result: StepResult) -> tuple[Int32, UInt8, Int64]:
    """What the sampled rows come to, LENGTH included.

    Returns:
        (tokens: [s] int32, a copy, -1 where there is none; finish: [s] uint8, a copy; ended: [e] int64, the
        positions where finish is not NONE).
    """
    tokens = result.tokens.astype(np.int32)
    finish = result.finish.astype(np.uint8)
    final, empty = step.final_index, step.no_token_index
    finish[final[finish[final] == NONE]] = LENGTH
    if len(empty):
        tokens[empty] = -1
        finish[empty[finish[empty] == STOP]] = LENGTH
    ended = np.flatnonzero(finish != NONE)
    tokens[ended[finish[ended] == ERROR]] = -1
    return tokens, finish, ended


def build_outputs(
    step: LaunchedStep,
    result: StepResult,
    *,
    tokens: Int32,
    finish: UInt8,
    live: Bool,
    stream_ids: Int64,
    live_chunks: Bool,
    chunk_stream_ids: Int64,
) -> StepOutputs:
    """One entry per live sampled row, then one per live unfinished prompt that has log-probabilities.

    Args:
        step: the step.
        result: what it produced.
        tokens: [s] int32, from `settle`.
        finish: [s] uint8, from `settle`.
        live: [s] bool, sampled rows whose stream has not ended before.
        stream_ids: [s] int64, of the sampled rows.
        live_chunks: [m] bool, like live, for the chunks.
        chunk_stream_ids: [m] int64, of the chunks.
    """
    out_ids, out_tokens, out_finish = stream_ids, tokens, finish
    if not live.all():
        keep = np.flatnonzero(live)
        out_ids, out_tokens, out_finish = stream_ids[keep], tokens[keep], finish[keep]
    failed = np.flatnonzero(out_finish == ERROR)
    errors = tuple((sid, 500, NOT_FINITE) for sid in out_ids[failed].tolist())
    logprobs = prompt_logprobs = None
    if result.logprobs is not None:
        place = np.where(tokens < 0, np.int32(-1), _places(live))
        logprobs = reindex(result.logprobs, place)
    if result.prompt_logprobs is not None:
        place, more = _place_chunks(step, result.prompt_logprobs, _places(live), live_chunks, len(out_ids))
        out_ids = np.concatenate((out_ids, chunk_stream_ids[more]))
        out_tokens = np.concatenate((out_tokens, np.full(len(more), -1, dtype=np.int32)))
        out_finish = np.concatenate((out_finish, np.full(len(more), NONE, dtype=np.uint8)))
        prompt_logprobs = reindex(result.prompt_logprobs, place)
    return StepOutputs(
        step_id=step.step_id,
        stream_ids=out_ids,
        tokens=out_tokens,
        finish=out_finish,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        errors=errors,
    )


def end_outputs(step_id: int, stream_ids: Int64, reason: Finish, message: str | None = None) -> StepOutputs:
    """Streams ([n] int64) that end with no token; with a message, an error entry (status 500) for each."""
    errors = tuple((sid, 500, message) for sid in stream_ids.tolist()) if message is not None else ()
    return StepOutputs(
        step_id=step_id,
        stream_ids=stream_ids,
        tokens=np.full(len(stream_ids), -1, dtype=np.int32),
        finish=np.full(len(stream_ids), int(reason), dtype=np.uint8),
        errors=errors,
    )


def _places(live: Bool) -> Int32:
    """Output entry of each sampled row: [s] int32, -1 for a row that has none."""
    return np.where(live, np.cumsum(live) - 1, -1).astype(np.int32)


def _place_chunks(
    step: LaunchedStep, values: TokenLogprobs, place: Int32, live_chunks: Bool, num_outputs: int
) -> tuple[Int32, Int64]:
    """Output entry of each chunk ([m] int32, -1: dropped), and the chunks that need their own ([e])."""
    is_last = step.prefill.is_last
    chunk_place = np.full(len(is_last), -1, dtype=np.int32)
    chunk_place[is_last] = place[step.num_decode :]
    delivers = np.zeros(len(is_last), dtype=np.bool_)
    delivers[values.index] = True
    more = np.flatnonzero(delivers & ~is_last & live_chunks)
    chunk_place[more] = num_outputs + np.arange(len(more))
    return chunk_place, more
