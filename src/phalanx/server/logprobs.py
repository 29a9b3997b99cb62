"""Log-probabilities of one sequence, gathered step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from phalanx.core.errors import RequestError
from phalanx.core.step import TokenLogprobs


@dataclass(slots=True)
class Positions:
    """Log-probabilities at consecutive positions; `top`, `asked`: (log-probability, token id) pairs."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    asked: list[list[tuple[float, int]]] = field(default_factory=list)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        for column in (self.token_ids, self.logprobs, self.top, self.asked):
            del column[length:]


@dataclass(slots=True)
class LogprobLog:
    """Of the prompt, from the first position that has one, and of the output.

    num_entries: log-probabilities in both, the alternatives and asked-for ids included.
    """

    prompt: Positions = field(default_factory=Positions)
    output: Positions = field(default_factory=Positions)
    num_entries: int = 0


# Of all sequences of one HTTP request: each takes some 120 bytes here, and more while an answer is written.
MAX_ENTRIES = 2**21


def too_many(num_entries: int) -> RequestError:
    """The 400 for a request whose log-probabilities are more than one answer may hold."""
    return RequestError(
        f"the request asks for {num_entries} or more log-probabilities, at all positions of all its outputs "
        f"together; at most {MAX_ENTRIES} are allowed",
        code="too_many_logprobs",
    )


def record(logprobs: TokenLogprobs, find: Callable[[int], Positions | None]) -> None:
    """Hand each position to its stream.

    find: index into the step's rows -> where to put it, or None if nobody wants it any more.
    """
    token_ids, values = logprobs.token_ids.tolist(), logprobs.logprobs.tolist()
    top = _pairs(logprobs.top_indptr.tolist(), logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist())
    asked = _pairs(logprobs.ids_indptr.tolist(), logprobs.ids.tolist(), logprobs.ids_logprobs.tolist())
    for i, row in enumerate(logprobs.index.tolist()):
        positions = find(row)
        if positions is not None:
            positions.token_ids.append(token_ids[i])
            positions.logprobs.append(values[i])
            positions.top.append(top[i])
            positions.asked.append(asked[i])


def _pairs(
    indptr: Sequence[int], ids: Sequence[int], values: Sequence[float]
) -> list[list[tuple[float, int]]]:
    return [list(zip(values[a:b], ids[a:b], strict=True)) for a, b in pairwise(indptr)]


class TokenTexts:
    """Names of single tokens for log-probabilities.

    Args:
        to_bytes: the bytes of one id; None without a tokenizer.
        special_ids: ids that are left out of texts by default.
    """

    def __init__(
        self, to_bytes: Callable[[int], bytes] | None, special_ids: frozenset[int] = frozenset()
    ) -> None:
        self._to_bytes = to_bytes
        self._special_ids = special_ids

    def text(self, token_id: int) -> str | None:
        """The token's text; None without a tokenizer."""
        return None if self._to_bytes is None else self._to_bytes(token_id).decode("utf-8", "replace")

    def num_chars(self, token_id: int, *, skips_special: bool) -> int:
        """Characters that begin in this token: over all tokens of a text they add up to its length."""
        if self._to_bytes is None or (skips_special and token_id in self._special_ids):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self._to_bytes(token_id))  # not a UTF-8 continuation

    def key(self, token_id: int) -> str:
        """The token's name in completions; bytes that are no text by themselves are spelled out.

        Without a tokenizer it is "token_id:N", as vLLM's `return_tokens_as_token_ids` has it.
        """
        if self._to_bytes is None:
            return f"token_id:{token_id}"
        raw = self._to_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """OpenAI's chat entry: token, logprob, bytes."""
        raw = b"" if self._to_bytes is None else self._to_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}
