"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

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
from phalanx.server.errors import decode_json, renamed
from phalanx.server.form_openai import (
    ChatChoices,
    ChoiceForm,
    CompletionChoices,
    Envelope,
    OpenAIForm,
    UsageForm,
)
from phalanx.server.pace import Pace
from phalanx.server.params import logprobs_from_openai, openai_names, sampling_from_openai
from phalanx.server.response import Receive, Response
from phalanx.server.schema_openai import (
    ChatBody,
    CompletionBody,
    StreamOptions,
    check_supported,
    drop_unsupported,
)
from phalanx.server.state import BIG_BYTES, ApiWorker
from phalanx.server.texts import Ids, PackedIds, decode_ids, encode_texts, pack, unpack
from phalanx.text.tokenizer import Tokenizer

# Names that a template's own variables cannot have: the conversation's, and one that Jinja takes itself.
_TAKEN_NAMES = ("messages", "tools", "add_generation_prompt", "self")
_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


async def chat_completions(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one chat; errors are raised as RequestError before anything is sent."""
    worker.require_tokenizer()
    job = partial(_parse_chat, raw_body, worker.settler.check_length)
    body, prompt = await worker.prepare(len(raw_body), job)
    worker.check_model(body.model)
    choices = ChatChoices(worker.token_texts)
    await _run(worker, body, unpack(prompt), "chat.completion", choices, receive, response)


def _parse_chat(
    raw_body: bytes, check_length: Callable[..., None], tokenizer: Tokenizer | None
) -> tuple[ChatBody, PackedIds | Sequence[Sequence[int]]]:
    """The body without its messages, and the prompt that they make."""
    assert tokenizer is not None
    body = decode_json(_chat_decoder, raw_body)
    check_supported(body)
    if len(raw_body) > BIG_BYTES:
        _slim(body)
    if not body.messages:
        raise RequestError("messages is empty: a chat needs at least one", param="messages")
    kwargs = body.chat_template_kwargs or {}
    for name in _TAKEN_NAMES:
        if name in kwargs:
            raise RequestError(
                f"chat_template_kwargs may not set {name}", param="chat_template_kwargs", code="invalid_value"
            )
    if body.reasoning_effort is not None:
        kwargs = {"reasoning_effort": body.reasoning_effort, **kwargs}
    text = tokenizer.render_chat(body.messages, add_generation_prompt=body.add_generation_prompt, **kwargs)
    body.messages, body.tools, body.chat_template_kwargs = [], None, None
    check_length(tokenizer.min_ids(text), at_least=True)
    # The template writes special tokens itself.
    return body, pack(tokenizer.encode_batch([text], add_special_tokens=False, check_length=check_length))


def _slim(body: ChatBody | CompletionBody) -> None:
    """Refuse here what the worker would refuse, and drop what it does not use: either could be megabytes."""
    try:
        sampling_from_openai(body).check(ANY_VOCAB)
    except RequestError as error:
        raise renamed(error, openai_names(body)) from None
    logprobs_from_openai(body)
    check_rid(body.rid)
    drop_unsupported(body)


async def completions(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one text completion; errors are raised as RequestError before anything is sent."""
    body, texts, packed = await worker.prepare(len(raw_body), partial(_parse_completion, raw_body))
    worker.check_model(body.model)
    prompts: Sequence[Ids] = unpack(packed) if texts is None else await encode_texts(worker, texts)
    echoed = None
    if body.echo:
        if worker.tokenizer is None:
            texts = [""] * len(prompts)  # the ids are told in any case
        elif texts is None:
            await _check_prompts(worker, prompts)
            lists = [np.asarray(ids).tolist() for ids in prompts]
            texts = await decode_ids(worker, lists, skip_special_tokens=False)
        echoed = [text for text in texts for _ in range(possible_outputs(body.n))]
    choices = CompletionChoices(worker.token_texts, prompts=echoed)
    await _run(worker, body, prompts, "text_completion", choices, receive, response)


async def _run(
    worker: ApiWorker,
    body: ChatBody | CompletionBody,
    prompts: Sequence[Ids],
    kind: str,
    choices: ChoiceForm,
    receive: Receive,
    response: Response,
) -> None:
    sampling, logprobs = sampling_from_openai(body), logprobs_from_openai(body)
    envelope = Envelope(kind, worker.settings.server.served_model_name)
    options = body.stream_options or StreamOptions()
    usage = UsageForm(
        in_last_chunk=bool(options.include_usage),
        in_every_chunk=bool(options.continuous_usage_stats),
        with_cached=worker.settings.server.enable_cache_report,
    )
    # Without a tokenizer the ids are all that there is to tell.
    form = OpenAIForm(
        envelope, choices, usage, with_ids=bool(body.return_token_ids) or worker.tokenizer is None
    )
    call = new_call(form, response, is_stream=bool(body.stream))
    check_rid(body.rid)
    call.rid = body.rid or envelope.id
    asks = [Ask(ids, sampling, logprobs, rid) for ids, rid in zip(prompts, _rids(body, prompts), strict=True)]
    await make_streams(worker, call, asks, openai_names(body))
    await run_call(worker, call, receive)


def _rids(body: ChatBody | CompletionBody, prompts: Sequence[Ids]) -> list[str | None]:
    """Each prompt's name, if the client gave one: no two sequences that run may share it."""
    if body.rid is None or len(prompts) == 1:
        return [body.rid] * len(prompts)
    return [f"{body.rid}_{i}" for i in range(len(prompts))]


def _parse_completion(
    raw_body: bytes, tokenizer: Tokenizer | None
) -> tuple[CompletionBody, list[str] | None, PackedIds | Sequence[Sequence[int]]]:
    """The body without its prompts, and these: texts, or else lists of ids."""
    body = decode_json(_completion_decoder, raw_body)
    check_supported(body)
    if len(raw_body) > BIG_BYTES:
        _slim(body)
    prompt: Any = body.prompt
    body.prompt = None
    if prompt is None or prompt == "" or prompt == []:
        raise RequestError("prompt is empty: it needs at least one token", param="prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    kind = type(prompt[0])
    if any(type(part) is not kind for part in prompt):
        raise RequestError("prompt mixes strings, ids and lists of ids", param="prompt")
    if kind is int:
        return body, None, pack([prompt])
    check_sequences(len(prompt), len(prompt) * possible_outputs(body.n), "prompt")
    if kind is list:
        return body, None, pack(prompt)
    if not all(prompt):
        raise RequestError("prompt holds an empty text: it needs at least one token", param="prompt")
    return body, prompt, []


async def _check_prompts(worker: ApiWorker, prompts: Sequence[Ids]) -> None:
    """Prompts that are to be decoded must lie within the vocabulary and the context."""
    pace = Pace()
    for ids in prompts:
        worker.settler.check_prompt(ids)
        await pace.breathe()
