"""What one output sequence says: ids become text, stop strings end it, and nothing past the end is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.core.errors import RequestError
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish
from phalanx.text.detokenizer import Detokenizer, DetokState
from phalanx.text.stop_regex import RegexStops
from phalanx.text.stop_strings import StopMatcher

FinishKind = Literal["stop", "length", "abort", "error"]


class FinishReason(msgspec.Struct, frozen=True, gc=False):
    """Why a sequence ended.

    kind: "stop", "length", "abort" or "error". matched: the stop string or the stop token id, else None.
    """

    kind: FinishKind
    matched: str | int | None = None


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What one push adds.

    text: safe to show now; None without a tokenizer. num_tokens: how many of the pushed ids count, from the
    first on; the rest lie beyond a stop. finish_reason: set once, in the delta that ends the sequence.
    """

    text: str | None
    num_tokens: int
    finish_reason: FinishReason | None = None


_KINDS: dict[int, FinishKind] = {Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}


class TextStream:
    """One output sequence.

    Text that could begin a stop string is held back until that is settled. When a stop string completes, the
    text is cut before it (after it with `no_stop_trim`), the tokens after the completing one are dropped, and
    later pushes are ignored: the caller aborts the request. A stop *token* (the last id pushed, with
    `Finish.STOP`) stays in the ids and counts; its text is left out unless `no_stop_trim`. Stop strings are
    looked for from the first token on, whatever `min_new_tokens` says. A stop regex ends the text with the
    token that completes a match, of which nothing is cut off.

    Args:
        detokenizer: None runs without text: `text` and `output_text` are None.
        sampling: its stop, stop_regex, no_stop_trim and skip_special_tokens are used.

    Raises:
        RequestError: stop strings or expressions without a tokenizer, or an expression that cannot be used.
    """

    __slots__ = ("_ids", "_is_plain", "_keep_stop", "_matcher", "_parts", "_reason", "_regexes", "_state")

    def __init__(self, detokenizer: Detokenizer | None, sampling: SamplingParams) -> None:
        if detokenizer is None and (sampling.stop or sampling.stop_regex):
            name = "stop" if sampling.stop else "stop_regex"
            raise RequestError(
                f"{name} needs a tokenizer, and this server runs without one", param=name, code="no_tokenizer"
            )
        self._state: DetokState | None = None
        if detokenizer is not None:
            self._state = detokenizer.new_state(sampling.skip_special_tokens)
        self._keep_stop = sampling.no_stop_trim
        self._matcher = (
            StopMatcher(sampling.stop, keep_match=sampling.no_stop_trim) if sampling.stop else None
        )
        self._regexes = RegexStops(sampling.stop_regex) if sampling.stop_regex else None
        # Not finished either, later on.
        self._is_plain = self._state is not None and self._matcher is None and self._regexes is None
        self._ids: list[int] = []
        self._parts: list[str] = []
        self._reason: FinishReason | None = None

    @property
    def output_ids(self) -> list[int]:
        """All ids that count so far: the stream's own list, to be read only."""
        return self._ids

    @property
    def output_text(self) -> str | None:
        """All text shown so far; None without a tokenizer."""
        if self._state is None:
            return None
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def is_plain(self) -> bool:
        """Whether ids just become text: there is a tokenizer, nothing to look for, and it goes on."""
        return self._is_plain

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it goes on."""
        return self._reason

    def push(
        self, ids: Sequence[int] | npt.NDArray[np.int32], finish: Finish | int = Finish.NONE
    ) -> TextDelta:
        """Append the next ids.

        Args:
            ids: [k] ids in [0, vocab_size), k >= 0; a list is fastest.
            finish: NONE, or why the sequence ends with the last of these ids.
        """
        if type(ids) is not list:
            ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._is_plain and not finish:
            text = self._state.push(ids)  # type: ignore[union-attr]
            self._ids += ids
            self._parts.append(text)
            return TextDelta(text, len(ids))
        if self._reason is not None:
            return TextDelta(None if self._state is None else "", 0)
        return self._push_end(ids, Finish(finish)) if finish else self._push_more(ids)

    def push_whole(self, token: int) -> bytes | None:
        """Append one id if it simply adds its own text, or do nothing.

        Returns:
            The text as it stands inside a JSON string (from a table, so this is several times as fast as
            `push` and an encoder), or None: the id must go through `push`.
        """
        if not self._is_plain:
            return None
        state = self._state
        whole = state.whole  # type: ignore[union-attr]
        if whole is None or state.held:  # type: ignore[union-attr]
            return None
        piece = whole.json[token]
        if piece is not None:
            self._ids.append(token)
            self._parts.append(whole.texts[token])  # type: ignore[arg-type]
        return piece

    def _push_more(self, ids: list[int]) -> TextDelta:
        """Stop strings to look for, or no text at all."""
        text, num_kept, matched = self._advance(ids)
        reason = None if matched is None else FinishReason("stop", matched)
        return self._keep(ids[:num_kept], text, reason)

    def _push_end(self, ids: list[int], finish: Finish) -> TextDelta:
        stop_token = ids[-1] if finish == Finish.STOP and ids else None
        hides_last = stop_token is not None and not self._keep_stop
        text, num_kept, matched = self._advance(ids[:-1] if hides_last else ids)
        if matched is None:
            num_kept = len(ids)
            tail, matched = self._flush()
            text = None if text is None else text + tail
        if matched is not None:
            reason = FinishReason("stop", matched)
        else:
            reason = (
                FinishReason("stop", stop_token) if finish == Finish.STOP else FinishReason(_KINDS[finish])
            )
        return self._keep(ids[:num_kept], text, reason)

    def _keep(self, ids: list[int], text: str | None, reason: FinishReason | None) -> TextDelta:
        self._ids += ids
        if text:
            self._parts.append(text)
        if reason is not None:
            self._reason = reason
            self._is_plain = False
        return TextDelta(text, len(ids), reason)

    def _advance(self, ids: list[int]) -> tuple[str | None, int, str | None]:
        """Text of `ids`, how many of them count, and the stop string or expression that completed."""
        state, matcher = self._state, self._matcher
        if state is None:
            return None, len(ids), None
        if self._regexes is not None:
            return self._advance_with_regexes(ids, self._regexes)
        if matcher is None:
            return state.push(ids), len(ids), None
        if len(ids) == 1:
            text, matched = matcher.feed(state.push(ids))
            return text, 1, matched
        parts = []
        # One by one: the token that completes a stop string must be known, to drop those after it.
        for num_read, token in enumerate(ids, 1):
            text, matched = matcher.feed(state.push([token]))
            parts.append(text)
            if matched is not None:
                return "".join(parts), num_read, matched
        return "".join(parts), len(ids), None

    def _advance_with_regexes(self, ids: list[int], regexes: RegexStops) -> tuple[str, int, str | None]:
        """The same where expressions are looked for; a stop string that the same token completes wins."""
        assert self._state is not None
        parts = []
        for num_read, token in enumerate(ids, 1):
            text, matched = self._state.push([token]), None
            expression = regexes.feed(text)
            if self._matcher is not None:
                text, matched = self._matcher.feed(text)
                if matched is None and expression is not None:
                    text += self._matcher.flush()
            parts.append(text)
            if matched is not None or expression is not None:
                return "".join(parts), num_read, matched if matched is not None else expression
        return "".join(parts), len(ids), None

    def _flush(self) -> tuple[str, str | None]:
        """Everything held back, at the end; an unfinished character may still complete a stop string."""
        if self._state is None:
            return "", None
        tail = self._state.finish()
        if self._matcher is None:
            return tail, None
        text, matched = self._matcher.feed(tail)
        return (text, matched) if matched is not None else (text + self._matcher.flush(), None)
