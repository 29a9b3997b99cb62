"""POST | PUT /generate."""

from __future__ import annotations

import msgspec

from phalanx.core.errors import RequestError
from phalanx.server.calls import Ask, make_streams, new_call, run_call
from phalanx.server.errors import decode_json, refuse_unsupported
from phalanx.server.form_generate import GenerateForm
from phalanx.server.params import logprobs_from_generate, one_of, sampling_from_generate
from phalanx.server.response import Receive, Response
from phalanx.server.schema_generate import UNSUPPORTED, GenerateBody
from phalanx.server.state import ApiWorker

_decoder = msgspec.json.Decoder(GenerateBody)


async def generate(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one request; errors are raised as RequestError before anything is sent."""
    body = await worker.offload(len(raw_body), decode_json, _decoder, raw_body)
    refuse_unsupported(body, UNSUPPORTED)
    prompts, is_batch = await _prompt_ids(worker, body)
    count = len(prompts)
    rids = _rids(body.rid, count, is_batch)
    asks = [
        Ask(
            input_ids=prompts[i],
            sampling=sampling_from_generate(one_of(body.sampling_params, i, count, "sampling_params")),
            logprobs=logprobs_from_generate(body, i, count),
            rid=rids[i],
        )
        for i in range(count)
    ]
    form = GenerateForm(
        has_text=worker.tokenizer is not None,
        is_list=is_batch or any(ask.sampling.n > 1 for ask in asks),
        is_incremental=worker.settings.server.incremental_streaming_output,
        texts=worker.token_texts if body.return_text_in_logprobs else None,
        with_prompt_ids=bool(body.return_prompt_token_ids),
    )
    call = new_call(form, response, is_stream=bool(body.stream))
    make_streams(worker, call, asks, {"prompt": "text" if body.text is not None else "input_ids"})
    await run_call(worker, call, receive)


async def _prompt_ids(worker: ApiWorker, body: GenerateBody) -> tuple[list[list[int]], bool]:
    """The ids of each prompt, and whether the client sent a list of prompts."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give exactly one of text and input_ids", param="text")
    if body.text is not None:
        tokenizer = worker.require_tokenizer()
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not texts or not all(texts):
            raise RequestError("text is empty: a prompt needs at least one token", param="text")
        size = sum(map(len, texts))
        return await worker.offload(size, tokenizer.encode_batch, texts), isinstance(body.text, list)
    ids = body.input_ids or []
    lists = [x for x in ids if isinstance(x, list)]
    if lists and len(lists) != len(ids):
        raise RequestError("input_ids mixes ids and lists of ids", param="input_ids")
    if lists:
        return lists, True
    return [[x for x in ids if isinstance(x, int)]], False


def _rids(rid: str | list[str] | None, count: int, is_batch: bool) -> list[str | None]:
    if isinstance(rid, str) and is_batch:
        return [f"{rid}_{i}" for i in range(count)]
    return [one_of(rid, i, count, "rid") for i in range(count)]
