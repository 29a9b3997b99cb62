"""Checks chat messages and brings their content into the shape that a template reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.errors import RequestError

# Templates differ in what they call it; transformers fills the names in for each other, in this order.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PART_SEPARATOR = "\n"  # between text parts that are joined, as vLLM and llama.cpp do


def plain_messages(messages: Sequence[Mapping[str, Any]], *, keep_parts: bool) -> list[dict[str, Any]]:
    """A copy of `messages` for a template, without the keys that are null, as transformers does.

    Args:
        messages: each {"role": str, "content": str, null or a list of text parts, ...}.
        keep_parts: leave non-empty lists of parts as they are, instead of joining their text.

    Raises:
        RequestError: no messages, a message of another shape, or a part that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise _bad("messages must be a list of messages")
    if not messages:
        raise _bad("messages is empty: a chat needs at least one message")
    return [_plain(message, f"messages[{i}]", keep_parts) for i, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _bad(f"{where} must be an object with role and content")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise _bad(f"{where}.role must be a non-empty string")
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], where)
    else:
        plain.pop("tool_calls", None)  # templates ask only whether the key is there
    content = plain.get("content")
    if isinstance(content, list):
        texts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        if not texts or not keep_parts:
            plain["content"] = _PART_SEPARATOR.join(texts)
    elif content is not None and not isinstance(content, str):
        raise _bad(f"{where}.content must be a string, null or a list of text parts")
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise _bad(f"{where} must be an object with a type")
    if part["type"] != "text":
        raise _bad(f"{where} is of type {part['type']!r}: only text is supported", code="unsupported_content")
    if not isinstance(part.get("text"), str):
        raise _bad(f"{where}.text must be a string")
    return str(part["text"])


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects: OpenAI sends them as JSON text, templates print them as JSON."""
    if not isinstance(calls, list):
        raise _bad(f"{where}.tool_calls must be a list")
    plain = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _bad(f"{where}.tool_calls[{i}].function must be an object with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError:
                raise _bad(f"{where}.tool_calls[{i}].function.arguments is not JSON") from None
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


def _bad(message: str, *, code: str = "invalid_value") -> RequestError:
    return RequestError(message, param="messages", code=code)
