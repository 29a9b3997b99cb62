"""The server under test: where it is, how a request to it looks on the wire, and its few control routes."""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from phalanx.bench.errors import BenchError

_CONTROL_TIMEOUT_S = 60.0
_PROFILE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Target:
    """One HTTP server.

    Attributes:
        host: name or address, without brackets.
        port: TCP port.
        prefix: path before every route, "" or "/something", without a slash at its end.
        https: whether to speak TLS.
        headers: sent with every request, authorization included.
    """

    host: str
    port: int
    prefix: str = ""
    https: bool = False
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def netloc(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The server's base URL, for messages."""
        return f"{'https' if self.https else 'http'}://{self.netloc}{self.prefix}"

    def tls_context(self) -> ssl.SSLContext | None:
        """Return a context for https, None for http."""
        return ssl.create_default_context() if self.https else None

    def wire_request(self, path: str, body: bytes) -> bytes:
        """Return the bytes of one POST of a JSON body, head and body."""
        fields = {"host": ("Host", self.netloc), "content-type": ("Content-Type", "application/json")}
        fields |= {key.lower(): (key, value) for key, value in self.headers}
        fields["content-length"] = ("Content-Length", str(len(body)))
        lines = [f"POST {self.prefix}{path} HTTP/1.1", *(f"{key}: {value}" for key, value in fields.values())]
        return "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + body


def make_target(base_url: str | None, host: str, port: int, headers: list[tuple[str, str]]) -> Target:
    """Build the target from the command line's choices.

    PHALANX_API_KEY or else OPENAI_API_KEY (as a bearer token), or else API_KEY (as it stands) of the
    environment becomes the Authorization header, the last two as in SGLang's client; a header given on the
    command line wins.

    Raises:
        BenchError: exit code 2 for a URL that is not http(s)://host[:port][/path].
    """
    sent = {key.lower(): (key, value) for key, value in [*_auth_headers(), *headers]}
    if base_url is None:
        return Target(host.strip("[]"), port, headers=tuple(sent.values()))
    try:
        parts = urlsplit(base_url)
        url_port = parts.port
    except ValueError:
        raise BenchError(f"--base-url {base_url!r} is not a URL", exit_code=2) from None
    if "@" in parts.netloc:
        # Not shown: it holds a password.
        raise BenchError("--base-url: give a user and a password by --header Authorization=...", exit_code=2)
    odd = parts.query or parts.fragment or not parts.path.isascii() or any(c <= " " for c in base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or odd:
        raise BenchError(f"--base-url {base_url!r} is not http(s)://host[:port][/path]", exit_code=2)
    https = parts.scheme == "https"
    default_port = 443 if https else 80
    return Target(
        parts.hostname, url_port or default_port, parts.path.rstrip("/"), https, headers=tuple(sent.values())
    )


def wait_until_ready(target: Target, timeout_s: float) -> None:
    """Poll GET /v1/models once a second until it answers 200.

    Says once on stderr that it waits, and why.

    Raises:
        BenchError: the server wants a key (401, 403): waiting would not help; or `timeout_s` passed.
    """
    deadline = time.monotonic() + timeout_s
    said = False
    while True:
        status, body = control(target, "GET", "/v1/models", timeout_s=5.0)
        if status == 200:
            return
        if status in (401, 403):
            raise BenchError(
                f"{target.url} wants a key (HTTP {status}): set PHALANX_API_KEY or OPENAI_API_KEY, or give "
                "--header"
            )
        last = f"status {status}" if status else str(body)
        if not said:
            said = True
            print(f"Waiting up to {timeout_s:g} s for {target.url} ({last})", file=sys.stderr, flush=True)
        if time.monotonic() >= deadline:
            raise BenchError(f"{target.url}/v1/models is not ready after {timeout_s:g} s: {last}")
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def first_model(target: Target) -> str:
    """Return the id of the first model that /v1/models lists.

    Raises:
        BenchError: the route does not answer, or lists nothing.
    """
    status, body = control(target, "GET", "/v1/models")
    models = body.get("data") if isinstance(body, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    if status != 200 or not isinstance(name, str) or not name:
        raise BenchError(f"{target.url}/v1/models names no model (status {status}): give --model")
    return name


def server_info(target: Target) -> dict[str, Any] | None:
    """Return what GET /server_info says, or None where there is no such route."""
    status, body = control(target, "GET", "/server_info")
    return body if status == 200 and isinstance(body, dict) else None


def flush_cache(target: Target, path: str) -> None:
    """POST to the route that empties the prefix cache.

    Raises:
        BenchError: the server refused; a run on a warm cache would measure something else.
    """
    status, body = control(target, "POST", path)
    if status != 200:
        raise BenchError(f"--flush-cache: {target.url}{path} answered {status}: {str(body)[:200]}")


def start_profile(target: Target, settings: dict[str, Any] | None) -> None:
    """POST /start_profile, with `settings` as its body where the server takes one.

    Raises:
        BenchError: the server refused.
    """
    status, body = control(target, "POST", "/start_profile", body=settings)
    if status != 200:
        raise BenchError(f"--profile: {target.url}/start_profile answered {status}: {str(body)[:200]}")


def stop_profile(target: Target) -> None:
    """POST /stop_profile; writing a trace may take minutes.

    Raises:
        BenchError: the server refused.
    """
    status, body = control(target, "POST", "/stop_profile", timeout_s=_PROFILE_TIMEOUT_S)
    if status != 200:
        raise BenchError(f"--profile: {target.url}/stop_profile answered {status}: {str(body)[:200]}")


def control(
    target: Target,
    method: str,
    path: str,
    timeout_s: float = _CONTROL_TIMEOUT_S,
    body: dict[str, Any] | None = None,
) -> tuple[int, Any]:
    """Send one blocking request. Return (status, JSON body or text); status 0 when nothing answered."""
    headers: dict[str, str | bytes] = {key: value.encode() for key, value in target.headers}
    data = None
    if body is not None:
        headers["Content-Type"], data = "application/json", orjson.dumps(body)
    tls = target.tls_context()
    if tls is None:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(target.host, target.port, timeout=timeout_s, context=tls)
    try:
        connection.request(method, target.prefix + path, data, headers)
        response = connection.getresponse()
        raw = response.read()
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        return 0, str(error) or type(error).__name__
    finally:
        connection.close()
    try:
        # Strict, so that whatever it holds can be written into the result.
        return response.status, orjson.loads(raw)
    except orjson.JSONDecodeError:
        return response.status, raw.decode("utf-8", "replace")


def _auth_headers() -> list[tuple[str, str]]:
    if key := os.environ.get("PHALANX_API_KEY") or os.environ.get("OPENAI_API_KEY"):
        return [("Authorization", f"Bearer {key}")]
    if key := os.environ.get("API_KEY"):
        return [("Authorization", key)]
    return []
