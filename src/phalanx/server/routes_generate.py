"""POST | PUT /generate."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.core.errors import RequestError
from phalanx.server.calls import (
    Ask,
    check_rid,
    check_sequences,
    make_streams,
    new_call,
    possible_outputs,
    run_call,
)
from phalanx.server.errors import refuse_unsupported, unsupported
from phalanx.server.form_generate import GenerateForm
from phalanx.server.generate_body import decode_generate
from phalanx.server.params import (
    asked_token_ids,
    interval_from_generate,
    logprobs_from_generate,
    one_of,
    sampling_from_generate,
)
from phalanx.server.response import Receive, Response
from phalanx.server.schema_generate import UNSUPPORTED, GenerateBody
from phalanx.server.state import ApiWorker
from phalanx.server.texts import encode_texts


async def generate(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one request; errors are raised as RequestError before anything is sent."""
    body, texts, prompts, is_batch = await worker.offload(len(raw_body), lambda: _decode(raw_body))
    name = "text" if body.text is not None else "input_ids"
    count = len(texts or prompts)
    num_outputs = _num_outputs(body, count)
    check_sequences(count, num_outputs, name)
    rids = _rids(body.rid, count, is_batch)
    if texts:
        prompts = await encode_texts(worker, texts)
    form = GenerateForm(
        has_text=worker.tokenizer is not None,
        is_list=is_batch or num_outputs > count,
        is_incremental=worker.settings.server.incremental_streaming_output,
        texts=worker.token_texts if body.return_text_in_logprobs else None,
        with_prompt_ids=bool(body.return_prompt_token_ids),
    )
    call = new_call(form, response, is_stream=bool(body.stream))
    call.is_logged = not body.no_logs
    call.rid = body.rid if isinstance(body.rid, str) else None
    await make_streams(worker, call, _asks(body, prompts, rids), {"prompt": name})
    await run_call(worker, call, receive)


def _asks(body: GenerateBody, prompts: list[list[int]], rids: list[str | None]) -> Iterator[Ask]:
    """One after the other, since each may bring parameters of its own to convert."""
    count, asked_ids, fields = len(prompts), asked_token_ids(body), body.sampling_params
    shared = None if isinstance(fields, list) else sampling_from_generate(fields)
    for i, ids in enumerate(prompts):
        own = one_of(fields, i, count, "sampling_params")
        yield Ask(
            input_ids=ids,
            sampling=shared or sampling_from_generate(own),
            interval=interval_from_generate(own),
            logprobs=logprobs_from_generate(body, asked_ids, i, count),
            rid=rids[i],
        )


def _num_outputs(body: GenerateBody, count: int) -> int:
    """Outputs of all `count` prompts together."""
    fields = body.sampling_params
    if not isinstance(fields, list):
        return count * possible_outputs(None if fields is None else fields.n)
    one_of(fields, 0, count, "sampling_params")  # there is one for each
    return sum(possible_outputs(one.n) for one in fields)


def _decode(raw_body: bytes) -> tuple[GenerateBody, list[str], list[list[int]], bool]:
    """The body, the texts or the ids of its prompts, and whether the client sent a list of prompts."""
    body = decode_generate(raw_body)
    refuse_unsupported(body, UNSUPPORTED)
    if body.log_metrics is False:
        raise unsupported("log_metrics", "false")
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give exactly one of text and input_ids", param="text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not texts or not all(texts):
            raise RequestError("text is empty: a prompt needs at least one token", param="text")
        return body, texts, [], isinstance(body.text, list)
    ids = body.input_ids or []
    lists = [x for x in ids if isinstance(x, list)]
    if lists and len(lists) != len(ids):
        raise RequestError("input_ids mixes ids and lists of ids", param="input_ids")
    if lists:
        return body, [], lists, True
    return body, [], [[x for x in ids if isinstance(x, int)]], False


def _rids(rid: str | list[str] | None, count: int, is_batch: bool) -> list[str | None]:
    for one in rid if isinstance(rid, list) else [rid]:
        check_rid(one)
    if isinstance(rid, list) and len(set(rid)) < len(rid):
        raise RequestError("rid names two prompts alike", param="rid")
    if isinstance(rid, str) and is_batch:
        return [f"{rid}_{i}" for i in range(count)]
    return [one_of(rid, i, count, "rid") for i in range(count)]
