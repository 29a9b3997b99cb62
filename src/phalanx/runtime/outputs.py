"""Gathers what steps produce for a known set of streams, without a Python object per token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phalanx.core.logprobs import PositionLogprobs, unpack
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepOutputs
from phalanx.text.detokenizer import Detokenizer
from phalanx.text.output import FinishReason, TextStream

_UINT16_RANGE = 1 << 16
_REASONS = {
    Finish.STOP: FinishReason("stop"),
    Finish.LENGTH: FinishReason("length"),
    Finish.ABORT: FinishReason("abort"),
    Finish.ERROR: FinishReason("error"),
}


@dataclass(slots=True)
class Completion:
    """One finished output sequence.

    text: None without a tokenizer. token_ids: what was generated, a stop token included, nothing past a stop.
    logprobs: one entry per token id if asked for. error: why it ended, where finish_reason is an error.
    """

    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[PositionLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one prompt. prompt: the text as given, or None where ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)


class Collector:
    """Collects streams 0 .. len(samplings)-1 until all have ended.

    Streams with stop strings or expressions are read token by token, since the text decides when they end;
    all others are kept as arrays and cut apart once, at the end.

    Args:
        samplings: of each stream.
        detokenizer: None keeps ids alone.
        has_logprobs: log-probabilities of output tokens were asked for.

    Raises:
        RequestError: an expression that cannot be used.
    """

    def __init__(
        self, samplings: list[SamplingParams], detokenizer: Detokenizer | None, *, has_logprobs: bool = False
    ) -> None:
        self._samplings = samplings
        self._has_logprobs = has_logprobs
        self._detokenizer = detokenizer
        self._by_text = {
            i: TextStream(detokenizer, sampling)
            for i, sampling in enumerate(samplings)
            if (sampling.stop or sampling.stop_regex) and detokenizer is not None
        }
        self._is_by_text = np.zeros(len(samplings), np.bool_)
        self._is_by_text[list(self._by_text)] = True
        self._finish = np.zeros(len(samplings), np.uint8)
        self._ids: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._logprobs: dict[int, list[PositionLogprobs]] = {}
        self._prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        self._errors: dict[int, str] = {}

    @property
    def num_finished(self) -> int:
        """Streams that have ended."""
        return int(np.count_nonzero(self._finish))

    def unfinished(self) -> list[int]:
        """Streams that have not ended."""
        return np.flatnonzero(self._finish == Finish.NONE).tolist()

    def push(self, outputs: StepOutputs) -> list[int]:
        """Take one step's arrays. Returns streams whose text reached a stop string: abort them."""
        has_token = outputs.tokens >= 0
        self._ids.append(outputs.stream_ids[has_token])
        self._tokens.append(outputs.tokens[has_token])
        for kind, store in (
            (outputs.logprobs, self._logprobs),
            (outputs.prompt_logprobs, self._prompt_logprobs),
        ):
            if kind is not None:
                for index, position in unpack(kind):
                    store.setdefault(int(outputs.stream_ids[index]), []).append(position)
        for stream, _, message in outputs.errors:
            self._errors[stream] = message
        stopped = self._push_texts(outputs) if self._by_text else []
        ended = outputs.finish != Finish.NONE
        still = ended & (self._finish[outputs.stream_ids] == Finish.NONE)
        self._finish[outputs.stream_ids[still]] = outputs.finish[still]
        return stopped

    def _push_texts(self, outputs: StepOutputs) -> list[int]:
        stopped = []
        for i in np.flatnonzero(self._is_by_text[outputs.stream_ids]).tolist():
            stream, token = int(outputs.stream_ids[i]), int(outputs.tokens[i])
            if self._finish[stream] != Finish.NONE:
                continue
            delta = self._by_text[stream].push([token] if token >= 0 else [], Finish(int(outputs.finish[i])))
            if delta.finish_reason is not None and outputs.finish[i] == Finish.NONE:
                stopped.append(stream)
                self._finish[stream] = Finish.STOP
        return stopped

    def completions(self) -> list[Completion]:
        """All streams, in order. Call once, after all have ended."""
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, np.int64)
        tokens = np.concatenate(self._tokens) if self._tokens else np.empty(0, np.int32)
        num_streams = len(self._samplings)
        counts = np.bincount(ids, minlength=num_streams)
        if num_streams <= _UINT16_RANGE:
            ids = ids.astype(np.uint16)  # for which NumPy has a radix sort, several times as fast
        flat = tokens[np.argsort(ids, kind="stable")].tolist()
        ends = np.cumsum(counts)
        spans = zip((ends - counts).tolist(), ends.tolist(), strict=True)
        finish = map(Finish, self._finish.tolist())
        build = self._completion if self._detokenizer is not None else self._ids_completion
        return [build(i, flat[a:b], f) for i, ((a, b), f) in enumerate(zip(spans, finish, strict=True))]

    def prompt_logprobs(self, stream: int) -> list[PositionLogprobs]:
        """Prompt log-probabilities of a stream that asked for them."""
        return self._prompt_logprobs.get(stream, [])

    def _logprobs_of(self, stream: int, num_tokens: int) -> list[PositionLogprobs] | None:
        """Of the first num_tokens output tokens; None if nobody asked."""
        return self._logprobs.get(stream, [])[:num_tokens] if self._has_logprobs else None

    def _ids_completion(self, stream: int, tokens: list[int], finish: Finish) -> Completion:
        """Without a tokenizer there is no text, and no stop string: every token counts."""
        matched = tokens[-1] if finish == Finish.STOP and tokens else None
        return Completion(
            index=0,
            text=None,
            token_ids=tokens,
            finish_reason=_REASONS[finish] if matched is None else FinishReason("stop", matched),
            logprobs=self._logprobs_of(stream, len(tokens)),
            error=self._errors.get(stream),
        )

    def _completion(self, stream: int, tokens: list[int], finish: Finish) -> Completion:
        text_stream = self._by_text.get(stream)
        if text_stream is None:
            text_stream = TextStream(self._detokenizer, self._samplings[stream])
            text_stream.push(tokens, finish)
        reason = text_stream.finish_reason
        assert reason is not None
        kept = list(text_stream.output_ids)
        return Completion(
            index=0,
            text=text_stream.output_text,
            token_ids=kept,
            finish_reason=reason,
            logprobs=self._logprobs_of(stream, len(kept)),
            error=self._errors.get(stream),
        )
