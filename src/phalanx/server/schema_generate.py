"""The body of POST /generate, with SGLang's names. Unknown fields are ignored except in `sampling_params`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

UNSUPPORTED_SAMPLING = (
    "beam_width",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "custom_params",
    "watermark",
)
MISNAMED_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
"""Names of other APIs for our sampling parameters: refused, as in SGLang, rather than ignored."""
UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "session_params",
    "return_hidden_states",
    "return_routed_experts",
    "custom_logit_processor",
    "priority",
    "routed_dp_rank",  # 0 is the only rank there is, and asks for nothing
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`: null stands for the default, but for max_new_tokens for all the room there is.

    A name that SGLang does not know is refused there too: a misspelt one would change what is sampled.
    """

    max_new_tokens: int | UnsetType | None = UNSET
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
    stop_regex: str | list[str] | None = None
    stream_interval: int | None = None
    beam_width: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    custom_params: Any = None
    watermark: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    min_tokens: Any = None
    seed: Any = None


MISPLACED = SamplingFields.__struct_fields__
"""Sampling parameters beside `text`: there they would be ignored."""
_Misplaced = msgspec.defstruct("_Misplaced", [(name, Any, None) for name in MISPLACED], kw_only=True)


class GenerateBody(_Misplaced, kw_only=True):
    """One prompt, or a list of prompts with values that are one for all or one for each.

    extra_key, cache_salt: keep prefixes of different keys apart; none are shared yet, so each is kept apart.
    routing_key: for a router in front of several servers.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SamplingFields | list[SamplingFields] | None = None
    stream: bool | None = False
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool | None = False
    return_prompt_token_ids: bool | None = False
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None
    routing_key: str | list[str | None] | None = None
    no_logs: bool | None = False
    log_metrics: bool | None = True
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    custom_logit_processor: Any = None
    priority: Any = None
    routed_dp_rank: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    logprobs: Any = None
    top_logprobs: Any = None


MISNAMED = {"logprobs": "return_logprob", "top_logprobs": "top_logprobs_num"}
"""Names of OpenAI's routes for fields of `/generate`."""


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, several, or a conversation."""

    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    model: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize: ids of one text, or of several."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool = True
    model: str | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /abort_request: the request, prompt or sequence named `rid`, or all."""

    rid: str | None = None
    abort_all: bool = False
