"""The ASGI application: access, time limits, the generating routes by hand and the rest by FastAPI."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from phalanx.core.errors import RequestError
from phalanx.server.access import Access, Headers
from phalanx.server.errors import error_event
from phalanx.server.openapi import describe
from phalanx.server.page import PAGE_PATHS, add_page_routes
from phalanx.server.response import Message, Receive, Response, Send, encode_json, read_body
from phalanx.server.routes_generate import generate
from phalanx.server.routes_manage import HEALTH_PATHS, build_router
from phalanx.server.routes_openai import chat_completions, completions
from phalanx.server.state import ApiWorker

logger = logging.getLogger(__name__)

_CLIENT_LEFT = 499  # nginx's number for a request that got no answer since its client was gone
Handler = Callable[[ApiWorker, bytes, Receive, Response], Awaitable[None]]

_GENERATING: dict[str, tuple[Handler, tuple[str, ...]]] = {
    "/generate": (generate, ("POST", "PUT")),
    "/v1/chat/completions": (chat_completions, ("POST",)),
    "/v1/completions": (completions, ("POST",)),
}


class Application:
    """ASGI 3. The generating routes get the raw `send`: the dispatcher writes through it.

    Attributes:
        worker: what it serves.
    """

    def __init__(self, worker: ApiWorker) -> None:
        self.worker = worker
        self._fastapi = _build_fastapi(worker)
        self._access = Access(worker.settings.server)
        self._timeout_s = worker.settings.server.request_timeout_s

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one HTTP request, or the lifespan."""
        if scope["type"] != "http":
            await self._fastapi(scope, receive, send)
            return
        self.worker.metrics.opened()
        status = 500
        try:
            status = await self._serve(scope, receive, send)
        finally:
            self.worker.metrics.closed(self._endpoint(scope), status)

    @staticmethod
    def _endpoint(scope: dict[str, Any]) -> str:
        """The route's path; for what has none a word, so that clients cannot make up names of metrics."""
        if scope["method"] == "OPTIONS":
            return "preflight"
        route = scope.get("route")  # FastAPI's, once it has found one
        if route is not None:
            return str(route.path)
        return scope["path"] if scope["path"] in _GENERATING else "other"

    async def _serve(self, scope: dict[str, Any], receive: Receive, send: Send) -> int:
        """Serve one HTTP request; returns the status that was sent."""
        if scope["method"] == "OPTIONS":
            headers = self._access.preflight_headers(scope)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return 200
        path = scope["path"]
        headers = self._access.cors_headers(scope)
        try:
            self._access.check_origin(scope)
            if path not in HEALTH_PATHS and path not in PAGE_PATHS:
                self._access.check_key(scope)
            self._access.check_size(scope)
        except RequestError as error:
            response = Response(send, headers)
            response.write_error(error)
            await response.finished()
            return response.status
        if path in _GENERATING:
            return await self._generate(scope, receive, send, headers)
        noted = _NotedSend(send, headers)
        await self._fastapi(scope, receive, noted)
        return noted.status

    async def _generate(self, scope: dict[str, Any], receive: Receive, send: Send, headers: Headers) -> int:
        handler, methods = _GENERATING[scope["path"]]
        response = Response(send, headers)
        try:
            if scope["method"] not in methods:
                raise RequestError(f"use {' or '.join(methods)}", status=405)
            self.worker.engine.require_alive()
            if self._timeout_s is None:
                await self._handle(handler, receive, response)
            elif not await self._handle_in_time(handler, receive, response, send, headers):
                return response.status
        except RequestError as error:
            response.write_error(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("%s failed", scope["path"])
            response.write_error(RequestError("internal error", status=500))
        await response.finished()
        return response.status or _CLIENT_LEFT

    async def _handle(self, handler: Handler, receive: Receive, response: Response) -> None:
        body = await read_body(receive, self.worker.settings.server.max_body_bytes)
        if body is not None:
            response.received_s = time.monotonic()
            await handler(self.worker, body, receive, response)

    async def _handle_in_time(
        self, handler: Handler, receive: Receive, response: Response, send: Send, headers: Headers
    ) -> bool:
        """Serve the request and return True, or end it with an error when its time is over.

        A request whose answer is complete by then was served: its handler was only waiting for the client.
        """
        has_body = False

        async def receive_and_note() -> Message:
            nonlocal has_body
            message = await receive()
            has_body = has_body or not message.get("more_body", False)
            return message

        try:
            async with asyncio.timeout(self._timeout_s):
                await self._handle(handler, receive_and_note, response)
            return True
        except TimeoutError:
            status, what = (504, "was not answered") if has_body else (408, "did not arrive")
            error = RequestError(f"the request {what} within {self._timeout_s:g} s", status=status)
            response.status = response.status or status
            if response.blocked:  # the client reads nothing: leaving without an end closes the connection
                return False
            if response.complete:
                return True
            # One more response on the same connection: the call that was cut off has closed the first.
            late = Response(send, headers if has_body else [*headers, (b"connection", b"close")])
            if response.started:
                late.started = True
                event = encode_json(error_event(status, error.message))
                late.write_event(b"data: " + event + b"\n\n", more=False)
            else:
                late.write_error(error)
            await late.finished()
            return False


class _NotedSend:
    """ASGI's send with more headers. status: what was sent, or that the client left before."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self._send = send
        self._headers = headers
        self.status = _CLIENT_LEFT

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *self._headers]
            self.status = message["status"]
        await self._send(message)


def _build_fastapi(worker: ApiWorker) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await worker.start()
        yield
        worker.close()

    app = FastAPI(title="Phalanx", lifespan=lifespan)
    router = build_router(worker)
    add_page_routes(router)
    app.include_router(router)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_exception)
    describe(app)
    return app


async def _on_request_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), status_code=error.status)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:]) or None
    return JSONResponse(RequestError(f"{name}: {first['msg']}", param=name).body(), status_code=400)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404 and message == "Not Found":  # the router's: it knew no such path
        message = f"no route {request.url.path[:200]}: OpenAI's are under /v1, and /docs lists all"
    body = RequestError(message, status=error.status_code).body()
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_exception(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(RequestError("internal error", status=500).body(), status_code=500)
