"""What a worker remembers of a request while it runs: a Call, and one OutputStream per output sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from phalanx.core.request import EngineRequest
from phalanx.server.logprobs import LogprobLog
from phalanx.server.response import Response
from phalanx.text.output import FinishReason, TextStream


@dataclass(slots=True, eq=False)
class OutputStream:
    """One output sequence.

    Attributes:
        index: its place in the response: prompt number * n + output number.
        rid: its name for `/abort_request` and in `meta_info`.
        prompt_rid: the name of all outputs of its prompt.
        interval: tokens that its chunks carry at least; None for the server's own number.
        num_sent: ids that earlier chunks told the client about.
        unsent_text: text since the last chunk.
        error: (HTTP status, message) if it failed.
        has_started: a chunk of it was written.
        has_told_prompt: a chunk told the ids of its prompt.
        text_offset: characters of its tokens told so far, for completions' log-probabilities.
        lane: the short way of its tokens, once it has one.
        head, prefix, sent_json, sent_ids_json: bytes that its form puts into every event.
    """

    call: Call
    index: int
    rid: str
    prompt_rid: str
    request: EngineRequest
    text: TextStream
    logprobs: LogprobLog | None = None
    interval: int | None = None
    num_sent: int = 0
    unsent_text: str = ""
    finish: FinishReason | None = None
    error: tuple[int, str] | None = None
    has_started: bool = False
    has_told_prompt: bool = False
    text_offset: int = 0
    lane: Lane | None = None
    head: bytes = b""
    prefix: bytes = b""
    sent_json: bytearray = field(default_factory=bytearray)
    sent_ids_json: bytearray = field(default_factory=bytearray)

    @property
    def stream_id(self) -> int:
        """The engine's name for it."""
        return self.request.stream_id

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length, in tokens."""
        return len(self.request.input_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output length so far, in tokens."""
        return len(self.text.output_ids)


@dataclass(slots=True, eq=False)
class Call:
    """One HTTP request.

    Attributes:
        form: writes its answers in the route's shape.
        is_stream: answer token by token.
        rid: the client's name for all of it, if it gave one.
        streams: its sequences, by index.
        num_open: sequences not finished yet.
        num_logprobs: log-probabilities of all its sequences so far, alternatives included.
        waiting: sequences with something to say that a blocked response could not take.
        answering: writes a whole answer that is long.
        is_logged: `--log-requests` includes it.
    """

    form: Form
    response: Response
    is_stream: bool
    rid: str | None = None
    streams: list[OutputStream] = field(default_factory=list)
    num_open: int = 0
    num_logprobs: int = 0
    waiting: dict[int, OutputStream] = field(default_factory=dict)
    answering: asyncio.Task[None] | None = None
    is_logged: bool = True
    started_s: float = field(default_factory=time.monotonic)


class Lane(Protocol):
    """Writes events of one new token each (see server.lanes)."""

    def write(self, token: int) -> int:
        """Append the token to the stream and write its event, if it is one.

        Returns:
            Events written, 0 or 1; -1 if nothing at all was done.
        """
        ...


class Form(Protocol):
    """The shape of a route's answers."""

    fails_whole: bool
    """One failed sequence fails the whole response (OpenAI), or is told in its place (SGLang)."""

    repeats_logprobs: bool
    """Every event has log-probabilities again that earlier ones had."""

    def chunk(self, stream: OutputStream) -> bytes:
        """Events for what `stream` has not told yet, its end included; may be empty."""
        ...

    def lane(self, stream: OutputStream) -> Lane | None:
        """The short way for `stream`, which has written a chunk; None if its events are not that simple."""
        ...

    def tail(self, call: Call) -> bytes:
        """Events that end a stream."""
        ...

    def whole(self, call: Call) -> Iterator[bytes]:
        """The JSON body of a response that is not streamed, in pieces of one sequence."""
        ...
