"""Prompts of megabytes: refused early where that can be, and a stream beside them goes on."""

from __future__ import annotations

import os
import select
import signal
import threading

import httpx
import msgspec
import psutil
import pytest

from tests.e2e.server_harness import (
    CONTEXT,
    PATIENCE_S,
    make_settings,
    running,
    wait_until,
    write_byte_tokenizer,
)

BIG = "naïve text, and more of it; " * 110_000  # 3 MB


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tok"))
    with running(tmp_path_factory.mktemp("run"), make_settings(folder)) as server:
        yield server


BODIES = [
    ("/generate", {"text": BIG}),
    ("/generate", {"text": ["short", BIG]}),
    ("/v1/completions", {"prompt": BIG}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": BIG}]}),
]


def test_a_long_prompt_that_fits_arrives_whole(tmp_path):
    """Longer than what is done in one go: its ids are converted in slices."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = make_settings(write_byte_tokenizer(tmp_path))
    scheduler = msgspec.structs.replace(settings.scheduler, context_length=10**6)
    text = "é1" * 70_000
    with running(run_dir, msgspec.structs.replace(settings, scheduler=scheduler)) as server:
        for path, body in (
            ("/generate", {"text": text, "sampling_params": {"max_new_tokens": 1}}),
            ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ):
            assert httpx.post(server.url + path, json=body).status_code == 200
        assert [r.input_ids.tolist() for r in server.engine.seen] == [list(text.encode())] * 2


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda x: str(x)[:30])
def test_what_can_never_fit_is_refused_with_the_numbers(server, path, body):
    reply = httpx.post(server.url + path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "at least" in error["message"] and str(CONTEXT) in error["message"]
    assert server.engine.seen == []


def test_what_just_does_not_fit_is_counted(server):
    """Nearer to the limit the text is tokenized, and the number is exact."""
    error = httpx.post(f"{server.url}/generate", json={"text": "é" * (CONTEXT // 2)}).json()["error"]
    assert f"has {CONTEXT} tokens" in error["message"]
    reply = httpx.post(f"{server.url}/generate", json={"text": "é" * (CONTEXT // 2 - 1) + "x"})
    assert reply.json()["meta_info"]["completion_tokens"] == 1


def test_bodies_of_megabytes_are_served_alike(tmp_path):
    """Prepared in a process of their own (`server.side_process`), which ends with the worker."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = make_settings(write_byte_tokenizer(tmp_path))
    scheduler = msgspec.structs.replace(settings.scheduler, context_length=2**22)
    with running(run_dir, msgspec.structs.replace(settings, scheduler=scheduler)) as server:

        def post(path: str, **fields: object) -> httpx.Response:
            reply = httpx.post(server.url + path, json=fields)
            assert reply.status_code == 200, reply.text[:300]
            return reply

        def seen() -> list[list[int]]:
            ids = sorted((r.stream_id, r.input_ids.tolist()) for r in server.engine.seen)
            server.engine.seen.clear()
            return [one for _, one in ids]

        long, text = [i % 200 + 1 for i in range(400_000)], "né " * 400_000
        one = {"max_new_tokens": 1}
        post("/generate", input_ids=long, sampling_params=one)
        assert seen() == [long]
        post("/generate", input_ids=[long, [7]], sampling_params=[one, {"max_new_tokens": 2}])
        assert seen() == [long, [7]]
        post("/generate", text=[text, "a"], sampling_params=one)
        assert seen() == [list(text.encode()), [97]]
        reply = post("/v1/completions", prompt=long, max_tokens=1, echo=True)
        assert reply.json()["usage"]["prompt_tokens"] == len(long) and seen() == [long]
        reply = post("/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=1)
        (ids,) = seen()
        assert text in bytes(i for i in ids if i < 256).decode()
        assert reply.json()["usage"]["prompt_tokens"] == len(ids)
        tokens = post("/tokenize", prompt=text).json()["tokens"]
        assert tokens == list(text.encode())
        assert post("/detokenize", tokens=tokens).json()["text"] == text

        (side,) = psutil.Process(server.process.pid).children(recursive=True)
        assert "phalanx.server.side_process" in side.cmdline()
        watch = os.pidfd_open(side.pid)
        os.kill(server.process.pid, signal.SIGKILL)
        assert select.select([watch], [], [], PATIENCE_S)[0], "the side process lives on"
        os.close(watch)


def test_a_stream_beside_it_goes_on(server):
    """Tokens keep coming while megabytes are decoded, tokenized and answered."""
    engine, num_events, stop = server.engine, 0, threading.Event()
    engine.step_s = 0.001

    def read() -> None:
        nonlocal num_events
        params = {"max_new_tokens": CONTEXT - 1, "ignore_eos": True}
        while not stop.is_set():
            ask = {"input_ids": [1], "stream": True, "sampling_params": params}
            with httpx.stream("POST", f"{server.url}/generate", json=ask) as reply:
                for _ in reply.iter_raw():
                    num_events += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: num_events > 10, "a running stream")
        meanwhile = 0
        for num_asked in range(30):
            before = num_events
            reply = httpx.post(f"{server.url}/tokenize", json={"prompt": BIG})
            meanwhile += num_events - before
            assert reply.json()["count"] == len(BIG.encode())
            if num_asked >= 2 and meanwhile > 20:
                break
        assert meanwhile > 20
    finally:
        stop.set()
        reader.join(PATIENCE_S)
        engine.step_s = 0.0
        engine.seen.clear()
