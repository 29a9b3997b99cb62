"""SmolLM2 over real HTTP, by the `openai` client and by rough ones (B16, B18, B19, B23, B30, B37)."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server_harness import PATIENCE_S
from tests.e2e.serving import Server

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

ALPHABET = "A, B, C, D, E,"


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def generate(server: Server, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(server: Server, **body: Any) -> list[dict[str, Any]]:
    """Events of a streamed /generate, which must end with [DONE]."""
    with httpx.stream("POST", f"{server.url}/generate", json={**body, "stream": True}, timeout=120) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_chat_streams_what_it_answers(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name three fruits."}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens > 0
    server.assert_live()


def test_batch_and_stream_equal_single_requests(server: Server) -> None:
    texts = ["The capital of France is", ALPHABET, "2 + 2 ="]
    params = {"temperature": 0, "max_new_tokens": 20}
    singles = [generate(server, text=t, sampling_params=params) for t in texts]
    batch = generate(server, text=texts, sampling_params=params)
    assert [r["text"] for r in batch] == [r["text"] for r in singles]
    assert [r["output_ids"] for r in batch] == [r["output_ids"] for r in singles]
    for text, single in zip(texts, singles, strict=True):
        streamed = events(server, text=text, sampling_params=params)
        assert streamed[-1]["text"] == single["text"]
        assert streamed[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
        so_far = ""
        for event in streamed:  # cumulative, as SGLang's
            assert event["text"].startswith(so_far)
            so_far = event["text"]


def test_stop_strings_never_leak(server: Server) -> None:
    full = generate(server, text=ALPHABET, sampling_params={"temperature": 0, "max_new_tokens": 30})
    stop = " H, I"
    params = {"temperature": 0, "max_new_tokens": 30, "stop": stop}
    cut = generate(server, text=ALPHABET, sampling_params=params)
    assert cut["text"] == full["text"][: full["text"].index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["meta_info"]["completion_tokens"] == len(cut["output_ids"]) < 30
    for event in events(server, text=ALPHABET, sampling_params=params):
        assert cut["text"].startswith(event["text"])
    kept = generate(server, text=ALPHABET, sampling_params={**params, "no_stop_trim": True})
    assert kept["text"] == cut["text"] + stop
    near = generate(server, text=ALPHABET, sampling_params={**params, "stop": "H, X"})
    assert near["text"] == full["text"]
    server.assert_live()


def test_greedy_rows_do_not_care_who_shares_the_batch(server: Server) -> None:
    want = generate(server, text=ALPHABET, sampling_params={"temperature": 0, "max_new_tokens": 24})["text"]
    others = [
        {"temperature": 1, "max_new_tokens": 24},
        {"temperature": 0, "top_p": 0.5, "max_new_tokens": 24},
        {"temperature": 1.5, "top_k": 50, "max_new_tokens": 24},
        {"temperature": 0, "max_new_tokens": 24},
        {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.3, "max_new_tokens": 24},
    ]
    replies = generate(server, text=[ALPHABET] * len(others), sampling_params=others)
    assert replies[1]["text"] == replies[3]["text"] == want


def test_seeded_requests_repeat(server: Server) -> None:
    params = {"temperature": 1, "max_new_tokens": 24, "sampling_seed": 1234}
    alone = generate(server, text="Once upon a time", sampling_params=params)["text"]
    crowd = generate(
        server,
        text=["Once upon a time", *["Something else"] * 5],
        sampling_params=[params, *[{"temperature": 1, "max_new_tokens": 30}] * 5],
    )
    assert crowd[0]["text"] == alone


def _leave(server: Server, stream: bool, wait_for_bytes: int) -> None:
    """Send a long request over a raw socket and cut the line."""
    params = {"max_new_tokens": 1500, "ignore_eos": True}
    body = json.dumps({"text": "Once", "stream": stream, "sampling_params": params}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        got = 0
        while got < wait_for_bytes:
            part = sock.recv(65536)
            assert part, "the connection was closed"
            got += len(part)


def test_clients_that_leave_free_their_pages(server: Server) -> None:
    for _ in range(3):
        _leave(server, stream=True, wait_for_bytes=1500)
    server.assert_live()
    crowd = [threading.Thread(target=_leave, args=(server, i % 2 == 0, 0)) for i in range(200)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    server.assert_live()


def test_abort_during_and_after_chunked_prefill(server: Server) -> None:
    """B18 over HTTP; tests/unit/test_chunked_prefill.py hits the exact steps."""
    words = "word " * 1500  # chunks of 256
    for delay in (0.05, 0.3, 0.8):
        rid, has_ended = f"chunked-{delay}", threading.Event()
        body = {"text": words, "rid": rid, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}

        def abort(rid: str = rid, delay: float = delay, has_ended: threading.Event = has_ended) -> None:
            while not has_ended.wait(delay):  # again, if it was not there yet
                httpx.post(f"{server.url}/abort_request", json={"rid": rid})

        thread = threading.Thread(target=abort)
        thread.start()
        reply = httpx.post(f"{server.url}/generate", json=body)
        has_ended.set()
        thread.join()
        if reply.status_code == 200:
            assert reply.json()["meta_info"]["finish_reason"]["type"] == "abort"
        server.assert_live()


def test_health_answers_during_long_prefills(server: Server) -> None:
    """B50, its first half."""
    body = {"text": "word " * 1900, "sampling_params": {"max_new_tokens": 1}}
    work = threading.Thread(target=generate, args=(server,), kwargs=body)
    work.start()
    answers = 0
    while work.is_alive():
        assert httpx.get(f"{server.url}/health").status_code == 200
        answers += 1
        work.join(0.02)
    assert answers > 1
    server.assert_live()


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"input_ids": [5] * 2048}, ("2048",)),
        ({"input_ids": [5] * 20480}, ("20480", "2048")),
        ({"input_ids": [49152]}, ("49152",)),
        ({"input_ids": [5], "sampling_params": {"stop_token_ids": [-1]}}, ("stop_token_ids",)),
        ({"input_ids": [5], "sampling_params": {"logit_bias": {"1000000000": 1}}}, ("logit_bias",)),
        ({"text": ""}, ()),
        ({"input_ids": []}, ()),
        ({"input_ids": [[]]}, ()),
    ],
)
def test_bad_requests_get_their_own_400(
    server: Server, body: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    reply = httpx.post(f"{server.url}/generate", json=body)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert all(n in message for n in numbers), message
    server.assert_live()


def test_prompt_of_context_minus_one_gives_one_token(server: Server) -> None:
    reply = generate(server, input_ids=[5] * 2047, sampling_params={"max_new_tokens": 999999})
    assert len(reply["output_ids"]) == 1
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    server.assert_live()


def test_prompt_logprobs_and_output_logprobs(server: Server) -> None:
    reply = generate(
        server,
        text="The capital of France is",
        sampling_params={"temperature": 0, "max_new_tokens": 4},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    meta = reply["meta_info"]
    assert [t[1] for t in meta["output_token_logprobs"]] == reply["output_ids"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    assert all(t[0] <= 0 for t in meta["output_token_logprobs"])


def test_flush_cache_and_models(server: Server, client: openai.OpenAI) -> None:
    assert httpx.post(f"{server.url}/flush_cache").status_code == 200
    assert [m.id for m in client.models.list().data] == ["smollm2"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
