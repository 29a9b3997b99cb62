"""The routes that generate nothing: health, facts, tokenization, management. Plain FastAPI."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from phalanx.core.errors import RequestError
from phalanx.core.sampling_params import SamplingParams
from phalanx.server.calls import Ask, check_rid, make_streams, new_call, run_call
from phalanx.server.errors import decode_json
from phalanx.server.facts import model_card, model_info, server_info, tokenizer_info
from phalanx.server.form_generate import GenerateForm
from phalanx.server.metrics import metrics_text
from phalanx.server.prometheus import CONTENT_TYPE
from phalanx.server.response import Message, encode_json, read_body
from phalanx.server.response import Response as StreamResponse
from phalanx.server.routes_pause import add_pause_routes
from phalanx.server.routes_profile import add_profile_routes
from phalanx.server.schema_generate import AbortBody, DetokenizeBody, TokenizeBody
from phalanx.server.state import BIG_BYTES, ApiWorker
from phalanx.server.texts import check_ids, decode_ids
from phalanx.text.tokenizer import Tokenizer

# Open without a key; with the slash too, since a redirect may lead past a proxy's rule for the path.
HEALTH_PATHS = ("/health", "/health/", "/ready", "/ready/", "/ping", "/ping/")
_HEALTH_GENERATE_S = 20.0
_MAX_FLUSH_S = 3600.0
_FLUSH_POLL_S = 0.1

_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)
_abort_decoder = msgspec.json.Decoder(AbortBody)


def build_router(worker: ApiWorker) -> APIRouter:
    """All routes, bound to one worker."""
    router = APIRouter()
    _add_health(router, worker)
    _add_facts(router, worker)
    _add_text(router, worker)
    _add_management(router, worker)
    add_profile_routes(router, worker)
    add_pause_routes(router, worker)
    return router


def _add_health(router: APIRouter, worker: ApiWorker) -> None:
    async def health() -> Response:
        worker.engine.require_alive()
        return Response(status_code=200)

    for path in HEALTH_PATHS:
        summary = "200 when the engine can take requests, 503 otherwise"
        router.add_api_route(path, health, summary=summary, include_in_schema=not path.endswith("/"))

    @router.get("/health_generate", summary="200 after one token was generated, else 503")
    async def health_generate() -> Response:
        worker.engine.require_alive()
        await _generate_one_token(worker)
        return Response(status_code=200)


async def _generate_one_token(worker: ApiWorker) -> None:
    """Run a one-token request through the engine, without HTTP.

    Raises:
        RequestError: 503 if it does not come in time, or fails.
    """
    done = asyncio.Event()
    failed: list[int] = []

    async def receive() -> Message:
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            failed.append(message["status"])
        if message["type"] == "http.response.body":
            done.set()

    form = GenerateForm(
        has_text=False, is_list=False, is_incremental=False, texts=None, with_prompt_ids=False
    )
    call = new_call(form, StreamResponse(send), is_stream=False)
    call.is_logged = False
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    await make_streams(worker, call, [Ask([0], sampling, rid=f"HEALTH_CHECK_{uuid.uuid4().hex}")])
    try:
        await asyncio.wait_for(run_call(worker, call, receive), _HEALTH_GENERATE_S)
    except TimeoutError:
        raise RequestError("the engine generated nothing in time", status=503) from None
    if failed:
        raise RequestError("the engine failed to generate", status=503)


def _add_facts(router: APIRouter, worker: ApiWorker) -> None:
    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        worker.engine.require_alive()  # clients take the list as a sign that they may begin
        return {"object": "list", "data": [model_card(worker)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        worker.check_model(model)
        return model_card(worker)

    @router.get("/model_info")
    @router.get("/get_model_info", include_in_schema=False)
    async def get_model_info() -> dict[str, Any]:
        return model_info(worker)

    @router.get("/tokenizer_info")
    async def get_tokenizer_info() -> dict[str, Any]:
        return tokenizer_info(worker)

    @router.get("/server_info")
    @router.get("/get_server_info", include_in_schema=False)
    async def get_server_info() -> dict[str, Any]:
        reply = await worker.engine.control("stats")
        return server_info(worker, reply.data)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(await metrics_text(worker), media_type=CONTENT_TYPE)


def _add_text(router: APIRouter, worker: ApiWorker) -> None:
    @router.post("/tokenize")
    @router.post("/v1/tokenize", include_in_schema=False)
    async def tokenize(request: Request) -> Response:
        raw = await _body(request, worker)
        worker.require_tokenizer()
        job = partial(_tokenize, raw, worker.settings.scheduler.context_length)
        model, reply = await worker.prepare(len(raw), job)
        worker.check_model(model)
        return Response(reply, media_type="application/json")

    @router.post("/detokenize")
    @router.post("/v1/detokenize", include_in_schema=False)
    async def detokenize(request: Request) -> Response:
        raw = await _body(request, worker)
        worker.require_tokenizer()
        if len(raw) > BIG_BYTES:
            model, texts, many = await worker.prepare(
                len(raw), partial(_detokenize, raw, worker.settler.vocab_size)
            )
            worker.check_model(model)
        else:
            body, lists, many = await worker.offload(len(raw), lambda: _id_lists(raw))
            worker.check_model(body.model)
            texts = await decode_ids(worker, lists, skip_special_tokens=body.skip_special_tokens)
        return _json({"text": texts if many else texts[0]})


def _tokenize(raw: bytes, max_model_len: int, tokenizer: Tokenizer | None) -> tuple[str | None, bytes]:
    """The model that the client names, and the answer."""
    assert tokenizer is not None
    body = decode_json(_tokenize_decoder, raw)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give exactly one of prompt and messages", param="prompt")
    tokens: Any
    if body.messages is not None:
        tokens = tokenizer.apply_chat_template(
            body.messages, add_generation_prompt=body.add_generation_prompt
        )
    elif isinstance(body.prompt, str):
        tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        tokens = tokenizer.encode_batch(body.prompt or [], add_special_tokens=body.add_special_tokens)
    count = list(map(len, tokens)) if isinstance(body.prompt, list) else len(tokens)
    return body.model, encode_json({"tokens": tokens, "count": count, "max_model_len": max_model_len})


def _detokenize(
    raw: bytes, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[str | None, list[str], bool]:
    """The model that the client names, the texts, and whether the client sent several lists."""
    assert tokenizer is not None
    body, lists, many = _id_lists(raw)
    for ids in lists:
        check_ids(ids, vocab_size)
    texts = [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]
    return body.model, texts, many


def _id_lists(raw: bytes) -> tuple[DetokenizeBody, list[list[int]], bool]:
    """The body, its lists of ids, and whether the client sent several."""
    body = decode_json(_detokenize_decoder, raw)
    lists = [x for x in body.tokens if isinstance(x, list)]
    if lists and len(lists) != len(body.tokens):
        raise RequestError("tokens mixes ids and lists of ids", param="tokens")
    return body, lists or [[x for x in body.tokens if isinstance(x, int)]], bool(lists)


def _json(value: dict[str, Any]) -> Response:
    """FastAPI's own way to JSON walks through every item in Python."""
    return Response(encode_json(value), media_type="application/json")


def _add_management(router: APIRouter, worker: ApiWorker) -> None:
    @router.get("/flush_cache", response_class=PlainTextResponse)
    @router.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache(request: Request, timeout: float = 0.0) -> PlainTextResponse:
        if not 0 <= timeout < math.inf:  # NaN is in no range
            raise RequestError(
                f"timeout must be a finite number of seconds, 0 or more, got {timeout}", param="timeout"
            )
        deadline = time.monotonic() + min(timeout, _MAX_FLUSH_S)
        while True:
            reply = await worker.engine.control("flush_cache")
            if reply.ok:
                return PlainTextResponse("Cache flushed.\n")
            if time.monotonic() >= deadline or worker.is_draining or await request.is_disconnected():
                reason = reply.data.get("message", "the engine is busy")
                raise RequestError(f"the cache was not flushed: {reason}", code="busy")
            await asyncio.sleep(_FLUSH_POLL_S)

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = decode_json(_abort_decoder, await _body(request, worker))
        check_rid(body.rid)
        if not body.abort_all and not body.rid:
            raise RequestError("give rid, or abort_all: true", param="rid")
        # The request may live in another worker: all of them are told, this one too.
        args = {"op": "abort", "rid": body.rid, "abort_all": body.abort_all}
        await worker.engine.control("relay", args)
        return Response(status_code=200)


async def _body(request: Request, worker: ApiWorker) -> bytes:
    server = worker.settings.server
    try:
        async with asyncio.timeout(server.request_timeout_s):
            raw = await read_body(request.receive, server.max_body_bytes)
    except TimeoutError:
        raise RequestError(
            f"the request did not arrive within {server.request_timeout_s:g} s", status=408
        ) from None
    return b"" if raw is None else raw
