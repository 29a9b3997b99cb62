"""Who may use the server: the API key, the origins of web pages, and how much a request may announce."""

from __future__ import annotations

import hmac
from typing import Any

from phalanx.config.groups import ServerConfig
from phalanx.core.errors import RequestError
from phalanx.server.errors import body_too_large

Headers = list[tuple[bytes, bytes]]

_ANY_ORIGIN: Headers = [(b"access-control-allow-origin", b"*")]
_PREFLIGHT: Headers = [
    (b"access-control-allow-methods", b"GET, POST, PUT, OPTIONS"),
    (b"access-control-allow-headers", b"*, authorization"),  # the star alone does not stand for this one
    (b"access-control-max-age", b"600"),
]


class Access:
    """The rules of one server.

    A browser lets any page send simple requests anywhere and only keeps the answer from it. So where origins
    are named, requests of other pages are refused, not just left without the header that lets them read.
    """

    def __init__(self, server: ServerConfig) -> None:
        self._key = None if server.api_key is None else server.api_key.encode()
        self._max_body_bytes = server.max_body_bytes
        origins = server.cors_allow_origins
        self._origins = None if origins == ("*",) else frozenset(origin.encode() for origin in origins)

    def check_key(self, scope: dict[str, Any]) -> None:
        """Raise a 401 unless the request brings the key as a bearer token, or none is needed."""
        if self._key is None:
            return
        scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
        # Compared in constant time: how far a guess is right must not show.
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._key):
            raise RequestError("a valid API key is required", status=401, code="invalid_api_key")

    def check_size(self, scope: dict[str, Any]) -> None:
        """Raise a 413 if the request announces a body that is too large, before any of it is read."""
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_body_bytes:
            raise body_too_large(self._max_body_bytes)

    def check_origin(self, scope: dict[str, Any]) -> None:
        """Raise a 403 if a web page of a foreign origin sends the request."""
        if self._origins is None:
            return
        origin = _header(scope, b"origin")
        if origin is None or origin in self._origins:
            return
        if origin.partition(b"://")[2] != _header(scope, b"host"):  # not the server's own page either
            raise RequestError(
                "pages of this origin may not use the server (--cors-allow-origins)",
                status=403,
                code="origin_not_allowed",
            )

    def cors_headers(self, scope: dict[str, Any]) -> Headers:
        """Headers that let an allowed page read the answer."""
        if self._origins is None:
            return _ANY_ORIGIN
        origin = _header(scope, b"origin")
        if origin in self._origins:
            return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        return [(b"vary", b"origin")]

    def preflight_headers(self, scope: dict[str, Any]) -> Headers:
        """The answer to OPTIONS: open to all, and for pages that are not allowed it allows nothing."""
        return [*self.cors_headers(scope), *_PREFLIGHT, (b"content-length", b"0")]


def _header(scope: dict[str, Any], wanted: bytes) -> bytes | None:
    value: bytes
    for name, value in scope["headers"]:
        if name == wanted:
            return value
    return None
