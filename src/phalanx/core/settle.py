"""From a prompt and its parameters to the EngineRequests that run it: the one place that fills in defaults.

API workers and `LLM` both use it, so a request means the same over HTTP and in process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.core.errors import ModelError, RequestError
from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams, check_integer

_SEED_MASK = 2**63 - 1


def mix_seed(seed: int, index: int) -> int:
    """A seed for the index-th output of one prompt: seed itself for index 0, well spread otherwise.

    One round of splitmix64 (Steele, Lea, Flood 2014), kept to 63 bits so that it fits an int64 column.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) & _SEED_MASK


def end_tokens(
    model: Iterable[int], tokenizer: Iterable[int] = (), *, where: str = "the model"
) -> tuple[int, ...]:
    """The ids that end a text: the model's, then what only its tokenizer knows of, each once.

    where: names the model in the error.

    Raises:
        ModelError: more than a row has room for.
    """
    ids = tuple(dict.fromkeys((*model, *tokenizer)))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ModelError(
            f"{where} has {len(ids)} end tokens (eos_token_id); at most {MAX_STOP_TOKEN_IDS} are possible"
        )
    return ids


def _length(value: Any) -> int:
    """len(value), or 0 for what has none."""
    try:
        return len(value)
    except TypeError:
        return 0


class Settler:
    """Knows the model's limits and settles requests against them.

    Args:
        vocab_size: token ids must be below it.
        context_length: prompt plus output may not pass it.
        max_request_tokens: the most tokens one request can hold in the KV pool, or None if not known yet.
        eos_token_ids: the model's own end tokens.
        seed_source: seeds of requests that bring none are drawn from it, one after the other.
        worker: the API worker, in the high bits of stream ids and mixed into drawn seeds.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        eos_token_ids: Iterable[int],
        seed_source: int,
        max_request_tokens: int | None = None,
        worker: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.max_request_tokens = max_request_tokens
        self.eos_token_ids = tuple(eos_token_ids)
        self._seeds = np.random.Generator(np.random.PCG64([seed_source, worker]))

    def settle(
        self,
        stream_ids: Sequence[int],
        input_ids: Sequence[int] | npt.NDArray[np.int32],
        sampling: SamplingParams,
        logprobs: LogprobParams | None = None,
    ) -> list[EngineRequest]:
        """The engine requests of one prompt, one per stream id (`len(stream_ids) == sampling.n`).

        Raises:
            RequestError: an empty prompt, ids outside the vocabulary, a prompt that leaves no room in the
                context, more stop ids than a row holds, or parameters out of range (`SamplingParams.check`).
        """
        sampling.check(self.vocab_size)
        ids = self.check_prompt(input_ids)
        self._check_logprobs(logprobs, len(ids))
        room = self.context_length - len(ids)
        wanted = room if sampling.max_new_tokens is None else sampling.max_new_tokens
        limit = min(wanted, room)
        if self.max_request_tokens is not None and len(ids) + limit > self.max_request_tokens:
            if sampling.max_new_tokens is not None or len(ids) >= self.max_request_tokens:
                raise RequestError(
                    f"prompt of {len(ids)} tokens plus {limit} new tokens does not fit the KV cache of "
                    f"{self.max_request_tokens} tokens",
                    code="context_length_exceeded",
                )
            limit = self.max_request_tokens - len(ids)
        seed = sampling.sampling_seed
        if seed is None:
            seed = int(self._seeds.integers(_SEED_MASK))
        stops = self._stop_ids(sampling)
        return [
            EngineRequest(
                stream_id=stream_id,
                input_ids=ids,
                sampling=msgspec.structs.replace(
                    sampling,
                    max_new_tokens=limit,
                    min_new_tokens=min(sampling.min_new_tokens, limit),
                    sampling_seed=mix_seed(seed, i),
                ),
                stop_ids=stops,
                logprobs=logprobs,
            )
            for i, stream_id in enumerate(stream_ids)
        ]

    def _stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        own = () if sampling.ignore_eos else self.eos_token_ids
        ids = tuple(dict.fromkeys(own + sampling.stop_token_ids))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids holds {len(ids) - len(own)} ids beside the model's own {len(own)} end "
                f"tokens: together at most {MAX_STOP_TOKEN_IDS} are possible, or ignore_eos",
                param="stop_token_ids",
            )
        return ids

    def check_prompt(self, input_ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The prompt as int32, or a RequestError: empty, not integers, outside the vocabulary, too long."""
        self.check_length(_length(input_ids))  # first: the conversion of millions would hold others up
        try:
            wide = np.asarray(input_ids)
        except ValueError:
            wide = np.asarray(None)
        if wide.ndim == 1 and wide.size == 0:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        if wide.ndim != 1 or not np.issubdtype(wide.dtype, np.integer):
            raise RequestError("input_ids must be a list of token ids (integers)", param="input_ids")
        low, high = int(wide.min()), int(wide.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise RequestError(
                f"token id {bad} is outside the vocabulary of {self.vocab_size} ids", param="input_ids"
            )
        return wide.astype(np.int32)

    def check_length(self, num_ids: int, *, at_least: bool = False) -> None:
        """Raise a RequestError for a prompt that leaves no room in the context.

        at_least: the number is a lower bound.
        """
        if num_ids >= self.context_length:
            raise RequestError(
                f"the prompt has {'at least ' if at_least else ''}{num_ids} tokens; with a context length of "
                f"{self.context_length} at most {self.context_length - 1} fit",
                code="context_length_exceeded",
            )

    def _check_logprobs(self, logprobs: LogprobParams | None, prompt_len: int) -> None:
        if logprobs is None:
            return
        check_integer("top_logprobs_num", logprobs.top_k, 0, min(self.vocab_size, 1024))
        check_integer("logprob_start_len", logprobs.prompt_start, -1, None)
        if logprobs.prompt_start >= prompt_len:
            raise RequestError(
                f"logprob_start_len is {logprobs.prompt_start}, but the prompt has {prompt_len} tokens",
                param="logprob_start_len",
            )
        for token in logprobs.token_ids:
            check_integer("token_ids_logprob", token, 0, self.vocab_size - 1)
