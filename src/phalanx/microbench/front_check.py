"""Whether an answer says exactly what the null engine said: nothing lost, doubled or out of order."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "incremental": "/generate",
    "cumulative": "/generate",
}


class Mismatch(Exception):
    """The answer is not what it should be; the message says where."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come. text: of all ids together."""

    ids: list[int]
    text: str


def split_answer(answer: bytes) -> tuple[int, bytes]:
    """HTTP status and body, transfer coding removed.

    Raises:
        Mismatch: it is no HTTP answer, or its chunks do not fit.
    """
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator or not head.startswith(b"HTTP/1.1 "):
        raise Mismatch(f"no HTTP answer: {answer[:80]!r}")
    status = int(head[9:12])
    if b"transfer-encoding: chunked" not in head.lower():
        return status, body
    parts, at = [], 0
    while True:
        end = body.find(b"\r\n", at)
        if end < 0:
            raise Mismatch("the last chunk is missing")
        size = int(body[at:end], 16)
        if size == 0:
            if body[end:] != b"\r\n\r\n":
                raise Mismatch("bytes after the last chunk")
            return status, b"".join(parts)
        at = end + 2 + size
        if body[at : at + 2] != b"\r\n":
            raise Mismatch("a chunk is longer or shorter than it says")
        parts.append(body[end + 2 : at])
        at += 2


def check_stream(kind: str, answer: bytes, expected: Expected) -> int:
    """Compare a streamed answer with what must come; returns the number of its events that bring tokens.

    kind: "chat", "completions", "incremental" (/generate with deltas) or "cumulative".

    Raises:
        Mismatch: anything is different.
    """
    status, body = split_answer(answer)
    if status != 200:
        raise Mismatch(f"HTTP status {status}: {body[:200]!r}")
    *events, rest = body.split(b"\n\n")
    if rest or not events or events[-1] != b"data: [DONE]":
        raise Mismatch(f"the stream does not end with [DONE]: {body[-80:]!r}")
    items = []
    for event in events[:-1]:
        if not event.startswith(b"data: "):
            raise Mismatch(f"no event: {event[:80]!r}")
        items.append(json.loads(event[6:]))
    if kind in ("chat", "completions"):
        return _check_openai(kind, items, expected)
    return _check_generate(items, expected, is_incremental=kind == "incremental")


def _check_openai(kind: str, items: list[dict[str, Any]], expected: Expected) -> int:
    num_events, length, reason = 0, 0, None
    for item in items:
        (choice,) = item["choices"]
        text = choice["delta"].get("content") if kind == "chat" else choice["text"]
        if reason is not None:
            raise Mismatch("an event after the finish reason")
        reason = choice["finish_reason"]
        if text:
            if not expected.text.startswith(text, length):
                raise Mismatch(f"{text!r} at character {length}, not {expected.text[length : length + 20]!r}")
            length += len(text)
            num_events += 1
    _check_end(length, len(expected.text), "characters", reason)
    return num_events


def _check_generate(items: list[dict[str, Any]], expected: Expected, *, is_incremental: bool) -> int:
    num_events = num_ids = num_chars = 0
    reason = None
    for item in items:
        if reason is not None:
            raise Mismatch("an event after the finish reason")
        text, ids, meta = item["text"], item["output_ids"], item["meta_info"]
        if not is_incremental:
            if ids[:num_ids] != expected.ids[:num_ids] or text[:num_chars] != expected.text[:num_chars]:
                raise Mismatch(f"the first {num_ids} tokens are not what was said before")
            text, ids = text[num_chars:], ids[num_ids:]
        if ids != expected.ids[num_ids : num_ids + len(ids)]:
            raise Mismatch(f"ids {ids[:8]} after {num_ids}, not {expected.ids[num_ids : num_ids + 8]}")
        if not expected.text.startswith(text, num_chars):
            raise Mismatch(f"{text!r} at character {num_chars}")
        num_ids, num_chars = num_ids + len(ids), num_chars + len(text)
        num_events += bool(ids)
        if meta["completion_tokens"] != num_ids:
            raise Mismatch(f"completion_tokens is {meta['completion_tokens']} after {num_ids} ids")
        if meta["finish_reason"] is not None:
            reason = meta["finish_reason"]["type"]
    if num_chars != len(expected.text):
        raise Mismatch(f"{num_chars} of {len(expected.text)} characters came")
    _check_end(num_ids, len(expected.ids), "ids", reason)
    return num_events


def check_whole(kind: str, answer: bytes, expected: Expected) -> None:
    """Compare an answer that is not streamed; kinds as in `check_stream`.

    Raises:
        Mismatch: anything is different.
    """
    status, body = split_answer(answer)
    if status != 200:
        raise Mismatch(f"HTTP status {status}: {body[:200]!r}")
    item = json.loads(body)
    if kind == "chat":
        text, reason = item["choices"][0]["message"]["content"], item["choices"][0]["finish_reason"]
    elif kind == "completions":
        text, reason = item["choices"][0]["text"], item["choices"][0]["finish_reason"]
    else:
        text, reason = item["text"], item["meta_info"]["finish_reason"]["type"]
        if item["output_ids"] != expected.ids:
            raise Mismatch(f"ids {item['output_ids'][:8]}, not {expected.ids[:8]}")
    if text != expected.text:
        raise Mismatch(f"text {text[:40]!r}, not {expected.text[:40]!r}")
    _check_end(len(text), len(expected.text), "characters", reason)


def _check_end(got: int, wanted: int, unit: str, reason: str | None) -> None:
    if got != wanted:
        raise Mismatch(f"{got} of {wanted} {unit} came")
    if reason != "length":
        raise Mismatch(f"the finish reason is {reason!r}")
