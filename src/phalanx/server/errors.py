"""From what goes wrong with a request to OpenAI's error body."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from phalanx.core.errors import RequestError

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_NOTHING = (None, False, 0, "", [], {})
_ZERO_IS_DEFAULT = (
    "frequency_penalty",
    "presence_penalty",
    "min_p",
    "min_new_tokens",
    "min_tokens",
    "top_logprobs",
    "top_logprobs_num",
)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>.*)`$", re.DOTALL)


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The request body as the decoder's type.

    Raises:
        RequestError: 400 that names the field at fault.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _invalid_field(text: str) -> RequestError:
    match = _AT.match(text)
    what, path = (match["what"], match["path"]) if match else (text, "")
    for pattern, ours in ((_MISSING, "is required"), (_UNKNOWN, "there is no such field")):
        if named := pattern.search(what):
            path = f"{path}.{named['name']}" if path else named["name"]
            what = ours
            break
    if not path:
        return RequestError(f"the body is not valid: {what}", code="invalid_value")
    return RequestError(f"{path}: {what}", param=path, code="invalid_value")


def refuse_unsupported(body: Any, names: Iterable[str]) -> None:
    """Raise a 400 for a field of `body` that is known, asked for, and cannot be honoured.

    None, false, 0 and empty values ask for nothing, and nor does a list of them.
    """
    for name in names:
        if _asks(getattr(body, name)):
            raise unsupported(name)


def refuse_misnamed(body: Any, names: Mapping[str, str]) -> None:
    """Raise a 400 for a field of `body` that asks for something under another API's name.

    names: from theirs to ours.
    """
    for name, ours in names.items():
        if asks_by_name(name, getattr(body, name)):
            raise unsupported(name, why=f"it is called {ours} here")


def asks_by_name(name: str, value: Any) -> bool:
    """As `refuse_unsupported` has it, but that 0 asks for something: of a temperature, or as a seed."""
    is_zero = value == 0 and not isinstance(value, bool)
    return _asks(value) or (is_zero and name not in _ZERO_IS_DEFAULT)


def _asks(value: Any) -> bool:
    if isinstance(value, list):
        return any(item not in _NOTHING for item in value)
    return value not in _NOTHING


def body_too_large(max_bytes: int) -> RequestError:
    """The 413."""
    return RequestError(f"the body is larger than {max_bytes} bytes", status=413, code="body_too_large")


def unsupported(name: str, what: str = "", why: str = "") -> RequestError:
    """The 400 for a known field that cannot be honoured."""
    message = f"{name} {what}".strip() + " is not supported" + (f": {why}" if why else "")
    return RequestError(message, param=name, code="unsupported_parameter")


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error, told with the names that this route's clients use."""
    name = names.get(error.param or "")
    if name is None:
        return error
    message = error.message
    if error.param and message.startswith(f"{error.param} "):
        message = name + message.removeprefix(error.param)
    elif name not in message:
        message = f"{name}: {message}"
    return RequestError(message, status=error.status, param=name, code=error.code)


def error_event(status: int, message: str) -> dict[str, Any]:
    """The error that stands inside a stream whose 200 is already sent (SGLang adds `retryable`)."""
    body = RequestError(message, status=status).body()
    return {"error": {**body["error"], "code": status, "retryable": status == 503}}
