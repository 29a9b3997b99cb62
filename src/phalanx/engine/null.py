"""An engine without a model, to measure everything around it.

What it says is known beforehand: a client that gives its request a seed knows every id that must come
(`null_token_ids`), so that a lost, doubled or reordered token is seen.
"""

from __future__ import annotations

import math
import time

import numpy as np

from phalanx.config.groups import Settings
from phalanx.core.step import Finish, Float32, Int32, LogprobPlan, StepPlan, StepResult, TokenLogprobs

# Most tokenizers keep single bytes and control tokens below this and ordinary words above.
_FIRST_WORD = 1000
_NUM_WORDS = 4096
_SEED_STRIDE, _POSITION_STRIDE = 97, 31  # primes, so that neighbours in both directions differ


def null_token_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` ids that a `NullEngine` of this vocabulary says for a request with this seed.

    seed: `EngineRequest.sampling.sampling_seed`, in [0, 2**63): the client's for its first output.
    """
    first, span = _words(vocab_size)
    start = seed % span * _SEED_STRIDE
    return [first + (start + _POSITION_STRIDE * i) % span for i in range(count)]


def _words(vocab_size: int) -> tuple[int, int]:
    """The first of the ids that are used, and how many they are."""
    first = min(_FIRST_WORD, vocab_size // 2)
    return first, min(_NUM_WORDS, vocab_size - first)


class NullHandle:
    """A launched step; its result is there at `due` (time.monotonic seconds)."""

    def __init__(self, result: StepResult, due: float) -> None:
        self._result = result
        self._due = due

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return time.monotonic() >= self._due

    def result(self) -> StepResult:
        """Wait until the step is due."""
        wait = self._due - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return self._result


class NullEngine:
    """Says ids that depend on a request's seed and the position alone; never a stop, never an error.

    Args:
        settings: its vocabulary bounds the ids, which lie in a range of ordinary words; its
            engine.null_step_ms is how long a step takes, whatever its rows; None for no time.
    """

    def __init__(self, settings: Settings) -> None:
        self._first, self._span = _words(settings.model.vocab_size)
        self._step_s = None if settings.engine.null_step_ms is None else settings.engine.null_step_ms / 1000
        self._start = np.zeros(settings.scheduler.max_running_requests + 1, np.int64)  # by row
        self._due = 0.0

    def launch(self, plan: StepPlan) -> NullHandle:
        """Start a step."""
        entering = plan.entering
        self._start[entering.rows] = entering.seed % self._span * _SEED_STRIDE
        rows, done = plan.sample_rows, plan.num_generated.astype(np.int64)
        tokens = (self._first + (self._start[rows] + done * _POSITION_STRIDE) % self._span).astype(np.int32)
        if self._step_s is not None:
            self._due = max(self._due, time.monotonic()) + self._step_s
        wanted = plan.logprobs
        result = StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            finish=np.full(len(rows), Finish.NONE, np.uint8),
            logprobs=None if wanted is None else _output_certain(tokens, wanted),
            prompt_logprobs=_prompt_certain(wanted)
            if wanted is not None and len(wanted.prompt_targets)
            else None,
        )
        return NullHandle(result, self._due)

    def close(self) -> None:
        """Nothing to end."""


def _output_certain(tokens: Int32, wanted: LogprobPlan) -> TokenLogprobs:
    index = wanted.sample_index
    return _certain(index, tokens[index], wanted.top_k, wanted.ids_indptr, wanted.ids)


def _prompt_certain(wanted: LogprobPlan) -> TokenLogprobs:
    counts = np.diff(wanted.prompt_indptr)
    chunk = np.repeat(np.arange(len(counts)), counts)
    num_ids = np.diff(wanted.prompt_ids_indptr)[chunk]
    indptr = _indptr(num_ids)
    at = np.repeat(wanted.prompt_ids_indptr[:-1][chunk] - indptr[:-1], num_ids) + np.arange(indptr[-1])
    return _certain(
        wanted.prompt_chunk[chunk],
        wanted.prompt_targets,
        wanted.prompt_top_k[chunk],
        indptr,
        wanted.prompt_ids[at],
    )


def _certain(index: Int32, targets: Int32, top_k: Int32, ids_indptr: Int32, ids: Int32) -> TokenLogprobs:
    """The target has probability 1, everything else 0: at most one alternative, the target itself."""
    wants_top = top_k > 0
    hit = ids == np.repeat(targets, np.diff(ids_indptr))
    ids_logprobs: Float32 = np.where(hit, 0.0, -math.inf).astype(np.float32)
    return TokenLogprobs(
        index=index.astype(np.int32),
        token_ids=targets.astype(np.int32),
        logprobs=np.zeros(len(targets), np.float32),
        top_indptr=_indptr(wants_top),
        top_ids=targets[wants_top].astype(np.int32),
        top_logprobs=np.zeros(int(wants_top.sum()), np.float32),
        ids_indptr=ids_indptr,
        ids=ids,
        ids_logprobs=ids_logprobs,
    )


def _indptr(counts: np.ndarray) -> Int32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
