"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

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
from phalanx.server.errors import decode_json
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
from phalanx.server.schema_openai import ChatBody, CompletionBody, StreamOptions, check_supported
from phalanx.server.state import ApiWorker
from phalanx.server.texts import decode_ids, encode_texts

# Names that a template's own variables cannot have: the conversation's, and one that Jinja takes itself.
_TAKEN_NAMES = ("messages", "tools", "add_generation_prompt", "self")
_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


async def chat_completions(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one chat; errors are raised as RequestError before anything is sent."""
    body = await worker.offload(len(raw_body), lambda: decode_json(_chat_decoder, raw_body))
    check_supported(body)
    worker.check_model(body.model)
    if not body.messages:
        raise RequestError("messages is empty: a chat needs at least one", param="messages")
    input_ids = await _chat_ids(worker, body, len(raw_body))
    choices = ChatChoices(worker.token_texts)
    await _run(worker, body, [input_ids], "chat.completion", choices, receive, response)


async def _chat_ids(worker: ApiWorker, body: ChatBody, size_bytes: int) -> list[int]:
    """The prompt of a chat."""
    tokenizer = worker.require_tokenizer()
    kwargs = body.chat_template_kwargs or {}
    for name in _TAKEN_NAMES:
        if name in kwargs:
            raise RequestError(
                f"chat_template_kwargs may not set {name}", param="chat_template_kwargs", code="invalid_value"
            )
    if body.reasoning_effort is not None:
        kwargs = {"reasoning_effort": body.reasoning_effort, **kwargs}
    text = await worker.offload(
        size_bytes,
        lambda: tokenizer.render_chat(
            body.messages, add_generation_prompt=body.add_generation_prompt, **kwargs
        ),
    )
    (ids,) = await encode_texts(worker, [text], add_special_tokens=False)  # the template writes them itself
    return ids


async def completions(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one text completion; errors are raised as RequestError before anything is sent."""
    body = await worker.offload(len(raw_body), lambda: decode_json(_completion_decoder, raw_body))
    check_supported(body)
    worker.check_model(body.model)
    texts, prompts = await _prompts(worker, body)
    echoed = None
    if body.echo:
        if worker.tokenizer is None:
            texts = [""] * len(prompts)  # the ids are told in any case
        elif texts is None:
            await _check_prompts(worker, prompts)
            texts = await decode_ids(worker, prompts, skip_special_tokens=False)
        echoed = [text for text in texts for _ in range(possible_outputs(body.n))]
    choices = CompletionChoices(worker.token_texts, prompts=echoed)
    await _run(worker, body, prompts, "text_completion", choices, receive, response)


async def _run(
    worker: ApiWorker,
    body: ChatBody | CompletionBody,
    prompts: list[list[int]],
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


def _rids(body: ChatBody | CompletionBody, prompts: list[list[int]]) -> list[str | None]:
    """Each prompt's name, if the client gave one: no two sequences that run may share it."""
    if body.rid is None or len(prompts) == 1:
        return [body.rid] * len(prompts)
    return [f"{body.rid}_{i}" for i in range(len(prompts))]


async def _prompts(worker: ApiWorker, body: CompletionBody) -> tuple[list[str] | None, list[list[int]]]:
    """The texts, if texts were given, and the ids of each prompt."""
    prompt: Any = body.prompt
    if prompt is None or prompt == "" or prompt == []:
        raise RequestError("prompt is empty: it needs at least one token", param="prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    kind = type(prompt[0])
    if any(type(part) is not kind for part in prompt):
        raise RequestError("prompt mixes strings, ids and lists of ids", param="prompt")
    if kind is int:
        return None, [prompt]
    check_sequences(len(prompt), len(prompt) * possible_outputs(body.n), "prompt")
    if kind is list:
        return None, prompt
    if not all(prompt):
        raise RequestError("prompt holds an empty text: it needs at least one token", param="prompt")
    return prompt, await encode_texts(worker, prompt)


async def _check_prompts(worker: ApiWorker, prompts: list[list[int]]) -> None:
    """Prompts that are to be decoded must lie within the vocabulary and the context."""
    pace = Pace()
    for ids in prompts:
        worker.settler.check_prompt(ids)
        await pace.breathe()
