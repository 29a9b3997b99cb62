"""`--log-requests`: a line when a request comes and one when it has ended. Otherwise nothing is logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from phalanx.server.response import encode_json
from phalanx.server.sessions import Call, OutputStream
from phalanx.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PART_CHARS = 2048  # of each prompt and output at level 2
_PART_SEQUENCES = 8  # of one request, at level 2


class RequestLog:
    """Writes the log of one worker.

    Args:
        level: 0 names, counts, times; 1 sampling parameters too; 2 the beginning of prompts and outputs too;
            3 all of them.
        style: "text" (key=value) or "json".
        tokenizer: None logs token ids where there is no text.
    """

    def __init__(self, level: int, style: str, tokenizer: Tokenizer | None) -> None:
        self._level = level
        self._is_json = style == "json"
        self._tokenizer = tokenizer
        logger.setLevel(logging.INFO)  # who asks for it sees it, whatever --log-level is

    def received(self, call: Call) -> None:
        """A request that is about to go to the engine."""
        streams = call.streams
        fields: dict[str, Any] = {
            "event": "received",
            "rid": call.rid or streams[0].rid,
            "sequences": len(streams),
            "prompt_tokens": [s.num_prompt_tokens for s in self._shown(streams)],
            "stream": call.is_stream,
        }
        if self._level >= 1:
            fields["sampling_params"] = [
                msgspec.to_builtins(s.request.sampling, str_keys=True) for s in self._shown(streams)
            ]
        if self._level >= 2:
            fields["prompts"] = [self._text(s.request.input_ids.tolist()) for s in self._shown(streams)]
        self._write(fields)

    def ended(self, call: Call) -> None:
        """A request that is answered, failed or left by its client."""
        streams = call.streams
        fields: dict[str, Any] = {
            "event": "ended",
            "rid": call.rid or streams[0].rid,
            "completion_tokens": [s.num_output_tokens for s in self._shown(streams)],
            "finish": [None if s.finish is None else s.finish.kind for s in self._shown(streams)],
            "e2e_ms": round((time.monotonic() - call.started_s) * 1e3, 3),
        }
        if self._level >= 2:
            fields["outputs"] = [self._output(s) for s in self._shown(streams)]
        self._write(fields)

    def _shown(self, streams: Sequence[OutputStream]) -> Sequence[OutputStream]:
        return streams if self._level >= 3 else streams[:_PART_SEQUENCES]

    def _output(self, stream: OutputStream) -> Any:
        text = stream.text.output_text
        return self._cut(stream.text.output_ids if text is None else text)

    def _text(self, ids: list[int]) -> Any:
        if self._tokenizer is not None:
            return self._cut(self._tokenizer.decode(self._cut(ids), skip_special_tokens=False))
        return self._cut(ids)

    def _cut(self, value: Any) -> Any:
        return value if self._level >= 3 else value[:_PART_CHARS]

    def _write(self, fields: dict[str, Any]) -> None:
        # Values are JSON in either style, so that no text of a client can begin a line of its own.
        if self._is_json:
            logger.info("%s", encode_json(fields).decode())
        else:
            parts = [f"{name}={encode_json(value).decode()}" for name, value in fields.items()]
            logger.info("request %s", " ".join(parts))
