"""Sampling parameters, with SGLang's names and defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from phalanx.core.errors import RequestError

GREEDY_TEMPERATURE = 1e-5  # below this a row is greedy, as in SGLang
MAX_STOP_TOKEN_IDS = 16  # device columns per row, the model's own end tokens included
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096  # of all stop strings of a request: matching them costs memory per character
MIN_REPETITION_PENALTY = 1e-6  # a logit divided by less may not be finite in fp32
MAX_STOP_REGEXES = 8
_MAX_INT32 = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens of one request are chosen and when it ends.

    Attributes:
        max_new_tokens: at most this many output tokens; 0 runs the prompt only and returns nothing.
            None: whatever the context length leaves.
        temperature: 0 (below 1e-5) is argmax, whatever the other filters say.
        top_p: keep the smallest set of tokens whose probabilities reach this sum; 1 is off.
        top_k: keep the k likeliest tokens; -1 is off.
        min_p: drop tokens less likely than min_p times the likeliest; 0 is off.
        frequency_penalty: subtracted from a logit once per earlier *output* occurrence, in [-2, 2].
        presence_penalty: subtracted once if the token occurred in the *output*, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or
            output, in [1e-6, 2].
        min_new_tokens: the end tokens cannot be chosen before this many output tokens.
        stop: strings that end the text; the match itself is cut off unless no_stop_trim.
        stop_regex: regular expressions (RE2's kind) that end the text with the token that completes a match;
            nothing is cut off, as in SGLang.
        stop_token_ids: more token ids that end the request.
        ignore_eos: the model's own end tokens do not end the request (stop_token_ids still do).
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for SGLang's sake; the tokenizers library adds no such
            spaces, so either value gives the same text.
        no_stop_trim: keep the stop string or stop token in the text (vLLM: include_stop_str_in_output).
        n: independent outputs of one prompt.
        logit_bias: token id -> number added to its logit.
        sampling_seed: makes the outputs a function of the request alone; None draws one.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    logit_bias: dict[int, float] = {}
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        """Take what people naturally pass: one stop string, lists, NumPy scalars, None for nothing."""
        for name in ("stop", "stop_regex", "stop_token_ids"):
            value = getattr(self, name)
            if type(value) is not tuple:
                msgspec.structs.force_setattr(self, name, as_tuple(name, value))
        if type(self.logit_bias) is not dict:
            msgspec.structs.force_setattr(self, "logit_bias", _as_dict("logit_bias", self.logit_bias))
        for name in _SCALARS:
            value = getattr(self, name)
            if hasattr(value, "dtype") and hasattr(value, "item"):
                msgspec.structs.force_setattr(self, name, value.item())

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the argmax."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    def check(self, vocab_size: int) -> None:
        """Raise RequestError for any value out of range; `vocab_size` bounds token ids."""
        if self.max_new_tokens is not None:
            check_integer("max_new_tokens", self.max_new_tokens, 0, None)
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise _bad("top_p", "must be in (0, 1], got 0")
        check_integer("top_k", self.top_k, -1, _MAX_INT32)
        if self.top_k == 0:
            raise _bad("top_k", "must be -1 (off) or at least 1, got 0")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 2.0)
        check_integer("min_new_tokens", self.min_new_tokens, 0, None)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _bad(
                "min_new_tokens", f"is {self.min_new_tokens}, above max_new_tokens {self.max_new_tokens}"
            )
        check_integer("n", self.n, 1, 1024)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, got {getattr(self, name)!r}")
        if self.sampling_seed is not None:
            check_integer("sampling_seed", self.sampling_seed, -(2**63), 2**63 - 1)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise _bad("stop", "must be non-empty strings")
        if len(self.stop) > MAX_STOP_STRINGS or sum(map(len, self.stop)) > MAX_STOP_CHARS:
            raise _bad(
                "stop", f"may hold at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters in all"
            )
        if any(not isinstance(s, str) or not s for s in self.stop_regex):
            raise _bad("stop_regex", "must be non-empty strings")
        if len(self.stop_regex) > MAX_STOP_REGEXES:
            raise _bad("stop_regex", f"may hold at most {MAX_STOP_REGEXES} expressions")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS // 2:
            raise _bad("stop_token_ids", f"may hold at most {MAX_STOP_TOKEN_IDS // 2} ids")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0, vocab_size - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _bad("logit_bias", f"may hold at most {MAX_LOGIT_BIAS} entries")
        for token, bias in self.logit_bias.items():
            check_integer("logit_bias", token, 0, vocab_size - 1)
            _number("logit_bias", bias, -100.0, 100.0)


_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_SCALARS = (
    *_FLAGS,
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "sampling_seed",
)


def plain(value: Any) -> Any:
    """A NumPy scalar as Python's; anything else as it is."""
    return value.item() if hasattr(value, "dtype") and hasattr(value, "item") else value


def as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """What people naturally pass for a list, as a tuple of plain values; a RequestError for anything else."""
    if value is None:
        return ()
    if isinstance(value, str | int):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, dict | bytes):
        return tuple(plain(item) for item in value)
    raise _bad(name, f"must be a list, got {value!r}")


def _as_dict(name: str, value: Any) -> dict[Any, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    raise _bad(name, f"must map token ids to numbers, got {value!r}")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _bad(name: str, what: str) -> RequestError:
    return RequestError(f"{name} {what}", param=name, code="invalid_value")


def _number(name: str, value: Any, low: float, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise _bad(name, f"must be a finite number, got {value!r}")
    if value < low or (high is not None and value > high):
        span = f"at least {low:g}" if high is None else f"in [{low:g}, {high:g}]"
        raise _bad(name, f"must be {span}, got {value!r}")


def check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    """Raise a RequestError naming the field unless `value` is an integer in [low, high] (None: endless)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, f"must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise _bad(name, f"must be {span}, got {value!r}")
