"""Clients that leave, read slowly or come by the thousand; engines that die; keys and other settings."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import pytest

from phalanx.core.request import WORKER_SHIFT
from phalanx.runtime.channels import EngineChannel
from tests.e2e import fake_engine
from tests.e2e.fake_engine import FakeEngine, count_up
from tests.e2e.server_harness import (
    MODEL,
    PATIENCE_S,
    Server,
    changed,
    make_settings,
    running,
    sse_events,
    wait_until,
    write_byte_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_byte_tokenizer(tmp_path_factory.mktemp("tok"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, tokenizer):
    with running(tmp_path_factory.mktemp("run"), make_settings(tokenizer)) as server:
        yield server


@pytest.fixture(autouse=True)
def engine(server):
    engine = server.engine
    engine.reply, engine.budget, engine.step_s = count_up, None, 0.0
    engine.seen.clear()
    engine.aborted.clear()
    yield engine
    engine.budget = None
    wait_until(lambda: not engine.running, "an idle engine")


def post_raw(server, path, body, receive_buffer=None):
    """A request on a bare socket; the answer is left unread."""
    data = json.dumps(body).encode()
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    client.sendall(f"{head}\r\n\r\n".encode() + data)
    return client


ROUTES = [
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 50}}),
    ("/v1/completions", {"prompt": "x", "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
]


# ---- clients that leave


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=lambda x: str(x)[:20])
def test_client_that_leaves_is_aborted(server, engine, path, body, is_stream):
    """B16: its sequences end in the engine, streaming or not."""
    engine.budget = 3
    client = post_raw(server, path, {**body, "stream": is_stream})
    count = body.get("n", 1)
    wait_until(lambda: len(engine.running) == count, "the request in the engine")
    if is_stream:
        assert client.recv(10_000).startswith(b"HTTP/1.1 200")
    client.close()
    wait_until(lambda: not engine.running, "the abort")
    assert sorted(engine.aborted) == sorted(r.stream_id for r in engine.seen)


def test_many_clients_that_leave(server, engine):
    engine.budget = 1
    clients = [post_raw(server, "/generate", {"text": "x", "stream": i % 2 == 0}) for i in range(100)]
    wait_until(lambda: len(engine.running) == 100, "the requests in the engine")
    for client in clients:
        client.close()
    wait_until(lambda: len(engine.aborted) == 100 and not engine.running, "the aborts")
    info = httpx.get(f"{server.url}/server_info").json()["kv_cache"]
    assert info["held_pages"] == 0 and info["free_pages"] == info["total_pages"]


def test_client_that_leaves_before_its_body_is_whole(server, engine):
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    client.close()
    assert httpx.post(f"{server.url}/generate", json={"text": "x"}).status_code == 200
    assert len(engine.seen) == 1


def test_connections_are_kept_and_reused(server, engine):
    with httpx.Client(base_url=server.url) as client:
        for is_stream in (True, False, True):
            reply = client.post("/generate", json={"text": "x", "stream": is_stream})
            assert reply.status_code == 200 and "connection" not in reply.headers
        for path in ("/generate", "/v1/models", "/nothing"):
            assert client.post(path, content=b"{}").status_code in (400, 404, 405)


def test_upgrade_is_ignored_and_nothing_is_advised(tmp_path, tokenizer, capfd):
    with running(tmp_path, make_settings(tokenizer)) as server:
        for upgrade in ("websocket", "h2c"):
            headers = {"connection": "upgrade", "upgrade": upgrade}
            with httpx.Client(base_url=server.url) as client:
                assert client.get("/v1/models", headers=headers).status_code == 200
                assert client.get("/health").status_code == 200  # on the same connection
    assert "pgrade" not in capfd.readouterr().err


# ---- clients that read slowly, or all at once


def test_slow_reader_gets_all_text_in_fewer_chunks(tmp_path_factory, tokenizer):
    """Its stream is joined while its buffer is full; others go on, and nothing is lost or reordered."""
    num_tokens = 3000
    settings = make_settings(tokenizer)
    scheduler = msgspec.structs.replace(settings.scheduler, context_length=2 * num_tokens)
    settings = msgspec.structs.replace(settings, scheduler=scheduler)
    run_dir = tmp_path_factory.mktemp("run")
    with running(run_dir, settings, wrapper=changed(run_dir, "response", STALL_S=3600)) as server:
        server.engine.step_s = 0.001
        body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": num_tokens}}
        client = post_raw(server, "/generate", body, receive_buffer=4096)
        # The engine is done before the client has read a byte: nobody waited for it.
        wait_until(lambda: bool(server.engine.seen) and not server.engine.running, "the engine's end")
        assert httpx.post(f"{server.url}/generate", json={"text": "x"}).status_code == 200
        raw = read_all(client)
    events = sse_events(unchunk(raw.partition(b"\r\n\r\n")[2]).decode())
    text = "".join(chr(97 + i % 26) for i in range(num_tokens))
    assert events[-1] == "[DONE]" and events[-2]["text"] == text
    counts = [e["meta_info"]["completion_tokens"] for e in events[:-1]]
    assert all(e["text"] == text[:count] for e, count in zip(events[:-1], counts, strict=True))
    assert counts == sorted(set(counts)) and counts[-1] == num_tokens
    # One event per token would be 20 MB, far more than the kernel's buffers hold.
    assert len(raw) < 12_000_000 and any(b - a > 100 for a, b in pairwise(counts))


def unchunk(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)


def test_a_thousand_streams_with_few_descriptors_at_first(tmp_path_factory, tokenizer):
    """B48: the worker raises its own soft limit, and no client is reset."""
    count = 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("the hard limit of open files is too low for this test")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard < 2**20 else 2**20, hard))
    try:
        limit = 'ulimit -Sn 256; exec "$@"'
        run_dir = tmp_path_factory.mktemp("run")
        with running(run_dir, make_settings(tokenizer), wrapper=["bash", "-c", limit, "-"]) as server:
            server.engine.budget = 1
            body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 2}}
            clients = [post_raw(server, "/generate", body) for _ in range(count)]
            wait_until(lambda: len(server.engine.running) == count, "all streams")
            server.engine.budget = None
            replies = [read_all(client) for client in clients]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(reply.startswith(b"HTTP/1.1 200") and b"[DONE]" in reply for reply in replies)


def read_all(client):
    """Until the last chunk of a kept-alive response."""
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        part = client.recv(65536)
        assert part, "the connection was reset"
        data += part
    client.close()
    return bytes(data)


# ---- engines that load, fall silent, die


def test_loading_then_ready(tmp_path, tokenizer):
    server = Server(tmp_path, make_settings(tokenizer))
    try:
        server.wait_status(503)
        for path in ("/health/", "/ready", "/ping"):
            assert httpx.get(server.url + path).status_code == 503
        reply = httpx.post(f"{server.url}/generate", json={"text": "x"})
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "loading"
        assert httpx.get(f"{server.url}/server_info").status_code == 503
        server.engine.announce()
        server.wait_status(200)
        assert httpx.post(f"{server.url}/generate", json={"text": "x"}).status_code == 200
    finally:
        server.close()


def test_killed_engine(tmp_path, tokenizer):
    """B50: clients get an error at once, streaming or not, and health turns to 503."""
    command = [sys.executable, "-m", fake_engine.__name__, "--ipc-dir", str(tmp_path), "--budget", "0"]
    engine = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    server = Server(tmp_path, make_settings(tokenizer), in_thread=False)
    try:
        server.wait_status(200)
        body = {"text": "x", "sampling_params": {"max_new_tokens": 40, "n": 1}}
        results = {}

        def post(is_stream):
            results[is_stream] = httpx.post(f"{server.url}/generate", json={**body, "stream": is_stream})

        threads = [threading.Thread(target=post, args=(kind,)) for kind in (True, False)]
        for thread in threads:
            thread.start()
        url = f"{server.url}/server_info"
        wait_until(lambda: httpx.get(url).json()["internal_states"][0]["running"] == 2, "both in the engine")
        engine.kill()
        for thread in threads:
            thread.join(PATIENCE_S)
        for kind in (True, False):
            assert results[kind].status_code == 503, results[kind].text
            assert results[kind].json()["error"]["code"] is None
        server.wait_status(503)
        reply = httpx.post(f"{server.url}/generate", json={"text": "x"})
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_dead"
    finally:
        engine.kill()
        engine.wait()
        server.close()


def test_engine_killed_in_the_middle_of_a_stream(tmp_path, tokenizer):
    command = [sys.executable, "-m", fake_engine.__name__, "--ipc-dir", str(tmp_path), "--budget", "1"]
    engine = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    server = Server(tmp_path, make_settings(tokenizer), in_thread=False)
    try:
        server.wait_status(200)
        body = {"prompt": "x", "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            engine.kill()
            rest = [line for line in lines if line]
        assert "data: [DONE]" not in rest
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["retryable"] is True
    finally:
        engine.kill()
        engine.wait()
        server.close()


def test_health_during_a_long_step(server, engine):
    """B50: an engine that is busy for a while is not dead."""
    engine.step_s, engine.budget = 3.0, 1
    client = post_raw(server, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
    wait_until(lambda: bool(engine.seen), "the request in the engine")
    for _ in range(5):
        assert httpx.get(f"{server.url}/health").status_code == 200
        time.sleep(0.3)
    assert b"200 OK" in client.recv(10_000)
    client.close()


def test_sigterm_finishes_requests_and_exits_with_0(tmp_path, tokenizer):
    server = Server(tmp_path, make_settings(tokenizer))
    try:
        server.engine.announce()
        server.wait_status(200)
        server.engine.budget = 1
        client = post_raw(server, "/generate", {"text": "x", "stream": True})
        assert client.recv(10_000)
        server.process.terminate()
        time.sleep(0.3)
        assert server.process.poll() is None
        server.engine.budget = None
        assert b"[DONE]" in read_all(client)
        assert server.process.wait(PATIENCE_S) == 0
    finally:
        server.close()


def test_sigterm_waits_for_nobody_but_running_sequences(tmp_path, tokenizer):
    """Half a request, or none, is closed at once; the running stream is finished."""
    server = Server(tmp_path, make_settings(tokenizer))
    try:
        server.engine.announce()
        server.wait_status(200)
        server.engine.budget = 1
        running_client = post_raw(server, "/generate", {"text": "x", "stream": True})
        assert running_client.recv(10_000)
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        used = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        starts = {"nothing": b"", "half a head": head[:20], "no body": head, "half a body": head + b"{"}
        starts |= {
            "a body for FastAPI": head.replace(b"generate", b"tokenize") + b"{",
            "after a request": used,
            "half a second request": used + head + b"{",
        }
        clients = {}
        for name, data in starts.items():
            clients[name] = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
            clients[name].sendall(data)
        flush = post_raw(server, "/flush_cache?timeout=100", {})
        # Connections are taken in their order: what came on the earlier ones is read by then.
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.process.terminate()
        for name, client in clients.items():
            while part := client.recv(10_000):
                assert part.startswith(b"HTTP/1.1 200"), name
            client.close()
        assert flush.recv(10_000).startswith(b"HTTP/1.1 400")
        flush.close()
        assert server.process.poll() is None and server.engine.running
        server.engine.budget = None
        assert b"[DONE]" in read_all(running_client)
        assert server.process.wait(PATIENCE_S) == 0
    finally:
        server.close()


def test_sigterm_does_not_wait_long_for_a_client_that_does_not_read(tmp_path, tokenizer):
    settings = make_settings(tokenizer)
    scheduler = msgspec.structs.replace(settings.scheduler, context_length=5000)
    server = Server(tmp_path, msgspec.structs.replace(settings, scheduler=scheduler))
    try:
        server.engine.announce()
        server.wait_status(200)
        server.engine.step_s = 0.0005
        body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 3000}}
        client = post_raw(server, "/generate", body, receive_buffer=4096)
        wait_until(lambda: bool(server.engine.seen) and not server.engine.running, "the engine's end")
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
        client.close()
    finally:
        server.close()


def test_worker_does_not_outlive_its_parent(tmp_path, tokenizer):
    """The worker's parent is killed: the worker is gone within seconds."""
    settings = tmp_path / "settings.json"
    settings.write_bytes(msgspec.json.encode(make_settings(tokenizer)))
    listener = socket.create_server(("127.0.0.1", 0))
    script = (
        "import os, subprocess, sys, time\n"
        f"fd = {listener.fileno()}\n"
        "args = [sys.executable, '-m', 'phalanx.server', '--settings', sys.argv[1],\n"
        "        '--ipc-dir', sys.argv[2], '--worker-id', '0', '--fd', str(fd),\n"
        "        '--parent-pid', str(os.getpid())]\n"
        "child = subprocess.Popen(args, pass_fds=(fd,))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(settings), str(tmp_path)]
    parent = subprocess.Popen(command, pass_fds=(listener.fileno(),), stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with contextlib.suppress(httpx.TransportError):
        httpx.get(f"{url}/health")
    watch = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    assert select.select([watch], [], [], PATIENCE_S)[0], "the worker lives on"
    os.close(watch)
    parent.stdout.close()
    listener.close()


# ---- settings


def test_api_key(tmp_path, tokenizer):
    """B47: health and preflight are open, everything else asks for the key."""
    with running(tmp_path, make_settings(tokenizer, api_key="sesame")) as server:
        with httpx.Client(base_url=server.url) as client:
            for path in ("/health", "/health/", "/ready", "/ready/", "/ping", "/ping/"):
                assert client.get(path).status_code == 200
            assert client.options("/generate").status_code == 200
            paths = ["/generate", "/v1/chat/completions", "/v1/completions", "/tokenize", "/abort_request"]
            for method, path in [
                *(("POST", path) for path in paths),
                *(("GET", path) for path in ("/v1/models", "/server_info", "/metrics", "/docs", "/nowhere")),
                ("POST", "/flush_cache"),
                ("GET", "/health_generate"),
            ]:
                for value in (None, "Bearer wrong", "Bearer sesame2", "sesame", "Basic sesame", "Bearer"):
                    headers = {} if value is None else {"authorization": value}
                    reply = client.request(method, path, headers=headers)
                    assert reply.status_code == 401, (path, value)
                    assert reply.json()["error"]["type"] == "authentication_error"
            for value in ("Bearer sesame", "bearer sesame", "BEARER  sesame"):
                assert client.get("/v1/models", headers={"authorization": value}).status_code == 200
            good = {"authorization": "Bearer sesame"}
            assert client.post("/generate", json={"text": "x"}, headers=good).status_code == 200
            assert "sesame" not in client.get("/server_info", headers=good).text


def test_without_a_tokenizer(tmp_path):
    with running(tmp_path, make_settings("nowhere", skip_tokenizer_init=True)) as server:
        with httpx.Client(base_url=server.url) as client:
            body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
            reply = client.post("/generate", json=body).json()
            assert reply["output_ids"] == [97, 98] and "text" not in reply
            events = sse_events(client.post("/generate", json={**body, "stream": True}).text)
            assert events[-2]["output_ids"] == [97, 98] and "text" not in events[-2]
            for path, wrong in [
                ("/generate", {"text": "x"}),
                ("/generate", {**body, "sampling_params": {"stop": "x"}}),
                ("/generate", {**body, "sampling_params": {"stop_regex": "x"}}),
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/completions", {"prompt": [1], "stop": "x"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ("/tokenize", {"prompt": "x"}),
                ("/detokenize", {"tokens": [1]}),
            ]:
                assert client.post(path, json=wrong).status_code == 400, path
            assert client.get("/health_generate").status_code == 200


def test_completions_of_ids_without_a_tokenizer(tmp_path):
    """All but text: ids in and out, counts, stop tokens, scores of prompt and output."""
    with running(tmp_path, make_settings("nowhere", skip_tokenizer_init=True)) as server:
        url = f"{server.url}/v1/completions"
        body = {"prompt": [[1, 2], [3]], "max_tokens": 3, "stop_token_ids": [99]}
        reply = httpx.post(url, json=body).json()
        assert [c["text"] for c in reply["choices"]] == ["", ""]
        assert [c["prompt_token_ids"] for c in reply["choices"]] == [[1, 2], [3]]
        assert [c["token_ids"] for c in reply["choices"]] == [[97, 98, 99]] * 2
        assert [c["matched_stop"] for c in reply["choices"]] == [99, 99]
        assert reply["usage"]["prompt_tokens"] == 3 and reply["usage"]["completion_tokens"] == 6
        *events, done = sse_events(httpx.post(url, json={**body, "stream": True}).text)
        assert done == "[DONE]"
        for index, prompt in enumerate(body["prompt"]):
            mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
            assert [i for c in mine for i in c.get("token_ids", ())] == [97, 98, 99]
            assert [c["prompt_token_ids"] for c in mine if "prompt_token_ids" in c] == [prompt]
            assert mine[-1]["finish_reason"] == "stop"
        scored = {"prompt": [7, 8], "max_tokens": 1, "echo": True, "logprobs": 1}
        logprobs = httpx.post(url, json=scored).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:7", "token_id:8", "token_id:97"]
        assert logprobs["top_logprobs"][1] == {"token_id:8": logprobs["token_logprobs"][1]}
        error = httpx.post(url, json={"prompt": "x"}).json()["error"]
        assert error["code"] == "no_tokenizer"


def test_incremental_output_and_interval(tmp_path, tokenizer):
    settings = make_settings(tokenizer, incremental_streaming_output=True, stream_interval=4)
    with running(tmp_path, settings) as server:
        server.engine.step_s = 0.02
        body = {
            "text": "x",
            "stream": True,
            "sampling_params": {"max_new_tokens": 11},
            "return_logprob": True,
        }
        *events, done = sse_events(httpx.post(f"{server.url}/generate", json=body).text)
        assert done == "[DONE]" and "".join(e["text"] for e in events) == "abcdefghijk"
        assert [i for e in events for i in e["output_ids"]] == list(range(97, 108))
        told = [i for e in events for _, i, _ in e["meta_info"]["output_token_logprobs"]]
        assert told == list(range(97, 108))
        counts = [e["meta_info"]["completion_tokens"] for e in events]
        assert counts[-1] == 11 and len(counts) <= 4
        assert all(b - a >= 4 for a, b in pairwise(counts[:-1]))


def test_two_workers_hear_of_each_others_aborts(tmp_path, tokenizer):
    """A request is aborted through a worker that does not have it, and outputs go to their worker only."""
    settings = make_settings(tokenizer, api_workers=2)
    dirs = [tmp_path / "a", tmp_path / "b"]
    ipc = tmp_path / "ipc"
    for folder in (*dirs, ipc):
        folder.mkdir()
    workers = [
        Server(folder, settings, in_thread=False, worker_id=i, ipc_dir=ipc) for i, folder in enumerate(dirs)
    ]
    engine = FakeEngine(EngineChannel(str(ipc), 2), num_workers=2, budget=1)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    try:
        engine.announce()
        for worker in workers:
            worker.wait_status(200)
        body = {"text": "x", "stream": True, "rid": "mine"}
        with httpx.stream("POST", f"{workers[1].url}/generate", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines)
            assert httpx.post(f"{workers[0].url}/abort_request", json={"rid": "mine"}).status_code == 200
            assert '"type":"abort"' in [line for line in lines if line][-2]
        wait_until(lambda: bool(engine.aborted), "the engine to hear of the abort")
        assert [i >> WORKER_SHIFT for i in engine.aborted] == [1]
        engine.budget = None
        for worker in workers:
            reply = httpx.post(f"{worker.url}/generate", json={"text": "x", "sampling_params": {"n": 2}})
            assert len({r["meta_info"]["id"] for r in reply.json()}) == 2
        assert [r.stream_id >> WORKER_SHIFT for r in engine.seen] == [1, 0, 0, 1, 1]
        assert len({r.sampling.sampling_seed for r in engine.seen}) == 5
        assert httpx.get(f"{workers[1].url}/v1/models").json()["data"][0]["id"] == MODEL
    finally:
        for worker in workers:
            worker.close()
        engine.stopping.set()
        thread.join(PATIENCE_S)
        engine.channel.close()
