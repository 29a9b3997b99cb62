"""The bodies of /v1/chat/completions and /v1/completions. Unknown fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core.errors import RequestError
from phalanx.server.errors import refuse_misnamed, refuse_unsupported, unsupported

# Known here or in other engines, and not built: refused by name when asked for.
_UNSUPPORTED = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "guided_decoding_backend",
    "structured_outputs",
    "lora_path",
    "session_params",
    "beam_width",
    "use_beam_search",
    "early_stopping",
    "custom_logit_processor",
    "logits_processors",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "return_tokens_as_token_ids",
    "thinking_token_budget",
    "sampling_params",
    "return_hidden_states",
    "priority",
)
_UNSUPPORTED_CHAT = (
    "audio",
    "documents",
    "echo",
    "functions",
    "continue_final_message",
    "chat_template",
    "web_search_options",
)
_UNSUPPORTED_COMPLETION = ("suffix", "prompt_embeds")
# Names of `/generate` and of other APIs for what is supported: ignored, they would change the answer.
_MISNAMED = {
    "max_new_tokens": "max_tokens or max_completion_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "return_logprob": "logprobs",
}
_MISNAMED_CHAT = {"top_logprobs_num": "top_logprobs"}
_MISNAMED_COMPLETION = {"top_logprobs_num": "logprobs", "top_logprobs": "logprobs"}


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_usage: one more chunk before [DONE], with the counts. continuous_usage_stats: every chunk has
    those of its choice so far.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class OpenAIBody(msgspec.Struct, kw_only=True):
    """What both routes share: OpenAI's names, then the extensions."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    rid: str | None = None
    stop_regex: str | list[str] | None = None
    return_token_ids: bool | None = False
    extra_key: str | None = None
    cache_salt: str | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    guided_decoding_backend: Any = None
    structured_outputs: Any = None
    lora_path: Any = None
    session_params: Any = None
    beam_width: Any = None
    use_beam_search: Any = None
    early_stopping: Any = None
    length_penalty: Any = None
    custom_logit_processor: Any = None
    logits_processors: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Any = None
    return_tokens_as_token_ids: Any = None
    thinking_token_budget: Any = None
    sampling_params: Any = None
    return_hidden_states: Any = None
    priority: Any = None
    max_new_tokens: Any = None
    min_new_tokens: Any = None
    sampling_seed: Any = None
    stop_sequences: Any = None
    return_logprob: Any = None
    top_logprobs_num: Any = None


class ChatBody(OpenAIBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Any = None
    best_of: Any = None
    documents: Any = None
    echo: Any = None
    functions: Any = None
    function_call: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    web_search_options: Any = None


class CompletionBody(OpenAIBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None
    prompt_embeds: Any = None
    top_logprobs: Any = None


def check_supported(body: ChatBody | CompletionBody) -> None:
    """Raise a 400 that names what is asked for and not built."""
    refuse_unsupported(body, _UNSUPPORTED)
    refuse_misnamed(body, _MISNAMED)
    if body.length_penalty != 1:  # vLLM's default, of use to beams alone
        refuse_unsupported(body, ("length_penalty",))
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise unsupported("response_format", f"of type {kind!r}")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options", code="invalid_value")
    if isinstance(body, CompletionBody):
        refuse_unsupported(body, _UNSUPPORTED_COMPLETION)
        refuse_misnamed(body, _MISNAMED_COMPLETION)
        if body.add_special_tokens is False:
            raise unsupported("add_special_tokens", "false", why="give token ids for a prompt without them")
        _check_best_of(body)
        return
    refuse_unsupported(body, _UNSUPPORTED_CHAT)
    refuse_misnamed(body, _MISNAMED_CHAT)
    if body.add_special_tokens:
        raise unsupported("add_special_tokens", "true", why="the chat template writes them")
    if body.best_of not in (1, body.n):
        refuse_unsupported(body, ("best_of",))
    if body.modalities and body.modalities != ["text"]:
        raise unsupported("modalities", "other than text")
    if isinstance(body.tool_choice, dict) or body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "that forces a tool")
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", why="tool calling is not built yet")
    if body.function_call and body.function_call not in ("none", "auto"):
        raise unsupported("function_call", "that forces a function")


def drop_unsupported(body: ChatBody | CompletionBody) -> None:
    """Forget what `check_supported` has let pass since it asks for nothing."""
    is_chat = isinstance(body, ChatBody)
    kind = _UNSUPPORTED_CHAT if is_chat else _UNSUPPORTED_COMPLETION
    misnamed = {**_MISNAMED, **(_MISNAMED_CHAT if is_chat else _MISNAMED_COMPLETION)}
    for name in (
        *_UNSUPPORTED,
        *kind,
        *misnamed,
        "length_penalty",
        "response_format",
        "extra_key",
        "cache_salt",
        "user",
    ):
        setattr(body, name, None)
    if isinstance(body, ChatBody):
        body.modalities = body.tool_choice = body.function_call = body.best_of = None


def _check_best_of(body: CompletionBody) -> None:
    """As many as are asked for may be drawn: choosing the best of more is not built."""
    num_outputs = 1 if body.n is None else body.n
    if body.best_of is None or body.best_of == num_outputs:
        return
    if body.best_of > num_outputs:
        raise unsupported("best_of", "above n")
    raise RequestError(
        f"best_of is {body.best_of}, below n, which is {num_outputs}", param="best_of", code="invalid_value"
    )
