"""Stop strings: where a growing text ends, and how much of it may be shown already."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache


class StopMatcher:
    """Follows one text. What could be the beginning of a stop string is held back.

    A match is the first one to complete, reading character by character; of those that complete at the same
    character, the longest. So the cut depends on the text alone, not on how it was split into tokens.

    Each stop string that the text has begun is followed by itself, after Knuth, Morris and Pratt, with a
    table that grows only as far as the text has come. So a matcher costs next to nothing until then, however
    long its stop strings are, and each character is read in constant time on average.

    Args:
        stops: non-empty strings.
        keep_match: the text keeps the stop string itself (`no_stop_trim`).

    Raises:
        ValueError: no stop strings, or an empty one.
    """

    __slots__ = ("_begun", "_find_first", "_held", "_keep_match", "_stops")

    def __init__(self, stops: tuple[str, ...], *, keep_match: bool) -> None:
        if not stops or not all(stops):
            raise ValueError("stop strings must be non-empty")
        self._stops = stops if len(stops) == 1 else tuple(dict.fromkeys(stops))
        self._find_first = _finder("".join([stop[0] for stop in stops]))
        self._keep_match = keep_match
        self._begun: dict[str, _Progress] = {}
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Read more text; returns (what may be shown now, the stop string that matched or None).

        With a match, what is shown ends there, nothing is held, and the matcher must not be fed again.
        """
        if not self._held and not self._find_first(text):
            return text, None
        matched, end = self._read(text)
        end += len(self._held)
        text = self._held + text
        if matched is not None:
            self._held = ""
            return text[: end if self._keep_match else end - len(matched)], matched
        num_held = max((progress.matched for progress in self._begun.values()), default=0)
        # Never negative: the held suffix is part of what was held before plus what was read now.
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown], None

    def _read(self, text: str) -> tuple[str | None, int]:
        """The stop string that completes first and where in `text` it ends, or (None, 0)."""
        matched, limit = None, len(text)
        begun: dict[str, _Progress] = {}
        for stop in self._stops:
            progress = self._begun.get(stop)
            if progress is None:
                if text.find(stop[0], 0, limit) < 0:
                    continue
                progress = _Progress(stop)
            end = progress.read(text, limit)
            if end >= 0:
                if matched is None or end < limit or len(stop) > len(matched):
                    matched, limit = stop, end
            elif progress.matched:
                begun[stop] = progress
        self._begun = begun
        return matched, limit if matched is not None else 0

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        self._begun.clear()
        return held


class _Progress:
    """How much of one stop string the text read so far ends with.

    matched: characters of it; less than all of it before a match.
    fail: fail[k], for k up to the largest `matched` so far, is the length of the longest text shorter than k
        that the stop string's first k characters begin and end with.
    """

    __slots__ = ("fail", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self.fail = [0, 0]

    def read(self, text: str, limit: int) -> int:
        """Read text[:limit]; returns where the stop string is complete, or -1."""
        stop, fail, matched, position = self.stop, self.fail, self.matched, 0
        while position < limit:
            if matched:
                char = text[position]
                while matched and stop[matched] != char:
                    matched = fail[matched]
                matched += stop[matched] == char
            else:  # nothing but its first character matters: one search in C skips the rest
                position = text.find(stop[0], position, limit)
                if position < 0:
                    break
                matched = 1
            position += 1
            if matched == len(stop):
                self.matched = matched
                return position
            if matched == len(fail):
                self._grow()
        self.matched = matched
        return -1

    def _grow(self) -> None:
        """One more entry of the table."""
        stop, fail = self.stop, self.fail
        char, border = stop[len(fail) - 1], fail[-1]
        while border and stop[border] != char:
            border = fail[border]
        fail.append(border + (stop[border] == char))


@lru_cache(maxsize=256)
def _finder(chars: str) -> Callable[[str], re.Match[str] | None]:
    """Finds the first character of a text that is one of `chars`."""
    return re.compile("[" + "".join(map(re.escape, chars)) + "]").search
