"""Regular expressions that end a text.

A client's expression must not be able to hold others up, so it runs in an engine without backtracking: Rust's
`regex`, which comes with pydantic. It takes time in proportion to expression and text, and both are bounded.
"""

from __future__ import annotations

import re
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

from phalanx.core.errors import RequestError

WINDOW = 1024  # characters: a match lies within this many before the end of the text
MAX_WEIGHT = 256  # of all expressions of a request; the worst cost 16 ms to compile and 4 ms a token
_CLASS_WEIGHT = 16  # \w and its kind are some hundred ranges of Unicode

_PIECE = re.compile(
    r"""(?P<klass>\[\^?\]?(?:\\.|\[:\w*:\]|[^\]\\])*\])
    | (?P<escape>\\(?:[pP]\{[^}]*\}|[xuU]\{[^}]*\}|.))
    | (?P<open>\((?:\?(?:P?<\w*>|[\w-]*[:)]))?)
    | (?P<close>\))
    | (?P<count>\{(?P<low>\d+)(?P<comma>,)?(?P<high>\d+)?\})
    | (?P<mark>[?*+^$|])
    | (?P<char>.)""",
    re.VERBOSE | re.DOTALL,
)


class RegexStops:
    """Follows one text.

    Args:
        patterns: expressions as Rust's `regex` reads them: no look-around, no back-references.

    Raises:
        RequestError: one does not compile, or they are too large together.
    """

    __slots__ = ("_patterns", "_tail")

    def __init__(self, patterns: tuple[str, ...]) -> None:
        weight = sum(map(_weight, patterns))
        if weight > MAX_WEIGHT:
            raise _bad(f"is too large: {weight} states where {MAX_WEIGHT} are allowed, of all expressions")
        self._patterns = [(pattern, _compile(pattern)) for pattern in patterns]
        self._tail = ""

    def feed(self, text: str) -> str | None:
        """Read one token's text; returns the first expression that now has a match, or None."""
        if not text:
            return None
        self._tail = (self._tail + text)[-WINDOW:]
        for pattern, compiled in self._patterns:
            if compiled.isinstance_python(self._tail):
                return pattern
        return None


@lru_cache(maxsize=256)
def _compile(pattern: str) -> SchemaValidator:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("error: ")
        raise _bad(f"{pattern!r} does not compile: {reason}") from None


@lru_cache(maxsize=256)
def _weight(pattern: str) -> int:
    """About how many states the expression has once its counted repetitions are written out."""
    groups, atom = [0], 0
    for piece in _PIECE.finditer(pattern):
        if piece["open"]:
            if "x" in piece["open"].partition("?")[2] and "<" not in piece["open"]:
                raise _bad(f"{pattern!r} uses the flag x, which is not supported")
            if not piece["open"].endswith(")"):  # not a mere flag
                groups.append(0)
            atom = 0
        elif piece["close"]:
            atom = groups.pop() + 1 if len(groups) > 1 else 0
            groups[-1] += atom
        elif piece["count"]:
            # More digits than any sensible count has: too many, whatever they say.
            digits = piece["high"] or piece["low"]
            times = int(digits) if len(digits) < 8 else 10**8
            groups[-1] += atom * max(times + bool(piece["comma"] and not piece["high"]) - 1, 0)
            atom *= max(times, 1)
        elif not piece["mark"]:
            classes = piece["klass"].count("\\") if piece["klass"] else bool(piece["escape"])
            atom = 1 + (_CLASS_WEIGHT - 1) * classes
            groups[-1] += atom
    return sum(groups)


def _bad(what: str) -> RequestError:
    return RequestError(f"stop_regex {what}", param="stop_regex", code="invalid_value")
