"""Keys, origins, limits of size and time: the real worker process against a scripted engine (B47)."""

from __future__ import annotations

import socket
import time

import httpx
import pytest

from phalanx.server.http_limits import MAX_HEAD_BYTES
from tests.e2e.server_harness import (
    PATIENCE_S,
    Server,
    make_settings,
    running,
    sse_events,
    wait_until,
    write_byte_tokenizer,
)

OPEN = ("/health", "/health/", "/ready", "/ping")
GUARDED = [
    ("POST", "/generate"),
    ("PUT", "/generate"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/v1/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/model_info"),
    ("GET", "/get_model_info"),
    ("GET", "/server_info"),
    ("GET", "/metrics"),
    ("GET", "/health_generate"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("GET", "//health"),
    ("GET", "/health/../generate"),
    ("GET", "/Health"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_byte_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture(scope="module")
def guarded(folder, tmp_path_factory):
    settings = make_settings(
        folder,
        api_key="sésame-42",
        cors_allow_origins=("http://good.example", "http://other.example:8080"),
    )
    with running(tmp_path_factory.mktemp("run"), settings) as server:
        yield server


LIMIT_S = 1.0


@pytest.fixture(scope="module")
def hurried(folder, tmp_path_factory):
    """No key, any origin, and little time for a request."""
    settings = make_settings(folder, request_timeout_s=LIMIT_S)
    with running(tmp_path_factory.mktemp("run"), settings) as server:
        yield server


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def request(server: Server, method: str, path: str, **headers: str) -> httpx.Response:
    raw = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return httpx.request(method, server.url + path, headers=raw)


@pytest.mark.parametrize("path", OPEN)
def test_health_needs_no_key(guarded, path):
    assert request(guarded, "GET", path).status_code == 200


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_all_else_needs_the_key(guarded, method, path):
    # A raw target: clients clean paths up before they send them.
    for value in (
        None,
        "sésame-42",
        "Bearer",
        "Bearer sésame-4",
        "Bearer sésame-422",
        "Bearer SÉSAME-42",
        "Basic sésame-42",
    ):
        key = "" if value is None else f"Authorization: {value}\r\n"
        key += "Connection: close\r\n"
        with socket.create_connection(("127.0.0.1", guarded.port), timeout=PATIENCE_S) as sock:
            sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: x\r\n{key}Content-Length: 0\r\n\r\n".encode())
            head = read_all(sock)
        assert head.startswith(b"HTTP/1.1 401 "), (value, head)
        assert b'"type":"authentication_error"' in head


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_key_opens(guarded, scheme):
    assert request(guarded, "GET", "/v1/models", authorization=f"{scheme} sésame-42").status_code == 200
    reply = httpx.post(
        f"{guarded.url}/generate",
        json={"text": "x", "sampling_params": {"max_new_tokens": 1}},
        headers={b"authorization": f"{scheme} sésame-42".encode()},
    )
    assert reply.json()["text"] == "a"


def test_preflight_is_open_and_allows_only_what_is_named(guarded):
    for origin, allowed in (
        ("http://good.example", "http://good.example"),
        ("http://other.example:8080", "http://other.example:8080"),
        ("http://other.example", None),
        ("http://good.example.evil", None),
        ("null", None),
    ):
        reply = request(guarded, "OPTIONS", "/generate", origin=origin, access_control_request_method="POST")
        assert reply.status_code == 200
        assert reply.headers.get("access-control-allow-origin") == allowed
        assert "authorization" in reply.headers["access-control-allow-headers"]
        assert reply.headers["vary"] == "origin"


def test_pages_of_other_origins_are_refused(guarded):
    key = "Bearer sésame-42"
    own = f"http://127.0.0.1:{guarded.port}"
    for origin, status in (
        ("http://good.example", 200),
        (own, 200),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://127.0.0.1:1", 403),
    ):
        for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/generate")):
            reply = request(guarded, method, path, origin=origin, authorization=key)
            expected = 400 if status == 200 and path == "/generate" else status  # an empty body
            assert reply.status_code == expected, (origin, path)
            allowed = origin if origin == "http://good.example" else None
            assert reply.headers.get("access-control-allow-origin") == allowed
    assert request(guarded, "GET", "/v1/models", authorization=key).status_code == 200


@pytest.fixture
def slow(hurried):
    """The engine gives three tokens and then nothing."""
    engine = hurried.engine
    engine.budget = 3
    engine.aborted.clear()
    yield engine
    engine.budget = None
    wait_until(lambda: not engine.running, "an idle engine")


HEADERS = {b"authorization": "Bearer sésame-42".encode()}


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_runs_too_long_is_ended(hurried, slow, n):
    body = {"prompt": "x", "n": n}
    started = time.monotonic()
    reply = httpx.post(f"{hurried.url}/v1/completions", json=body)
    assert time.monotonic() - started > 0.9 * LIMIT_S
    assert reply.status_code == 504 and reply.json()["error"]["type"] == "timeout_error"
    assert "1 s" in reply.json()["error"]["message"]
    wait_until(lambda: len(slow.aborted) == n and not slow.running, "aborts in the engine")


@pytest.mark.parametrize(
    ("path", "body"), [("/generate", {"text": "x"}), ("/v1/completions", {"prompt": "x"})]
)
def test_a_stream_that_runs_too_long_ends_with_an_error_event(hurried, slow, path, body):
    body = {**body, "stream": True}
    reply = httpx.post(hurried.url + path, json=body)
    while reply.status_code == 504:  # the machine stood still before the first token
        wait_until(lambda: not slow.running, "an idle engine")
        slow.aborted.clear()
        reply = httpx.post(hurried.url + path, json=body)
    assert reply.status_code == 200
    *events, last = sse_events(reply.text)
    assert events and "[DONE]" not in events
    assert last["error"]["code"] == 504 and last["error"]["type"] == "timeout_error"
    wait_until(lambda: len(slow.aborted) == 1 and not slow.running, "an abort in the engine")
    slow.budget = None  # and the next request is served
    wait_until(lambda: httpx.post(hurried.url + path, json=body).status_code == 200, "an answer")


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
def test_a_body_that_does_not_come_is_not_waited_for(hurried, path):
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\nConnection: close\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", hurried.port), timeout=PATIENCE_S) as sock:
        sock.sendall(head.encode())
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"type":"timeout_error"' in answer


def test_quick_requests_know_no_limit_of_time(hurried):
    def is_served() -> bool:
        started = time.monotonic()
        status = httpx.post(f"{hurried.url}/v1/completions", json={"prompt": "x"}).status_code
        assert status == 200 or time.monotonic() - started > 0.9 * LIMIT_S
        return status == 200

    for _ in range(3):
        wait_until(is_served, "a request that is quick")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n",
        b"GET /health?" + b"y" * (2 * MAX_HEAD_BYTES) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 50_000 + b"Content-Length: 2\r\n\r\n{}",
    ],
    ids=["value", "url", "many"],
)
def test_heads_have_a_limit(guarded, head):
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=PATIENCE_S) as sock:
        try:
            sock.sendall(head)
        except OSError:
            pass  # it may be closed before all is sent
        try:
            answer = sock.recv(65536)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert request(guarded, "GET", "/health").status_code == 200


def test_a_large_head_within_the_limit_is_served(guarded):
    assert request(guarded, "GET", "/health", x="y" * (MAX_HEAD_BYTES // 2)).status_code == 200


def test_answers_hold_no_paths_and_no_traces(guarded, folder):
    for path in ("/v1/models", "/model_info", "/server_info", "/openapi.json", "/metrics"):
        text = httpx.get(guarded.url + path, headers=HEADERS).text
        assert str(folder) not in text and "sésame" not in text, path
        assert "Traceback" not in text and ".py" not in text, path


def test_everything_is_allowed_without_key_and_origins(hurried):
    reply = request(hurried, "GET", "/v1/models", origin="http://any.example")
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "*"
    for headers in ({}, {"authorization": "Bearer whatever"}):
        assert request(hurried, "GET", "/server_info", **headers).status_code == 200
