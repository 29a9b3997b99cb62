"""What each `--backend` name means: its route, its request body, and the shape of its answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import orjson


class Flavor(enum.Enum):
    """The three shapes of answers that `parse` knows."""

    NATIVE = "native"
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Backend:
    """One `--backend` choice.

    Attributes:
        flavor: shape of request and answer.
        path: the route requests are posted to.
        default_port: port when neither --port nor --base-url is given.
        flush_path: route that empties the prefix cache, or None.
        extensions: whether the server knows fields beyond OpenAI's own (ignore_eos).
        has_server_info: whether GET /server_info is worth asking, and /start_profile takes a body (SGLang).
        can_profile: whether there are routes /start_profile and /stop_profile.
    """

    flavor: Flavor
    path: str
    default_port: int
    flush_path: str | None
    extensions: bool = True
    has_server_info: bool = False
    can_profile: bool = True

    @property
    def accepts_token_ids(self) -> bool:
        """Whether a prompt may be a list of token ids."""
        return self.flavor is not Flavor.CHAT

    @property
    def is_chat(self) -> bool:
        """Whether the server applies its chat template to the prompt."""
        return self.flavor is Flavor.CHAT


_NATIVE = Backend(Flavor.NATIVE, "/generate", 30000, "/flush_cache", has_server_info=True)
BACKENDS: dict[str, Backend] = {
    "sglang": _NATIVE,
    "sglang-native": _NATIVE,
    "sglang-oai": Backend(Flavor.COMPLETIONS, "/v1/completions", 30000, "/flush_cache", has_server_info=True),
    "sglang-oai-chat": Backend(
        Flavor.CHAT, "/v1/chat/completions", 30000, "/flush_cache", has_server_info=True
    ),
    "vllm": Backend(Flavor.COMPLETIONS, "/v1/completions", 8000, "/reset_prefix_cache"),
    "vllm-chat": Backend(Flavor.CHAT, "/v1/chat/completions", 8000, "/reset_prefix_cache"),
    "openai": Backend(Flavor.COMPLETIONS, "/v1/completions", 8000, None, extensions=False, can_profile=False),
}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What all requests of a run have in common.

    Attributes:
        model: name sent in OpenAI-style bodies.
        stream: ask for server-sent events.
        ignore_eos: generate exactly the asked number of tokens (servers with extensions only).
        temperature, top_p: sampling; top_p is sent only when below 1.
        sampling: further sampling fields by their names, which the native and the OpenAI routes share.
        native_fields: further fields of a native body (log-probabilities).
        extra_body: merged over the body; objects inside (sampling_params, stream_options) merge one level
            deep.
    """

    model: str
    stream: bool
    ignore_eos: bool
    temperature: float
    top_p: float
    sampling: dict[str, Any]
    native_fields: dict[str, Any]
    extra_body: dict[str, Any]


def build_body(
    backend: Backend, options: RequestOptions, prompt: str | list[int], num_output_tokens: int
) -> bytes:
    """Return one JSON request body.

    Args:
        backend: where it goes.
        options: the fields that all requests share.
        prompt: text, or token ids where `backend.accepts_token_ids`.
        num_output_tokens: tokens to generate (at most; exactly, when ignore_eos holds).
    """
    if backend.flavor is Flavor.NATIVE:
        body = _native_body(options, prompt, num_output_tokens)
    else:
        body = _openai_body(backend, options, prompt, num_output_tokens)
    for key, value in options.extra_body.items():
        # {"sampling_params": {"top_k": 5}} must not silently drop max_new_tokens.
        if isinstance(value, dict) and isinstance(body.get(key), dict):
            body[key] = {**body[key], **value}
        else:
            body[key] = value
    return orjson.dumps(body)


def _native_body(options: RequestOptions, prompt: str | list[int], num_output_tokens: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": options.temperature,
        "max_new_tokens": num_output_tokens,
        "ignore_eos": options.ignore_eos,
    }
    if options.top_p < 1.0:
        sampling["top_p"] = options.top_p
    sampling |= options.sampling
    key = "text" if isinstance(prompt, str) else "input_ids"
    return {
        key: prompt,
        "sampling_params": sampling,
        "stream": options.stream,
        **options.native_fields,
    }


def _openai_body(
    backend: Backend, options: RequestOptions, prompt: str | list[int], num_output_tokens: int
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": options.model, "temperature": options.temperature}
    if backend.is_chat:
        body["messages"] = [{"role": "user", "content": prompt}]
        body["max_completion_tokens"] = num_output_tokens
    else:
        body["prompt"] = prompt
        body["max_tokens"] = num_output_tokens
    body["stream"] = options.stream
    if options.top_p < 1.0:
        body["top_p"] = options.top_p
    body |= options.sampling
    if backend.extensions:
        body["ignore_eos"] = options.ignore_eos
    if options.stream:
        # Without the usage chunk the client could only guess how many tokens came.
        body["stream_options"] = {"include_usage": True}
    return body
