"""From request fields to SamplingParams and LogprobParams; ranges are checked later, in one place (core)."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from phalanx.core.errors import RequestError
from phalanx.core.request import LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.server.errors import refuse_unsupported, unsupported
from phalanx.server.schema_generate import (
    MISNAMED_SAMPLING,
    UNSUPPORTED_SAMPLING,
    GenerateBody,
    SamplingFields,
)
from phalanx.server.schema_openai import ChatBody, CompletionBody

MAX_ASKED_IDS = 1024  # of token_ids_logprob
MAX_TOP_LOGPROBS = 20  # OpenAI's limit for chat, here for both routes

AskedIds = tuple[int, ...] | list[tuple[int, ...]]

_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "n",
    "logit_bias",
)


def sampling_from_generate(fields: SamplingFields | None) -> SamplingParams:
    """SGLang's `sampling_params` as SamplingParams, not range-checked.

    Raises:
        RequestError: a field that is known and not supported, or another API's name for one that is.
    """
    if fields is None:
        return SamplingParams()
    refuse_unsupported(fields, UNSUPPORTED_SAMPLING)
    for name, ours in MISNAMED_SAMPLING.items():
        if getattr(fields, name) is not None:
            raise unsupported(name, why=f"in sampling_params it is called {ours}")
    values = _common(fields)
    if fields.max_new_tokens is not UNSET:
        values["max_new_tokens"] = fields.max_new_tokens
    if fields.min_new_tokens is not None:
        values["min_new_tokens"] = fields.min_new_tokens
    if fields.sampling_seed is not None:
        values["sampling_seed"] = fields.sampling_seed
    return SamplingParams(**values)


def interval_from_generate(fields: SamplingFields | None) -> int | None:
    """`stream_interval`: tokens that a streamed event carries at least; None for the server's own number.

    Raises:
        RequestError: it is below 1.
    """
    interval = None if fields is None else fields.stream_interval
    if interval is not None and interval < 1:
        raise RequestError(
            f"stream_interval must be at least 1, got {interval}",
            param="stream_interval",
            code="invalid_value",
        )
    return interval


def sampling_from_openai(body: ChatBody | CompletionBody) -> SamplingParams:
    """OpenAI's fields as SamplingParams, not range-checked; no bound means all the room there is."""
    values = _common(body)
    wins = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    values["max_new_tokens"] = wins
    if body.min_tokens is not None:
        values["min_new_tokens"] = body.min_tokens
    if body.seed is not None:
        values["sampling_seed"] = body.seed
    if body.include_stop_str_in_output is not None:
        values["no_stop_trim"] = body.include_stop_str_in_output
    return SamplingParams(**values)


def openai_names(body: ChatBody | CompletionBody) -> dict[str, str]:
    """What this client calls our parameters, for error messages."""
    bound = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    prompt = "messages" if isinstance(body, ChatBody) else "prompt"
    return {
        "max_new_tokens": bound,
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "input_ids": prompt,
        "prompt": prompt,
    }


def _common(fields: Any) -> dict[str, Any]:
    values = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.stop is not None:
        values["stop"] = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if fields.stop_regex is not None:
        one = isinstance(fields.stop_regex, str)
        values["stop_regex"] = (fields.stop_regex,) if one else tuple(fields.stop_regex)
    if fields.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(fields.stop_token_ids)
    return values


def logprobs_from_openai(body: ChatBody | CompletionBody) -> LogprobParams | None:
    """Which log-probabilities an OpenAI request wants; None for none.

    Raises:
        RequestError: a count out of range, or top_logprobs without logprobs.
    """
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise RequestError(
                "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value"
            )
        wanted, name, start = (body.top_logprobs or 0 if body.logprobs else None), "top_logprobs", -1
    else:
        wanted, name, start = body.logprobs, "logprobs", 0 if body.echo else -1
    if wanted is None:
        return None
    if not 0 <= wanted <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"{name} must be in [0, {MAX_TOP_LOGPROBS}], got {wanted}", param=name, code="invalid_value"
        )
    return LogprobParams(prompt_start=start, top_k=wanted)


def logprobs_from_generate(
    body: GenerateBody, asked_ids: AskedIds, index: int, count: int
) -> LogprobParams | None:
    """Which log-probabilities prompt `index` of `count` wants; None for none.

    asked_ids: `asked_token_ids(body)`.
    """
    if not one_of(body.return_logprob, index, count, "return_logprob"):
        return None
    start = one_of(body.logprob_start_len, index, count, "logprob_start_len")
    top_k = one_of(body.top_logprobs_num, index, count, "top_logprobs_num")
    return LogprobParams(
        prompt_start=-1 if start is None else start,
        top_k=top_k or 0,
        token_ids=one_of(asked_ids, index, count, "token_ids_logprob"),
    )


def asked_token_ids(body: GenerateBody) -> AskedIds:
    """`token_ids_logprob`: one tuple for all prompts, or a list of one for each.

    Raises:
        RequestError: ids and lists are mixed, or there are too many ids.
    """
    value = body.token_ids_logprob or []
    flat = tuple(v for v in value if isinstance(v, int))
    if flat and len(flat) < len(value):
        raise RequestError("token_ids_logprob mixes ids and lists", param="token_ids_logprob")
    lists = [] if flat else [tuple(v or ()) for v in value if not isinstance(v, int)]
    longest = max(map(len, [flat, *lists]))
    if longest > MAX_ASKED_IDS:
        raise RequestError(
            f"token_ids_logprob has {longest} ids; at most {MAX_ASKED_IDS} are allowed",
            param="token_ids_logprob",
            code="invalid_value",
        )
    return lists or flat


def one_of(value: Any, index: int, count: int, name: str) -> Any:
    """The value for prompt `index` of `count`: one for all, or a list with one for each."""
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return value[index]
