"""Stop strings: where a growing text ends, and how much of it may be shown already."""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache


class StopAutomaton:
    """Aho-Corasick automaton over the stop strings of a request; immutable, shared by all its streams.

    A match is the first one to complete, reading character by character; of those that complete at the same
    character, the longest. So the cut depends on the text alone, not on how it was split into tokens.

    Attributes:
        depth: [num_states] length of the longest suffix of the text read so far that begins a stop string.
        find_first: finds the first character of a text that begins any stop string (`re.Pattern.search`).
        match_len: [num_states] length of the longest stop string that ends in this state, 0 for none.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not stops or any(not stop for stop in stops):
            raise ValueError("stop strings must be non-empty")
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match_len = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        # From the start state nothing but these characters matters: one C-level scan skips the rest.
        self.find_first = re.compile("[" + "".join(re.escape(c) for c in self._next[0]) + "]").search

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            target = self._next[state].get(char)
            if target is None:
                target = len(self._next)
                self._next[state][char] = target
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match_len.append(0)
            state = target
        self.match_len[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self._next[state].items():
                self._fail[target] = self._step(self._fail[state], char)
                if not self.match_len[target]:
                    self.match_len[target] = self.match_len[self._fail[target]]
                queue.append(target)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """Read `text` from `state`; returns (new state, end), end -1 or where in `text` a match completed."""
        position, length = 0, len(text)
        while position < length:
            if not state:
                first = self.find_first(text, position)
                if first is None:
                    return 0, -1
                position = first.start()
            state = self._step(state, text[position])
            position += 1
            if self.match_len[state]:
                return state, position
        return state, -1


@lru_cache(maxsize=1024)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings; requests that share them share it."""
    return StopAutomaton(stops)


class StopMatcher:
    """Follows one text. What could be the beginning of a stop string is held back.

    Args:
        stops: non-empty strings.
        keep_match: the text keeps the stop string itself (`no_stop_trim`).
    """

    __slots__ = ("_automaton", "_find_first", "_held", "_keep_match", "_state")

    def __init__(self, stops: tuple[str, ...], *, keep_match: bool) -> None:
        self._automaton = stop_automaton(stops)
        self._find_first = self._automaton.find_first
        self._keep_match = keep_match
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Read more text; returns (what may be shown now, the stop string that matched or None).

        With a match, what is shown ends there, nothing is held, and the matcher must not be fed again.
        """
        if not self._state and self._find_first(text) is None:
            return text, None
        automaton = self._automaton
        state, end = automaton.scan(self._state, text)
        if end < 0:
            self._state = state
            num_held = automaton.depth[state]
            # Never negative: the held suffix is part of what was held before plus `text`.
            text = self._held + text
            shown = len(text) - num_held
            self._held = text[shown:]
            return text[:shown], None
        end += len(self._held)
        text = self._held + text
        start = end - automaton.match_len[state]
        self._held = ""
        return text[: end if self._keep_match else start], text[start:end]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held, self._state = self._held, "", 0
        return held
