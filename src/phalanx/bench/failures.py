"""Why requests failed: a server's message as one printable line, and the lines counted."""

from __future__ import annotations

import re
from collections import Counter

import orjson

from phalanx.bench.connection import RawRecord

_CAUSE_CHARS = 120
_MAX_CAUSES = 100
# What tells one request from another in a server's message: UUIDs and long hexadecimal ids.
_REQUEST_ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|(?<![0-9a-zA-Z])[0-9a-f]{16,}\b")


def count_causes(failures: list[str]) -> dict[str, int]:
    """Count failures by cause, the most frequent first; ids of requests make no causes of their own."""
    found = Counter(_REQUEST_ID.sub("<id>", failure) for failure in failures).most_common()
    counts = dict(found[:_MAX_CAUSES])
    if rest := found[_MAX_CAUSES:]:
        counts[f"{len(rest)} other causes"] = sum(count for _, count in rest)
    return counts


def status_text(record: RawRecord) -> str:
    """Say what a status other than 200 came with."""
    what = error_text(b"".join(record.pieces))
    if record.location:
        what = f"redirected to {record.location} (not followed: give that address)"
    return f"HTTP {record.status}: {what}".removesuffix(": ")


def error_text(body: bytes) -> str:
    """Return the message of an error body in the usual shapes, or its first characters."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace").strip()
    error = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(error, dict):
        for key in ("message", "detail", "type", "code"):
            if error.get(key):
                return str(error[key])
    return str(error)


def shorten(cause: str) -> str:
    """Return the cause in one printable line: a server's text must not steer the terminal."""
    cause = " ".join(cause.split())
    cause = "".join(c if c.isprintable() else "\ufffd" for c in cause[: _CAUSE_CHARS + 1])
    return cause if len(cause) <= _CAUSE_CHARS else cause[: _CAUSE_CHARS - 3] + "..."
