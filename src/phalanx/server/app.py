"""The ASGI application: authorisation, then the generating routes by hand and the rest by FastAPI."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from phalanx.core.errors import RequestError
from phalanx.server.openapi import describe
from phalanx.server.response import CORS, Message, Receive, Response, Send, read_body
from phalanx.server.routes_generate import generate
from phalanx.server.routes_manage import HEALTH_PATHS, build_router
from phalanx.server.routes_openai import chat_completions, completions
from phalanx.server.state import ApiWorker

logger = logging.getLogger(__name__)

Handler = Callable[[ApiWorker, bytes, Receive, Response], Awaitable[None]]

_PREFLIGHT_HEADERS = [
    CORS,
    (b"access-control-allow-methods", b"GET, POST, PUT, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
]
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
        key = worker.settings.server.api_key
        self._api_key = None if key is None else key.encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one HTTP request, or the lifespan."""
        if scope["type"] != "http":
            await self._fastapi(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 200, "headers": _PREFLIGHT_HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        path = scope["path"]
        if path not in HEALTH_PATHS and not self._is_authorised(scope):
            response = Response(send)
            response.write_error(
                RequestError("a valid API key is required", status=401, code="invalid_api_key")
            )
            await response.finished()
        elif path in _GENERATING:
            await self._generate(scope, receive, send)
        else:
            await self._fastapi(scope, receive, _with_cors(send))

    def _is_authorised(self, scope: dict[str, Any]) -> bool:
        if self._api_key is None:
            return True
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._api_key)
        return False

    async def _generate(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        handler, methods = _GENERATING[scope["path"]]
        response = Response(send)
        try:
            if scope["method"] not in methods:
                raise RequestError(f"use {' or '.join(methods)}", status=405)
            self.worker.engine.require_alive()
            body = await read_body(receive, self.worker.settings.server.max_body_bytes)
            if body is not None:
                await handler(self.worker, body, receive, response)
        except RequestError as error:
            response.write_error(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("%s failed", scope["path"])
            response.write_error(RequestError("internal error", status=500))
        await response.finished()


def _with_cors(send: Send) -> Send:
    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), CORS]
        await send(message)

    return send_with_cors


def _build_fastapi(worker: ApiWorker) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.close()

    app = FastAPI(title="Phalanx", lifespan=lifespan)
    app.include_router(build_router(worker))
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
    body = RequestError(str(error.detail), status=error.status_code).body()
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_exception(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(RequestError("internal error", status=500).body(), status_code=500)
