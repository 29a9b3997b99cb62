"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core.errors import RequestError
from phalanx.server.calls import Ask, make_streams, new_call, run_call
from phalanx.server.errors import decode_json
from phalanx.server.form_openai import ChatChoices, ChoiceForm, CompletionChoices, Envelope, OpenAIForm
from phalanx.server.params import logprobs_from_openai, openai_names, sampling_from_openai
from phalanx.server.response import Receive, Response
from phalanx.server.schema_openai import ChatBody, CompletionBody, check_supported
from phalanx.server.state import ApiWorker

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


async def chat_completions(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one chat; errors are raised as RequestError before anything is sent."""
    body = await worker.offload(len(raw_body), decode_json, _chat_decoder, raw_body)
    check_supported(body)
    worker.check_model(body.model)
    tokenizer = worker.require_tokenizer()
    if not body.messages:
        raise RequestError("messages is empty: a chat needs at least one", param="messages")
    kwargs = dict(body.chat_template_kwargs or {})
    if kwargs.keys() & {"tools", "messages", "add_generation_prompt"}:
        raise RequestError("chat_template_kwargs may not set tools, messages or add_generation_prompt")
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    if tools and "tools" not in (tokenizer.chat_template or ""):
        raise RequestError("tools: this model's chat template takes none", param="tools")
    input_ids = await worker.offload(
        len(raw_body),
        tokenizer.apply_chat_template,
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        **kwargs,
    )
    choices = ChatChoices(worker.token_texts)
    await _run(worker, body, [input_ids], "chat.completion", choices, receive, response)


async def completions(worker: ApiWorker, raw_body: bytes, receive: Receive, response: Response) -> None:
    """Serve one text completion; errors are raised as RequestError before anything is sent."""
    body = await worker.offload(len(raw_body), decode_json, _completion_decoder, raw_body)
    check_supported(body)
    worker.check_model(body.model)
    tokenizer = worker.require_tokenizer()
    texts, prompts = await _prompts(worker, body.prompt)
    echoed = None
    if body.echo:
        if texts is None:
            texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in _within(worker, prompts)]
        echoed = [text for text in texts for _ in range(body.n or 1)]
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
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    form = OpenAIForm(envelope, choices, include_usage=include_usage)
    call = new_call(form, response, is_stream=bool(body.stream))
    rid = body.rid or envelope.id
    asks = [Ask(ids, sampling, logprobs, rid) for ids in prompts]
    make_streams(worker, call, asks, openai_names(body))
    await run_call(worker, call, receive)


async def _prompts(worker: ApiWorker, prompt: Any) -> tuple[list[str] | None, list[list[int]]]:
    """The texts, if texts were given, and the ids of each prompt."""
    if prompt is None or prompt == "" or prompt == []:
        raise RequestError("prompt is empty: it needs at least one token", param="prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    kind = type(prompt[0])
    if any(type(part) is not kind for part in prompt):
        raise RequestError("prompt mixes strings, ids and lists of ids", param="prompt")
    if kind is int:
        return None, [prompt]
    if kind is list:
        return None, prompt
    if not all(prompt):
        raise RequestError("prompt holds an empty text: it needs at least one token", param="prompt")
    tokenizer = worker.require_tokenizer()
    return prompt, await worker.offload(sum(map(len, prompt)), tokenizer.encode_batch, prompt)


def _within(worker: ApiWorker, prompts: list[list[int]]) -> list[list[int]]:
    """The prompts, checked to lie within the vocabulary before they are decoded."""
    for ids in prompts:
        worker.settler.check_prompt(ids)
    return prompts
