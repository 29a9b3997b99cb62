"""Server-sent events, cut out of body pieces after the run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n|\Z)")


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event.

    Attributes:
        time: arrival (`time.perf_counter` seconds) of the byte that ends its last data line.
        data: the data lines, joined with a newline.
        name: the `event:` field, "" when absent.
    """

    time: float
    data: bytes
    name: str


def parse_events(times: Sequence[float], pieces: Sequence[bytes]) -> list[SseEvent]:
    """Cut a body into events, whatever the pieces' boundaries.

    Lines end with LF, CRLF or CR; comments and unknown fields are skipped. What follows the last line end
    counts as
    a line and the end of the body ends an event: a server that leaves out the last newline loses nothing.

    Args:
        times: arrival of each piece, seconds, ascending.
        pieces: the body, cut anywhere.
    """
    body = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    names, datas, stamps = _split(body.removeprefix(b"\xef\xbb\xbf"), len(body))
    skipped = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    if not stamps:
        return []
    # A line that ends at offset p (its terminator's first byte) was whole when the piece holding byte p
    # arrived.
    offsets = np.minimum(np.asarray(stamps) + skipped, len(body) - 1)
    arrived = np.asarray(times)[np.searchsorted(ends, offsets, side="right")].tolist()
    return [SseEvent(*event) for event in zip(arrived, datas, names, strict=True)]


def _split(body: bytes, limit: int) -> tuple[list[str], list[bytes], list[int]]:
    """Return each event's name, data and the offset at which its last data line ends."""
    names: list[str] = []
    datas: list[bytes] = []
    stamps: list[int] = []
    name, lines, stamp = "", [], 0
    for match in _LINE.finditer(body):
        line = match.group(1)
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                lines.append(value)
                stamp = match.end(1)
            elif field == b"event":
                name = value.decode("utf-8", "replace")
        if not line or match.end() == len(body):
            # An event whose data is empty is none, by the standard: some servers ping with them.
            if lines and lines != [b""]:
                names.append(name)
                datas.append(b"\n".join(lines))
                stamps.append(min(stamp, limit))
            name, lines = "", []
    return names, datas, stamps
