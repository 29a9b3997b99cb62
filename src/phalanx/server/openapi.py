"""The generating routes in the OpenAPI document: FastAPI does not see them, so their schemas are added."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from phalanx.server.routes_pause import PauseBody
from phalanx.server.routes_profile import ProfileBody
from phalanx.server.schema_generate import AbortBody, DetokenizeBody, GenerateBody, TokenizeBody
from phalanx.server.schema_openai import ChatBody, CompletionBody

_BODIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("/generate", "post"): GenerateBody,
    ("/generate", "put"): GenerateBody,
    ("/v1/chat/completions", "post"): ChatBody,
    ("/v1/completions", "post"): CompletionBody,
    ("/tokenize", "post"): TokenizeBody,
    ("/detokenize", "post"): DetokenizeBody,
    ("/abort_request", "post"): AbortBody,
    ("/pause_generation", "post"): PauseBody,
    ("/start_profile", "post"): ProfileBody,
}
_OPTIONAL = (PauseBody, ProfileBody)


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` tell of all bodies that msgspec checks."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add_bodies(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(document: dict[str, Any]) -> None:
    refs, schemas = msgspec.json.schema_components(
        _BODIES.values(), ref_template="#/components/schemas/{name}"
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    for (path, method), ref in zip(_BODIES, refs, strict=True):
        summary = (_BODIES[path, method].__doc__ or "").strip().splitlines()[0]
        operation = (
            document["paths"]
            .setdefault(path, {})
            .setdefault(
                method, {"summary": summary, "responses": {"200": {"description": "Successful Response"}}}
            )
        )
        is_required = _BODIES[path, method] not in _OPTIONAL
        operation["requestBody"] = {"required": is_required, "content": {"application/json": {"schema": ref}}}
