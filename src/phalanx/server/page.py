"""GET /: a small page with live charts and a prompt box. Its files are our own; nothing else is fetched.

The page itself is open to all: it holds nothing of the server. What it shows it asks for with the key, which
its user types in.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from fastapi.responses import Response

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "metrics.js": "text/javascript; charset=utf-8",
    "prompt.js": "text/javascript; charset=utf-8",
    "server.js": "text/javascript; charset=utf-8",
}
_PATHS = {"/": "index.html", **{f"/page/{name}": name for name in _TYPES if name != "index.html"}}
PAGE_PATHS = tuple(_PATHS)
_HEADERS = {
    # Only this server's own files run, and they talk to nobody else.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page_routes(router: APIRouter) -> None:
    """The page and its files, read once."""
    folder = resources.files("phalanx.server") / "static"
    for path, name in _PATHS.items():
        _add_file(router, path, (folder / name).read_bytes(), _TYPES[name])


def _add_file(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    @router.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)
