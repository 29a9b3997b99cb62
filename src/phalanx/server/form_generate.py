"""SGLang's shape of an answer: text, output_ids, meta_info."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from phalanx.server.errors import error_event
from phalanx.server.facts import NUM_CACHED_TOKENS, WEIGHT_VERSION
from phalanx.server.lanes import ItemLane
from phalanx.server.logprobs import Positions, TokenTexts
from phalanx.server.response import encode_json
from phalanx.server.sessions import Call, OutputStream

# What SGLang tells of every request and what is the same for all here: weights are never replaced, nothing is
# cached between requests, nobody's pages are taken back, and no reasoning is parsed.
_CONSTANTS = {
    "weight_version": WEIGHT_VERSION,
    "cached_tokens": NUM_CACHED_TOKENS,
    "num_retractions": 0,
    "reasoning_tokens": 0,
}


class GenerateForm:
    """Answers of POST /generate.

    Args:
        has_text: False without a tokenizer: no text at all.
        is_list: the answer is a list (a batch, or n > 1), and events carry `index`.
        is_incremental: events carry what is new; by default they carry everything so far, as SGLang's do.
        texts: names tokens in log-probabilities; None leaves null there.
        with_prompt_ids: answers carry `prompt_token_ids`.
    """

    fails_whole = False
    repeats_logprobs = True

    def __init__(
        self,
        *,
        has_text: bool,
        is_list: bool,
        is_incremental: bool,
        texts: TokenTexts | None,
        with_prompt_ids: bool,
    ) -> None:
        self._has_text = has_text
        self._is_list = is_list
        self._is_incremental = is_incremental
        self._texts = texts
        self._with_prompt_ids = with_prompt_ids

    def chunk(self, stream: OutputStream) -> bytes:
        """One event; without logprobs it is put together from bytes, which are what a step mostly costs."""
        start = stream.num_sent if self._is_incremental else 0
        new_ids = stream.text.output_ids[stream.num_sent :]
        stream.num_sent += len(new_ids)
        text, stream.unsent_text = stream.unsent_text, ""
        if stream.finish is None and stream.logprobs is None and not self._with_prompt_ids:
            return self._fast_chunk(stream, text, new_ids)
        if self._is_incremental:
            item = self._item(stream, text, new_ids, start)
        else:
            item = self._item(stream, stream.text.output_text or "", stream.text.output_ids, 0)
        return b"data: " + encode_json(item) + b"\n\n"

    def _fast_chunk(self, stream: OutputStream, text: str, new_ids: list[int]) -> bytes:
        if not stream.prefix:
            index = f'"index":{stream.index},' if self._is_list else ""
            stream.prefix = (
                b'],"meta_info":{"id":'
                + encode_json(stream.rid)
                + f',"finish_reason":null,"prompt_tokens":{stream.num_prompt_tokens},'.encode()
                + encode_json(_CONSTANTS)[1:-1]
                + b',"completion_tokens":'
            )
            stream.head = b"data: {" + index.encode()
        escaped = encode_json(text)[1:-1] if text else b""
        ids = ",".join(map(str, new_ids)).encode()
        if not self._is_incremental:
            stream.sent_json += escaped
            if stream.sent_ids_json and ids:
                stream.sent_ids_json += b","
            stream.sent_ids_json += ids
            escaped, ids = bytes(stream.sent_json), bytes(stream.sent_ids_json)
        text_part = b'"text":"' + escaped + b'",' if self._has_text else b""
        return b'%b%b"output_ids":[%b%b%d}}\n\n' % (
            stream.head,
            text_part,
            ids,
            stream.prefix,
            len(stream.text.output_ids),
        )

    def lane(self, stream: OutputStream) -> ItemLane | None:
        """See Form: for events that `_fast_chunk` writes."""
        connection = stream.call.response.connection
        if connection is None or not stream.prefix or not self._has_text:
            return None
        return ItemLane(
            stream,
            connection,
            head=stream.head + b'"text":"',
            middle=b'","output_ids":[',
            tail=stream.prefix,
            is_incremental=self._is_incremental,
        )

    def tail(self, call: Call) -> bytes:
        """The end mark."""
        return b"data: [DONE]\n\n"

    def whole(self, call: Call) -> Iterator[bytes]:
        """An object, or a list for a list."""
        separator = b"[" if self._is_list else b""
        for stream in call.streams:
            item = self._item(stream, stream.text.output_text or "", stream.text.output_ids, 0)
            yield separator + encode_json(item)
            separator = b","
        if self._is_list:
            yield b"]"

    def _item(self, stream: OutputStream, text: str, ids: list[int], start: int) -> dict[str, Any]:
        if stream.error is not None and stream.finish is not None and self._is_list and stream.call.is_stream:
            return {"index": stream.index, **error_event(*stream.error)}
        item: dict[str, Any] = {"index": stream.index} if self._is_list and stream.call.is_stream else {}
        if self._has_text:
            item["text"] = text
        item["output_ids"] = ids
        item["meta_info"] = self._meta(stream, start)
        if self._with_prompt_ids:
            item["prompt_token_ids"] = stream.request.input_ids.tolist()
        return item

    def _meta(self, stream: OutputStream, start: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": stream.rid,
            "finish_reason": finish_reason(stream),
            "prompt_tokens": stream.num_prompt_tokens,
            **_CONSTANTS,
            "completion_tokens": stream.num_output_tokens,
        }
        if stream.finish is not None:
            meta["e2e_latency"] = time.monotonic() - stream.call.started_s
        if stream.logprobs is not None:
            self._add_logprobs(meta, stream, start)
        return meta

    def _add_logprobs(self, meta: dict[str, Any], stream: OutputStream, start: int) -> None:
        log, wanted = stream.logprobs, stream.request.logprobs
        assert log is not None and wanted is not None
        end = stream.num_output_tokens
        # The first prompt token follows nothing, so it has no log-probability; SGLang puts a null there.
        first = [int(stream.request.input_ids[0])] if wanted.prompt_start == 0 else []
        meta["input_token_logprobs"] = [[None, i, self._text(i)] for i in first] + self._tokens(log.prompt, 0)
        meta["input_token_logprobs_length"] = len(meta["input_token_logprobs"])
        meta["output_token_logprobs"] = self._tokens(log.output, start, end)
        meta["output_token_logprobs_length"] = end  # so far, also where an event carries only what is new
        if wanted.top_k:
            meta["input_top_logprobs"] = [None for _ in first] + self._lists(log.prompt.top)
            meta["output_top_logprobs"] = self._lists(log.output.top[start:end])
        if wanted.token_ids:
            meta["input_token_ids_logprobs"] = [None for _ in first] + self._lists(log.prompt.asked)
            meta["output_token_ids_logprobs"] = self._lists(log.output.asked[start:end])

    def _tokens(self, positions: Positions, start: int, end: int | None = None) -> list[Any]:
        pairs = zip(positions.logprobs[start:end], positions.token_ids[start:end], strict=True)
        return [[value, i, self._text(i)] for value, i in pairs]

    def _lists(self, rows: list[list[tuple[float, int]]]) -> list[Any]:
        return [[[value, i, self._text(i)] for value, i in row] for row in rows]

    def _text(self, token_id: int) -> str | None:
        return None if self._texts is None else self._texts.text(token_id)


def finish_reason(stream: OutputStream) -> dict[str, Any] | None:
    """SGLang's finish_reason object; None while it runs."""
    reason = stream.finish
    if reason is None:
        return None
    if reason.kind == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.kind == "length":
        return {"type": "length", "length": stream.num_output_tokens}
    status, message = stream.error or (None, "aborted")
    return {"type": "abort", "message": message, "status_code": status, "err_type": reason.kind}
