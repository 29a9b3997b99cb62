"""OpenAI's shapes of an answer: chat and text completions, whole and streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.server.facts import NUM_CACHED_TOKENS, WEIGHT_VERSION
from phalanx.server.lanes import DeltaLane
from phalanx.server.logprobs import Positions, TokenTexts
from phalanx.server.response import encode_json
from phalanx.server.sessions import Call, OutputStream


class Envelope:
    """What all objects of one response share.

    Args:
        kind: "chat.completion" or "text_completion".
        model: the model's served name.
    """

    def __init__(self, kind: str, model: str) -> None:
        prefix = "chatcmpl-" if kind == "chat.completion" else "cmpl-"
        self._fields = {"id": prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}
        self._whole_kind = kind
        self._chunk_kind = "chat.completion.chunk" if kind == "chat.completion" else kind
        # {"id":..,"object":..,"created":..,"model":..   without the closing brace
        self.head = b"data: " + encode_json({**self._fields, "object": self._chunk_kind})[:-1]

    @property
    def id(self) -> str:
        """The response's id."""
        return str(self._fields["id"])

    def chunk(self, **fields: Any) -> bytes:
        """One event."""
        return self.head + b"," + encode_json(fields)[1:] + b"\n\n"

    def whole_head(self) -> bytes:
        """The body of a response that is not streamed, up to the comma before its choices."""
        return encode_json({**self._fields, "object": self._whole_kind})[:-1] + b","


class ChoiceForm(Protocol):
    """What differs between chat and text completions."""

    def first(self, stream: OutputStream) -> dict[str, Any] | None:
        """The choice of the chunk before any text, if there is one."""
        ...

    def delta(self, stream: OutputStream, text: str, start: int) -> dict[str, Any]:
        """The choice of a chunk with `text` and the tokens from number `start` on."""
        ...

    def last(self, stream: OutputStream) -> dict[str, Any]:
        """The choice of the chunk that carries the finish reason."""
        ...

    def whole(self, stream: OutputStream) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        ...

    def between(self, index: int) -> tuple[bytes, bytes]:
        """Bytes before and after the JSON string of a plain delta, from the comma after the envelope on."""
        ...


@dataclass(frozen=True, slots=True)
class UsageForm:
    """Which counts are told, beside those that every whole answer has.

    in_last_chunk: a stream ends with a chunk of counts and no choices.
    in_every_chunk: each chunk has the counts of its own choice so far.
    with_cached: `prompt_tokens_details` says how much of the prompt was cached.
    """

    in_last_chunk: bool = False
    in_every_chunk: bool = False
    with_cached: bool = False

    def of(self, streams: Iterable[OutputStream]) -> dict[str, Any]:
        """OpenAI's usage; a prompt with several outputs counts once."""
        prompts: dict[int, int] = {}
        output = 0
        for stream in streams:
            prompts[id(stream.request.input_ids)] = stream.num_prompt_tokens
            output += stream.num_output_tokens
        prompt = sum(prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": NUM_CACHED_TOKENS} if self.with_cached else None,
            "reasoning_tokens": 0,
        }


class OpenAIForm:
    """Answers of both OpenAI routes.

    Args:
        with_ids: choices carry their token ids.
    """

    fails_whole = True
    repeats_logprobs = False

    def __init__(
        self, envelope: Envelope, choices: ChoiceForm, usage: UsageForm, *, with_ids: bool = False
    ) -> None:
        self._envelope = envelope
        self._choices = choices
        self._usage = usage
        self._with_ids = with_ids
        self._is_plain = not (with_ids or usage.in_every_chunk)  # a delta is nothing but text

    def chunk(self, stream: OutputStream) -> bytes:
        """Events for what is new: a role or prompt first, the text, the finish reason once."""
        parts = []
        if not stream.has_started:
            first = self._choices.first(stream)
            if first is not None:
                parts.append(self._chunk(stream, first))
        text, stream.unsent_text = stream.unsent_text, ""
        start, stream.num_sent = stream.num_sent, stream.num_output_tokens
        if stream.num_sent > start and (self._with_ids or stream.logprobs is not None):
            delta = self._choices.delta(stream, text, start)
            if self._with_ids:
                delta["token_ids"] = stream.text.output_ids[start:]
            parts.append(self._chunk(stream, delta))
        elif text and not self._is_plain:
            parts.append(self._chunk(stream, self._choices.delta(stream, text, start)))
        elif text:
            if not stream.head:
                before, stream.prefix = self._choices.between(stream.index)
                stream.head = self._envelope.head + before
            parts.append(b"".join((stream.head, encode_json(text), stream.prefix)))
        if stream.finish is not None:
            parts.append(self._chunk(stream, self._choices.last(stream)))
        return b"".join(parts)

    def lane(self, stream: OutputStream) -> DeltaLane | None:
        """See Form: for deltas that are nothing but text."""
        connection = stream.call.response.connection
        if connection is None or not stream.head or not self._is_plain or stream.logprobs is not None:
            return None
        return DeltaLane(stream, connection, stream.head + b'"', b'"' + stream.prefix)

    def _chunk(self, stream: OutputStream, choice: dict[str, Any]) -> bytes:
        if self._with_ids and not stream.has_told_prompt:
            choice["prompt_token_ids"] = stream.request.input_ids.tolist()
            stream.has_told_prompt = True
        if self._usage.in_every_chunk:
            return self._envelope.chunk(choices=[choice], usage=self._usage.of((stream,)))
        return self._envelope.chunk(choices=[choice])

    def tail(self, call: Call) -> bytes:
        """The counts, if asked for, and the end mark."""
        usage = b""
        if self._usage.in_last_chunk:
            usage = self._envelope.chunk(choices=[], usage=self._usage.of(call.streams))
        return usage + b"data: [DONE]\n\n"

    def whole(self, call: Call) -> Iterator[bytes]:
        """The JSON body."""
        separator = self._envelope.whole_head() + b'"choices":['
        for stream in call.streams:
            choice = self._choices.whole(stream)
            if self._with_ids:
                choice["prompt_token_ids"] = stream.request.input_ids.tolist()
                choice["token_ids"] = stream.text.output_ids
            yield separator + encode_json(choice)
            separator = b","
        rest = {"usage": self._usage.of(call.streams), "metadata": {"weight_version": WEIGHT_VERSION}}
        yield b"]," + encode_json(rest)[1:]


class ChatChoices:
    """Choices of chat completions."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def first(self, stream: OutputStream) -> dict[str, Any]:
        """The role comes before any text."""
        return _choice(stream, delta={"role": "assistant", "content": ""})

    def delta(self, stream: OutputStream, text: str, start: int) -> dict[str, Any]:
        """Text with log-probabilities."""
        return _choice(stream, delta={"content": text}, logprobs=self._logprobs(stream, start))

    def last(self, stream: OutputStream) -> dict[str, Any]:
        """An empty delta with the reason."""
        return _choice(stream, delta={}, **_ending(stream))

    def whole(self, stream: OutputStream) -> dict[str, Any]:
        """The message."""
        message = {"role": "assistant", "content": stream.text.output_text or "", "tool_calls": None}
        return _choice(stream, message=message, logprobs=self._logprobs(stream, 0), **_ending(stream))

    def between(self, index: int) -> tuple[bytes, bytes]:
        """See ChoiceForm."""
        before = f',"choices":[{{"index":{index},"delta":{{"content":'
        return before.encode(), b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def _logprobs(self, stream: OutputStream, start: int) -> dict[str, Any] | None:
        if stream.logprobs is None:
            return None
        output, entry = stream.logprobs.output, self._texts.chat_entry
        return {
            "content": [
                {
                    **entry(output.token_ids[i], output.logprobs[i]),
                    "top_logprobs": [entry(token, value) for value, token in output.top[i]],
                }
                for i in range(start, stream.num_output_tokens)
            ]
        }


class CompletionChoices:
    """Choices of text completions. prompts: the echoed text of each stream index, or None without echo."""

    def __init__(self, texts: TokenTexts, *, prompts: list[str] | None) -> None:
        self._texts = texts
        self._prompts = prompts

    def first(self, stream: OutputStream) -> dict[str, Any] | None:
        """The echoed prompt."""
        if self._prompts is None:
            return None
        return _choice(stream, text=self._prompts[stream.index], logprobs=self._prompt_logprobs(stream))

    def delta(self, stream: OutputStream, text: str, start: int) -> dict[str, Any]:
        """Text with log-probabilities."""
        return _choice(stream, text=text, logprobs=self._output_logprobs(stream, start))

    def last(self, stream: OutputStream) -> dict[str, Any]:
        """No text, and the reason."""
        return _choice(stream, text="", **_ending(stream))

    def whole(self, stream: OutputStream) -> dict[str, Any]:
        """Prompt, if echoed, and text."""
        logprobs = self._prompt_logprobs(stream) if self._prompts is not None else None
        output = self._output_logprobs(stream, 0)
        if logprobs is None or output is None:
            logprobs = output
        else:
            logprobs = {name: logprobs[name] + output[name] for name in output}
        prompt = "" if self._prompts is None else self._prompts[stream.index]
        text = prompt + (stream.text.output_text or "")
        return _choice(stream, text=text, logprobs=logprobs, **_ending(stream))

    def between(self, index: int) -> tuple[bytes, bytes]:
        """See ChoiceForm."""
        before = f',"choices":[{{"index":{index},"text":'
        return before.encode(), b',"logprobs":null,"finish_reason":null}]}\n\n'

    def _prompt_logprobs(self, stream: OutputStream) -> dict[str, Any] | None:
        if stream.logprobs is None:
            return None
        first = int(stream.request.input_ids[0])
        stream.text_offset = self._length(stream, first)
        rest = self._columns(stream, stream.logprobs.prompt, 0, len(stream.logprobs.prompt.token_ids))
        return {
            "tokens": [self._texts.key(first), *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": [0, *rest["text_offset"]],
        }

    def _length(self, stream: OutputStream, token_id: int) -> int:
        """Characters that the token adds to the text."""
        skips_special = stream.request.sampling.skip_special_tokens
        return self._texts.num_chars(token_id, skips_special=skips_special)

    def _output_logprobs(self, stream: OutputStream, start: int) -> dict[str, Any] | None:
        if stream.logprobs is None:
            return None
        return self._columns(stream, stream.logprobs.output, start, stream.num_output_tokens)

    def _columns(self, stream: OutputStream, log: Positions, start: int, end: int) -> dict[str, Any]:
        tokens, offsets, tops = [], [], []
        for i in range(start, end):
            token = self._texts.key(log.token_ids[i])
            tokens.append(token)
            offsets.append(stream.text_offset)
            stream.text_offset += self._length(stream, log.token_ids[i])
            # The chosen token is always among them, as OpenAI's are: up to logprobs + 1 entries.
            # Ids with one name are told apart by nobody: the likeliest, which comes first, stays.
            top = {self._texts.key(j): value for value, j in reversed(log.top[i])}
            top.setdefault(token, log.logprobs[i])
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": log.logprobs[start:end],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _choice(stream: OutputStream, **fields: Any) -> dict[str, Any]:
    return {"index": stream.index, "logprobs": None, "finish_reason": None, **fields}


def _ending(stream: OutputStream) -> dict[str, Any]:
    assert stream.finish is not None
    return {"finish_reason": stream.finish.kind, "matched_stop": stream.finish.matched}
