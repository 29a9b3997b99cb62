"""The parts of an event that figures are made of, decoded straight into fields.

Everything else in an event (log-probabilities, ids) is skipped over without building an object for it. What
has the wrong type is refused: `msgspec.ValidationError` tells where.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

# Finish reasons of the OpenAI routes (SGLang's, vLLM's) with which the server gave the request up.
_GIVEN_UP = ("abort", "error")
# JSON values that mean "nothing" wherever they stand.
_EMPTY = frozenset((b"", b"null", b"false", b"0", b'""', b"{}", b"[]"))
# Larger than any answer and any context. A count beyond is an error of the server, and would not fit into the
# arrays that hold a number for each output token.
OutputCount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
PromptCount = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
Raw = msgspec.Raw


class NativeMeta(msgspec.Struct, frozen=True, gc=False):
    """`meta_info`: counts so far, and why generation ended."""

    completion_tokens: OutputCount | None = None
    prompt_tokens: PromptCount | None = None
    cached_tokens: PromptCount | None = None
    finish_reason: Raw = Raw(b"")


class PromptDetails(msgspec.Struct, frozen=True, gc=False):
    """`usage.prompt_tokens_details`."""

    cached_tokens: PromptCount | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """`usage` of the OpenAI routes."""

    completion_tokens: OutputCount | None = None
    prompt_tokens: PromptCount | None = None
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What one chunk of a chat stream (`delta`) or a whole answer (`message`) says."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True, gc=False):
    """One choice: `text` of a completion, `delta` of a chat stream, `message` of a whole chat answer.

    `finish_reason` says why generation ended.
    """

    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: Any = None


class NativeEvent(msgspec.Struct, frozen=True, gc=False):
    """One event, or a whole answer, of /generate."""

    text: str | None = None
    meta_info: NativeMeta | None = None
    output_ids: Raw = Raw(b"")
    error: Raw = Raw(b"")
    object: Raw = Raw(b"")


class OpenAiEvent(msgspec.Struct, frozen=True, gc=False):
    """One event, or a whole answer, of the OpenAI routes."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Raw = Raw(b"")
    object: Raw = Raw(b"")


decode_native = msgspec.json.Decoder(NativeEvent).decode
decode_openai = msgspec.json.Decoder(OpenAiEvent).decode


def says(raw: Raw) -> bool:
    """Whether a field holds anything."""
    return bytes(raw) not in _EMPTY


def is_error(event: NativeEvent | OpenAiEvent) -> bool:
    """Whether the event is an error report, in the new shape (`error`) or the old (`object`)."""
    return says(event.error) or bytes(event.object) == b'"error"'


def abort_message(meta: NativeMeta | None) -> str | None:
    """Return why the server aborted the request; None when it did not."""
    if meta is None or b"abort" not in bytes(meta.finish_reason):
        return None
    reason: Any = msgspec.json.decode(meta.finish_reason)
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return None
    return str(reason.get("message") or "no reason given")


def is_given_up(choice: Choice) -> bool:
    """Whether the server gave the request up."""
    return choice.finish_reason in _GIVEN_UP


def num_ids(ids: Raw) -> int | None:
    """Return the length of a flat JSON list of ids without decoding it; None when there is no list."""
    text = bytes(ids).strip(b" []")
    if not bytes(ids).startswith(b"["):
        return None
    return text.count(b",") + 1 if text else 0
