"""What the front door hands to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.core.sampling_params import SamplingParams, as_tuple, plain

IntArray = npt.NDArray[np.int32]

WORKER_SHIFT = 40  # stream_id = worker << WORKER_SHIFT | number: unique over all workers


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which log-probabilities a request wants; they are those of the model's raw logits.

    Attributes:
        prompt_start: first prompt position whose log-probability is wanted; -1 for none.
        top_k: this many likeliest alternatives at each position.
        token_ids: log-probabilities of these ids at each position.
    """

    prompt_start: int = -1
    top_k: int = 0
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Take lists, arrays and NumPy scalars; values are checked where the request is settled."""
        if type(self.token_ids) is not tuple:
            object.__setattr__(self, "token_ids", as_tuple("token_ids_logprob", self.token_ids))
        for name in ("prompt_start", "top_k"):
            if type(getattr(self, name)) is not int:
                object.__setattr__(self, name, plain(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One output sequence to produce (n > 1 arrives as n of these).

    Attributes:
        stream_id: names the sequence on the way back; `stream_id >> WORKER_SHIFT` is the API worker.
        input_ids: [prompt_len] int32, prompt_len >= 1, all within the vocabulary.
        sampling: checked; `sampling.sampling_seed` and `sampling.max_new_tokens` are not None here.
        stop_ids: the ids that end it on the device (the model's end tokens unless ignore_eos, then
            stop_token_ids), at most MAX_STOP_TOKEN_IDS.
        logprobs: None if none are wanted.
        rid: the name that the client chose, None if it chose none; no two running sequences may share one.
    """

    stream_id: int
    input_ids: IntArray
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    logprobs: LogprobParams | None = None
    rid: str | None = None

    @property
    def worker(self) -> int:
        """The API worker this request came from."""
        return self.stream_id >> WORKER_SHIFT

    @property
    def max_new_tokens(self) -> int:
        """The settled output bound."""
        assert self.sampling.max_new_tokens is not None
        return self.sampling.max_new_tokens
