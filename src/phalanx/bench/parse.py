"""From raw records to outcomes: what came when, or why a request failed. Runs after the load is over."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field

import msgspec
import numpy as np

from phalanx.bench.backends import Flavor
from phalanx.bench.connection import RawRecord
from phalanx.bench.events import (
    NativeEvent,
    OpenAiEvent,
    abort_message,
    decode_native,
    decode_openai,
    is_error,
    is_given_up,
    num_ids,
    says,
)
from phalanx.bench.failures import error_text, shorten, status_text
from phalanx.bench.sse import parse_events


class _Bad(Exception):
    """The response means failure; the message is the cause that is counted and printed."""


class CountSource(enum.Enum):
    """Where the number of a request's output tokens comes from."""

    SERVER = "server"
    RETOKENIZED = "retokenized"


@dataclass(slots=True)
class Outcome:
    """One request, understood. Times are `time.perf_counter` seconds; None is "not measured".

    Attributes:
        index: position in the run's request list.
        start: the zero of TTFT and E2E latency.
        end: arrival of the last line ([DONE] included), or of the failure.
        failure: cause, or None for a success. A failed request enters no metric.
        text: everything generated.
        num_output_tokens: as the server says; None when it does not.
        num_prompt_tokens: as the server says; None when it does not.
        num_cached_tokens: prompt tokens served from the prefix cache, as the server says, or None.
        event_times: [num_events] float64, arrivals of the chunks that carried text.
        event_tokens: [num_events] int64, tokens that came with each of them; None when the server counts only
            in total or not at all (`chunk_texts` then holds what came).
        chunk_texts: text of each chunk, only when event_tokens is None.
    """

    index: int
    start: float
    end: float
    failure: str | None = None
    text: str = ""
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    event_times: np.ndarray = field(default_factory=lambda: np.empty(0))
    event_tokens: np.ndarray | None = field(default_factory=lambda: np.empty(0, np.int64))
    chunk_texts: list[str] = field(default_factory=list)

    @property
    def success(self) -> bool:
        """Whether the whole answer arrived without an error."""
        return self.failure is None

    @property
    def ttft(self) -> float | None:
        """Seconds from start to the first chunk with text; None when no chunk had any."""
        return float(self.event_times[0]) - self.start if len(self.event_times) else None

    @property
    def in_one_piece(self) -> bool:
        """Whether all text of a stream came at one instant, so that nothing is known of its tokens' pace."""
        return len(self.event_times) > 0 and bool(self.event_times[0] == self.event_times[-1])

    @property
    def latency(self) -> float:
        """E2E latency in seconds."""
        return self.end - self.start


@dataclass(slots=True)
class _Stream:
    """The chunks of one stream as lists: arrival, text as sent, cumulative token count or None.

    num_events counts all events, num_known those that have the fields of the asked API.
    """

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    counts: list[int | None] = field(default_factory=list)
    total: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    cumulative_ids: bool | None = None
    num_events: int = 0
    num_known: int = 0


def parse_record(record: RawRecord, flavor: Flavor, stream: bool) -> Outcome:
    """Turn one raw record into an outcome; whatever is wrong with it becomes `Outcome.failure`.

    Args:
        record: as the worker left it.
        flavor: which API answered.
        stream: whether events were asked for.
    """
    outcome = Outcome(record.index, record.start, record.end)
    try:
        if record.failure is not None:
            # An error event may have come before the cut: it says more than the cut does.
            if record.status == 200 and stream:
                _read_stream(record, flavor)
            raise _Bad(record.failure)
        if record.status != 200:
            raise _Bad(status_text(record))
        if record.encoding:
            raise _Bad(f"the answer is compressed ({record.encoding}), which was not asked for")
        if stream:
            events, done = _read_stream(record, flavor)
            if not done:
                raise _Bad(_without_end(record, events))
            _require_known(events, flavor, "event")
            _fill_from_stream(outcome, events, flavor)
        else:
            _fill_from_body(outcome, b"".join(record.pieces), flavor)
    except _Bad as bad:
        outcome = Outcome(record.index, record.start, record.end, failure=shorten(str(bad)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"malformed {'event' if stream else 'answer'}: {error}"
        outcome = Outcome(record.index, record.start, record.end, failure=shorten(what))
    return outcome


def _read_stream(record: RawRecord, flavor: Flavor) -> tuple[_Stream, bool]:
    """Read the events. Return what they carried and whether [DONE] came.

    Raises:
        _Bad: an error event or an event that cannot be read.
    """
    stream = _Stream()
    cut = record.failure is not None
    for event in parse_events(record.times, record.pieces):
        if event.data == b"[DONE]":
            return stream, True
        if event.name == "error":
            raise _Bad(f"error event: {error_text(event.data)}")
        try:
            _read(stream, event.time, event.data, flavor, "event")
        except msgspec.DecodeError:
            # A response that was cut may end inside an event.
            if cut:
                break
            raise
    return stream, False


def _without_end(record: RawRecord, stream: _Stream) -> str:
    """Say what is wrong with a 200 answer that has no [DONE]; one that is no stream at all is shown."""
    if stream.num_events or not (body := error_text(b"".join(record.pieces))):
        return "stream ended without [DONE]"
    return f"answer without events: {body}"


def _require_known(stream: _Stream, flavor: Flavor, what: str) -> None:
    """Refuse an answer in the shape of another API: it would count as one of no tokens."""
    if stream.num_events and not stream.num_known:
        fields = "text, output_ids or meta_info" if flavor is Flavor.NATIVE else "choices with text"
        raise _Bad(f"malformed {what}: no {fields} (is --backend right?)")


def _read(stream: _Stream, time: float, data: bytes, flavor: Flavor, what: str) -> None:
    """Read one event or a whole answer.

    Raises:
        _Bad: an error report.
        msgspec.DecodeError: it cannot be read.
    """
    event: NativeEvent | OpenAiEvent
    event = decode_native(data) if flavor is Flavor.NATIVE else decode_openai(data)
    if is_error(event):
        raise _Bad(f"error {what}: {error_text(data)}")
    stream.num_events += 1
    if isinstance(event, NativeEvent):
        stream.num_known += event.text is not None or event.meta_info is not None or says(event.output_ids)
        _read_native(stream, time, event)
    else:
        stream.num_known += _is_known(event, what)
        _read_openai(stream, time, event)


def _is_known(event: OpenAiEvent, what: str) -> bool:
    """Whether a choice says something, or there is none because this is the event with the usage."""
    if event.choices:
        return any(c.text is not None or c.delta is not None or c.message is not None for c in event.choices)
    return what == "event" and event.choices is not None and event.usage is not None


def _read_native(stream: _Stream, time: float, event: NativeEvent) -> None:
    meta = event.meta_info
    if (message := abort_message(meta)) is not None:
        raise _Bad(f"aborted by the server: {message}")
    count = None
    if meta is not None:
        count = _note_counts(stream, meta.completion_tokens, meta.prompt_tokens, meta.cached_tokens)
    length = num_ids(event.output_ids)
    if length is not None and count and length != count:
        stream.cumulative_ids = False
    elif length is not None and count and stream.cumulative_ids is None and stream.times:
        stream.cumulative_ids = True
    _add_chunk(stream, time, event.text or "", count)


def _read_openai(stream: _Stream, time: float, event: OpenAiEvent) -> None:
    count, usage = None, event.usage
    if usage is not None:
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        count = _note_counts(stream, usage.completion_tokens, usage.prompt_tokens, cached)
    if event.choices:
        choice = event.choices[0]
        if choice.finish_reason is not None and is_given_up(choice):
            raise _Bad(f"given up by the server: finish_reason {choice.finish_reason}")
        said = choice.delta or choice.message
        text = choice.text or ""
        if said is not None:
            text = (said.reasoning_content or said.reasoning or "") + (said.content or "")
        _add_chunk(stream, time, text, count)


def _note_counts(stream: _Stream, output: int | None, prompt: int | None, cached: int | None) -> int | None:
    """Keep what an event says about token counts; return the output tokens so far, if it says that."""
    stream.total = stream.total if output is None else output
    stream.num_prompt_tokens = stream.num_prompt_tokens if prompt is None else prompt
    stream.num_cached_tokens = stream.num_cached_tokens if cached is None else cached
    return output


def _add_chunk(stream: _Stream, time: float, text: str, count: int | None) -> None:
    """Note a chunk.

    One without text shows a reader nothing: the tokens it may have had (half a character, a special token)
    are counted with the next text.
    """
    if text:
        stream.times.append(time)
        stream.texts.append(text)
        stream.counts.append(count)


def _fill_from_stream(outcome: Outcome, stream: _Stream, flavor: Flavor) -> None:
    deltas = stream.texts
    outcome.text, deltas = _native_texts(stream) if flavor is Flavor.NATIVE else ("".join(deltas), deltas)
    _fill_counts(outcome, stream)
    times = np.asarray(stream.times, np.float64)
    if not len(times):
        return
    if None not in stream.counts:
        outcome.event_times, outcome.event_tokens = _spread_counts(times, np.asarray(stream.counts, np.int64))
    elif stream.total == len(times):
        # As many chunks with text as tokens: one each.
        outcome.event_times, outcome.event_tokens = times, np.ones(len(times), np.int64)
    else:
        outcome.event_times, outcome.event_tokens, outcome.chunk_texts = times, None, deltas


def _spread_counts(times: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Turn cumulative counts into tokens per chunk; a chunk without a new token is joined to the next."""
    counts = np.maximum(counts, 1)
    if np.any(np.diff(counts) < 0):
        raise _Bad("malformed event: token count went down")
    new = np.diff(counts, prepend=0)
    keep = new > 0
    return times[keep], new[keep]


def _native_texts(stream: _Stream) -> tuple[str, list[str]]:
    """Return the whole text and each chunk's own.

    SGLang sends the text so far in every chunk, unless it was started with incremental output. Where
    output_ids do not tell which it is, a text that does not continue the one before does.
    """
    texts = stream.texts
    cumulative = stream.cumulative_ids
    if cumulative is None:
        cumulative = all(new.startswith(old) for old, new in itertools.pairwise(texts))
    if not cumulative or not texts:
        return "".join(texts), texts
    starts = [0, *map(len, texts[:-1])]
    return texts[-1], [text[start:] for text, start in zip(texts, starts, strict=True)]


def _fill_from_body(outcome: Outcome, body: bytes, flavor: Flavor) -> None:
    """Read a whole answer. Nothing but its end was observed, so no chunk times are made up."""
    stream = _Stream()
    _read(stream, outcome.end, body, flavor, "answer")
    _require_known(stream, flavor, "answer")
    outcome.text = "".join(stream.texts)
    _fill_counts(outcome, stream)


def _fill_counts(outcome: Outcome, stream: _Stream) -> None:
    outcome.num_output_tokens = stream.total
    outcome.num_prompt_tokens = stream.num_prompt_tokens
    outcome.num_cached_tokens = stream.num_cached_tokens
