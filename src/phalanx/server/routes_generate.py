"""POST | PUT /generate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from phalanx.core.errors import RequestError
from phalanx.server.calls import (
    ANY_VOCAB,
    Ask,
    check_rid,
    check_sequences,
    make_streams,
    new_call,
    possible_outputs,
    run_call,
)
from phalanx.server.errors import (
    asks_by_name,
    decode_json,
    refuse_misnamed,
    refuse_unsupported,
    unsupported,
)
from phalanx.server.form_generate import GenerateForm
from phalanx.server.params import (
    asked_token_ids,
    interval_from_generate,
    logprobs_from_generate,
    one_of,
    sampling_from_generate,
)
from phalanx.server.response import Receive, Response, encode_json
from phalanx.server.schema_generate import (
    MISNAMED,
    MISNAMED_SAMPLING,
    MISPLACED,
    UNSUPPORTED,
    UNSUPPORTED_SAMPLING,
    GenerateBody,
    SamplingFields,
)
from phalanx.server.state import BIG_BYTES, ApiWorker
from phalanx.server.texts import Ids, PackedIds, encode_texts, pack, unpack
from phalanx.text.tokenizer import Tokenizer

_decoder = msgspec.json.Decoder(GenerateBody)
_fields_decoder = msgspec.json.Decoder(SamplingFields)


class _Parsed(NamedTuple):
    """A body taken apart, so that one of megabytes comes back from the side process in a moment.

    body: without text and input_ids, and without its `sampling_params` if those are in `fields`.
    texts, prompts: of one of them there is one for each prompt, the other is empty.
    is_batch: whether the client sent a list of prompts.
    num_outputs: of all prompts together.
    fields: sampling parameters of each prompt as JSON, of a big body that has a list of them.
    """

    body: GenerateBody
    texts: list[str]
    prompts: PackedIds | Sequence[Sequence[int]]
    is_batch: bool
    num_outputs: int
    fields: list[bytes] | None = None


async def generate(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one request; errors are raised as RequestError before anything is sent."""
    body, texts, packed, is_batch, num_outputs, fields = await worker.prepare(
        len(raw_body), partial(_parse, raw_body)
    )
    prompts: Sequence[Ids] = unpack(packed)
    name = "text" if texts else "input_ids"
    count = len(texts or prompts)
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
    await make_streams(worker, call, _asks(body, fields, prompts, rids), {"prompt": name})
    await run_call(worker, call, receive)


def _asks(
    body: GenerateBody, fields: list[bytes] | None, prompts: Sequence[Ids], rids: list[str | None]
) -> Iterator[Ask]:
    """One after the other, since each may bring parameters of its own to convert."""
    count, asked_ids, params = len(prompts), asked_token_ids(body), body.sampling_params
    shared = None if fields or isinstance(params, list) else sampling_from_generate(params)
    for i, ids in enumerate(prompts):
        own = _fields_decoder.decode(fields[i]) if fields else one_of(params, i, count, "sampling_params")
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


def _parse(raw_body: bytes, tokenizer: Tokenizer | None) -> _Parsed:
    body = decode_json(_decoder, raw_body)
    refuse_unsupported(body, UNSUPPORTED)
    refuse_misnamed(body, MISNAMED)
    for name in MISPLACED:
        if asks_by_name(name, getattr(body, name)):
            ours = MISNAMED_SAMPLING.get(name)
            where = "it belongs in sampling_params" + (f", where it is called {ours}" if ours else "")
            raise unsupported(name, "beside the prompt", why=where)
    if body.log_metrics is False:
        raise unsupported("log_metrics", "false")
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give exactly one of text and input_ids", param="text")
    texts, prompts, is_batch = _text_prompts(body) if body.input_ids is None else _id_prompts(body.input_ids)
    num_outputs = _num_outputs(body, len(texts or prompts))
    body.text = body.input_ids = None
    if len(raw_body) <= BIG_BYTES:
        return _Parsed(body, texts, prompts, is_batch, num_outputs)
    check_sequences(len(texts or prompts), num_outputs, "text" if texts else "input_ids")
    _slim(body, texts or prompts, is_batch)
    fields = None
    if isinstance(body.sampling_params, list):
        fields, body.sampling_params = [encode_json(one) for one in body.sampling_params], None
    return _Parsed(body, texts, pack(prompts), is_batch, num_outputs, fields)


def _slim(body: GenerateBody, prompts: Sequence[str] | Sequence[Sequence[int]], is_batch: bool) -> None:
    """Refuse here what the worker would refuse, and drop what it does not use: either could be megabytes."""
    checked = None
    for ask in _asks(body, None, [()] * len(prompts), _rids(body.rid, len(prompts), is_batch)):
        if ask.sampling is not checked:
            checked = ask.sampling
            checked.check(ANY_VOCAB)
    for name in (*UNSUPPORTED, *MISNAMED, *MISPLACED, "extra_key", "cache_salt", "routing_key"):
        setattr(body, name, None)
    params = body.sampling_params
    for fields in params if isinstance(params, list) else [params]:
        for name in UNSUPPORTED_SAMPLING if fields is not None else ():
            setattr(fields, name, None)


def _text_prompts(body: GenerateBody) -> tuple[list[str], list[list[int]], bool]:
    texts = [body.text] if isinstance(body.text, str) else body.text or []
    if not texts or not all(texts):
        raise RequestError("text is empty: a prompt needs at least one token", param="text")
    return texts, [], isinstance(body.text, list)


def _id_prompts(ids: list[int | list[int]]) -> tuple[list[str], list[list[int]], bool]:
    lists = [x for x in ids if isinstance(x, list)]
    if lists and len(lists) != len(ids):
        raise RequestError("input_ids mixes ids and lists of ids", param="input_ids")
    return [], lists or [[x for x in ids if isinstance(x, int)]], bool(lists)


def _rids(rid: str | list[str] | None, count: int, is_batch: bool) -> list[str | None]:
    for one in rid if isinstance(rid, list) else [rid]:
        check_rid(one)
    if isinstance(rid, list) and len(set(rid)) < len(rid):
        raise RequestError("rid names two prompts alike", param="rid")
    if isinstance(rid, str) and is_batch:
        return [f"{rid}_{i}" for i in range(count)]
    return [one_of(rid, i, count, "rid") for i in range(count)]
