"""POST /generate, errors, management: the real worker process against a scripted engine."""

from __future__ import annotations

import socket
import time

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.server.schema_generate import DetokenizeBody, GenerateBody, SamplingFields, TokenizeBody
from phalanx.server.schema_openai import ChatBody, CompletionBody
from tests.e2e.fake_engine import TOTAL_PAGES, count_up, logprob_of
from tests.e2e.server_harness import (
    CONTEXT,
    EOS,
    MODEL,
    PATIENCE_S,
    VOCAB_SIZE,
    make_settings,
    running,
    sse_events,
    wait_until,
    write_byte_tokenizer,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tok"))
    with running(tmp_path_factory.mktemp("run"), make_settings(folder)) as server:
        yield server


@pytest.fixture(autouse=True)
def engine(server, client):
    """The engine, back to its default script, and idle after the test."""
    engine = server.engine
    engine.reply, engine.budget, engine.refuse, engine.step_s = count_up, None, lambda request: None, 0.0
    engine.seen.clear()
    engine.aborted.clear()
    yield engine
    engine.budget = None
    wait_until(lambda: not engine.running, "an idle engine")
    assert client.get("/health").status_code == 200


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, verify=False) as client:
        yield client


def generate(client, sampling=None, **body):
    body.setdefault("text", "hello")
    reply = client.post("/generate", json={"sampling_params": sampling or {}, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(client, sampling=None, **body):
    body.setdefault("text", "hello")
    reply = client.post("/generate", json={"sampling_params": sampling or {}, "stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = sse_events(reply.text)
    assert events[-1] == "[DONE]" and "[DONE]" not in events[:-1]
    return events[:-1]


def error_of(reply, status, param=None):
    """The error object, with OpenAI's four fields and nothing of a stack trace."""
    assert reply.status_code == status, reply.text
    assert "Traceback" not in reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"] == param, error
        assert param.split(".")[-1] in error["message"]
    return error


# ---- /generate


def test_one_prompt(client, engine):
    reply = generate(client, {"max_new_tokens": 4})
    assert reply["text"] == "abcd" and reply["output_ids"] == [97, 98, 99, 100]
    meta = reply["meta_info"]
    assert meta.pop("e2e_latency") > 0 and len(meta.pop("id")) == 32
    assert meta == {
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "weight_version": "default",
    }
    (request,) = engine.seen
    assert request.input_ids.tolist() == list(b"hello") and request.stop_ids == (EOS,)


def test_defaults_are_sglangs(client, engine):
    generate(client, input_ids=[1], text=None)
    generate(client, {"max_new_tokens": None, "temperature": None, "stop": None, "n": None})
    with_default, with_null = engine.seen
    assert with_default.sampling.max_new_tokens == CONTEXT - 1  # 128, and no more than there is room for
    assert with_null.sampling.max_new_tokens == CONTEXT - 5
    assert with_null.sampling.temperature == 1.0 and with_null.logprobs is None


def test_put_works_and_other_methods_do_not(client):
    assert client.put("/generate", json={"text": "x"}).status_code == 200
    error_of(client.get("/generate"), 405)
    error_of(client.delete("/v1/models"), 405)
    for path in ("/nowhere", "/chat/completions"):
        error = error_of(client.post(path, json={}), 404)
        assert f"no route {path}: " in error["message"] and "/v1" in error["message"]


def test_batches_give_lists(client, engine):
    replies = generate(client, [{"max_new_tokens": 1}, {"max_new_tokens": 2}], text=["x", "yz"])
    assert [r["text"] for r in replies] == ["a", "ab"]
    assert [r["meta_info"]["prompt_tokens"] for r in replies] == [1, 2]
    assert [r["text"] for r in generate(client, {"max_new_tokens": 2}, text=["x"])] == ["ab"]
    replies = generate(client, {"max_new_tokens": 1}, text=None, input_ids=[[1], [2, 3]], rid=["r1", "r2"])
    assert [r["meta_info"]["id"] for r in replies] == ["r1", "r2"]
    assert [r.input_ids.tolist() for r in engine.seen[-2:]] == [[1], [2, 3]]


def test_n_outputs_have_their_own_seeds(client, engine):
    replies = generate(client, {"max_new_tokens": 2, "n": 3, "sampling_seed": 7}, rid="x")
    assert [r["text"] for r in replies] == ["ab"] * 3
    seeds = [r.sampling.sampling_seed for r in engine.seen]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    generate(client, {"n": 2})
    drawn = [r.sampling.sampling_seed for r in engine.seen[3:]]
    assert len({*seeds, *drawn}) == 5


def test_streams_carry_everything_so_far(client):
    events = stream(client, {"max_new_tokens": 6}, rid="mine")
    final = events[-1]
    assert final["text"] == "abcdef" and final["meta_info"]["finish_reason"] == {
        "type": "length",
        "length": 6,
    }
    assert final["meta_info"]["e2e_latency"] > 0
    before = 0
    for event in events:
        count = event["meta_info"]["completion_tokens"]
        assert event["text"] == ALPHABET[:count] and event["output_ids"] == list(range(97, 97 + count))
        assert event["meta_info"]["id"] == "mine" and event["meta_info"]["prompt_tokens"] == 5
        assert count > before and "index" not in event
        before = count
    assert all(e["meta_info"]["finish_reason"] is None for e in events[:-1])


def test_batch_streams_carry_an_index(client):
    events = stream(client, {"max_new_tokens": 3, "n": 2}, text=["x", "y"])
    assert {e["index"] for e in events} == {0, 1, 2, 3}
    for index in range(4):
        mine = [e for e in events if e["index"] == index]
        assert mine[-1]["text"] == "abc" and mine[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_stop_token_and_ignore_eos(client, engine):
    engine.reply = lambda request: [97, 98, EOS, 99]
    reply = generate(client, {"max_new_tokens": 9})
    assert reply["text"] == "ab" and reply["output_ids"] == [97, 98, EOS]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    reply = generate(client, {"max_new_tokens": 4, "ignore_eos": True})
    assert reply["output_ids"] == [97, 98, EOS, 99] and reply["text"] == "abc"
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    reply = generate(client, {"max_new_tokens": 4, "stop_token_ids": [98], "ignore_eos": True})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 98}
    assert engine.seen[-1].stop_ids == (98,)


@pytest.mark.parametrize(
    ("stop", "trim", "text"),
    [
        (["defg"], True, "abc"),
        ("defg", True, "abc"),
        (["defg"], False, "abcdefg"),
        (["zzz", "cdx", "fg"], True, "abcde"),
        (["xyz!"], True, ALPHABET),
    ],
)
def test_stop_strings_over_several_tokens(client, engine, stop, trim, text):
    """B37: the stream adds up to the plain reply; nothing past the stop, and no held text is lost."""
    matched = {"abc": "defg", "abcdefg": "defg", "abcde": "fg"}.get(text)
    # With a match the engine halts at 26 tokens and never ends by itself: only an abort gets rid of it.
    engine.budget = 26
    sampling = {"max_new_tokens": 40 if matched else 26, "stop": stop, "no_stop_trim": not trim}
    plain = generate(client, sampling)
    events = stream(client, sampling)
    assert plain["text"] == events[-1]["text"] == text
    assert plain["output_ids"] == events[-1]["output_ids"]
    if matched is None:
        assert plain["meta_info"]["finish_reason"]["type"] == "length"
        return
    assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    # What was generated past the stop is not counted: the last id completes it.
    expected = list(range(97, 97 + ALPHABET.index(matched) + len(matched)))
    assert plain["output_ids"] == expected
    assert plain["meta_info"]["completion_tokens"] == len(expected)
    wait_until(lambda: len(engine.aborted) == 2, "aborts in the engine")


def test_characters_are_never_split(client, engine):
    text = 'A 世界 👩‍👩‍👧 é "quoted" \\ \n\t\x01'
    engine.reply = lambda request: list(text.encode())
    length = len(text.encode())
    events = stream(client, {"max_new_tokens": length})
    assert events[-1]["text"] == text == generate(client, {"max_new_tokens": length})["text"]
    for event in events:
        assert text.startswith(event["text"])
    assert generate(client, {"max_new_tokens": 3})["text"] == "A \ufffd"


def test_zero_and_one_new_tokens(client):
    """B25: 0 runs the prompt only."""
    for events in (stream(client, {"max_new_tokens": 0}), [generate(client, {"max_new_tokens": 0})]):
        assert events[-1]["text"] == "" and events[-1]["output_ids"] == []
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert generate(client, {"max_new_tokens": 1})["output_ids"] == [97]


def test_prompt_ids_on_request(client):
    assert generate(client, {"max_new_tokens": 1}, return_prompt_token_ids=True)["prompt_token_ids"] == list(
        b"hello"
    )


def test_logprobs(client):
    body = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5], "logprob_start_len": 3}
    meta = generate(client, {"max_new_tokens": 2}, **body)["meta_info"]
    assert meta["output_token_logprobs"] == [[logprob_of(97), 97, None], [logprob_of(98), 98, None]]
    assert meta["input_token_logprobs"] == [
        [logprob_of(108), 108, None],
        [logprob_of(111), 111, None],
    ]
    assert meta["output_top_logprobs"][1] == [[logprob_of(98), 98, None], [logprob_of(99), 99, None]]
    assert meta["output_token_ids_logprobs"] == [[[logprob_of(5), 5, None]]] * 2
    assert len(meta["input_top_logprobs"]) == 2
    body = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    meta = generate(client, {"max_new_tokens": 1}, text="hi", **body)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 104, "h"], [logprob_of(105), 105, "i"]]
    assert meta["output_token_logprobs"] == [[logprob_of(97), 97, "a"]]
    assert "output_top_logprobs" not in meta
    meta = generate(client, {"max_new_tokens": 1}, return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []


def test_logprobs_stream_and_end_with_the_stop_string(client):
    events = stream(client, {"max_new_tokens": 20, "stop": "de"}, return_logprob=True)
    for event in events:
        assert len(event["meta_info"]["output_token_logprobs"]) == event["meta_info"]["completion_tokens"]
    assert [i for _, i, _ in events[-1]["meta_info"]["output_token_logprobs"]] == list(b"abcde")


# ---- errors


BAD = [
    ({"sampling_params": {"max_new_tokens": "5"}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"max_new_tokens": 1.5}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"sampling_params": {"max_new_tokens": True}}, "sampling_params.max_new_tokens"),
    ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
    ({"sampling_params": {"temperature": -1}}, "temperature"),
    ({"sampling_params": {"top_p": 2}}, "top_p"),
    ({"sampling_params": {"top_k": 0}}, "top_k"),
    ({"sampling_params": {"n": 0}}, "n"),
    ({"sampling_params": {"n": 100000}}, "n"),
    ({"sampling_params": {"stop": [""]}}, "stop"),
    ({"sampling_params": {"stop_token_ids": [VOCAB_SIZE]}}, "stop_token_ids"),
    ({"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ({"sampling_params": {"logit_bias": {str(10**9): 1}}}, "logit_bias"),
    ({"sampling_params": {"logit_bias": {"abc": 1}}}, "sampling_params.logit_bias"),
    ({"sampling_params": {"sampling_seed": 2**70}}, "sampling_seed"),
    ({"sampling_params": {"regex": "a+"}}, "regex"),
    ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
    ({"sampling_params": {"ebnf": "root"}}, "ebnf"),
    ({"sampling_params": {"beam_width": 2}}, "beam_width"),
    ({"sampling_params": [{}, {}]}, "sampling_params"),
    ({"sampling_params": 3}, "sampling_params"),
    ({"image_data": "x.png"}, "image_data"),
    ({"lora_path": "x"}, "lora_path"),
    ({"session_params": {"id": 1}}, "session_params"),
    ({"text": ""}, "text"),
    ({"text": []}, "text"),
    ({"text": [""]}, "text"),
    ({"text": ["x", ""]}, "text"),
    ({"text": 5}, "text"),
    ({"text": None}, "text"),
    ({"input_ids": [1]}, "text"),
    ({"text": None, "input_ids": []}, "input_ids"),
    ({"text": None, "input_ids": [[]]}, "input_ids"),
    ({"text": None, "input_ids": [[1], []]}, "input_ids"),
    ({"text": None, "input_ids": [1, [2]]}, "input_ids"),
    ({"text": None, "input_ids": [VOCAB_SIZE]}, None),
    ({"text": None, "input_ids": [10**9]}, None),
    ({"text": None, "input_ids": [10**30]}, "input_ids"),
    ({"text": None, "input_ids": [-1]}, None),
    ({"text": None, "input_ids": ["abc"]}, "input_ids[0]"),
    ({"text": None, "input_ids": [1.0]}, "input_ids[0]"),
    ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"return_logprob": True, "token_ids_logprob": [VOCAB_SIZE]}, None),
    ({"rid": ["a", "b"]}, "rid"),
    ({"rid": "r" * 257}, "rid"),
    ({"text": ["x", "y"], "rid": ["a", "r" * 257]}, "rid"),
    ({"return_logprob": True, "token_ids_logprob": [1] * 1025}, "token_ids_logprob"),
    ({"return_logprob": True, "token_ids_logprob": [[1] * 1025]}, "token_ids_logprob"),
    ({"text": ["x"] * 16385}, "text"),
    ({"text": None, "input_ids": [[1]] * 16385}, "input_ids"),
    ({"text": ["x"] * 17, "sampling_params": {"n": 1024}}, "n"),
    ({"text": ["x"] * 17, "sampling_params": [{"n": 1024}] * 17}, "n"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda x: str(x)[:60])
@pytest.mark.parametrize("is_stream", [False, True])
def test_bad_input_is_a_400_that_names_the_field(client, engine, body, param, is_stream):
    body = {"text": "hello", "stream": is_stream, **body}
    error_of(client.post("/generate", json=body), 400, param)
    assert engine.seen == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"text": NaN}',
        b'{"text": "\xff"}',
        b'{"text": "a\\ud800b c d e f g"}',
        b'{"text": "x", "session_params": ' + b"[" * 50_000,
        b'{"text": "x", "sampling_params": {"temperature": 1e999}}',
    ],
    ids=lambda raw: repr(raw[:30]),
)
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_bodies_that_are_no_json_object(client, path, raw):
    error_of(client.post(path, content=raw), 400)


def test_too_many_sequences_are_refused_with_the_numbers(client, engine):
    for body, prompts, wanted in [
        ({"input_ids": [[1]] * 20_000}, 20_000, 20_000),
        ({"text": ["x"] * 40, "sampling_params": {"n": 1000}}, 40, 40_000),
    ]:
        message = error_of(client.post("/generate", json=body), 400)["message"]
        assert all(str(number) in message for number in (prompts, wanted, 16384)), message
    assert engine.seen == []


def test_a_request_may_have_many_sequences(client, engine):
    body = {"input_ids": [[1 + i % 9] for i in range(1000)], "sampling_params": {"max_new_tokens": 2}}
    replies = client.post("/generate", json={**body, "rid": "r" * 256}).json()
    assert len(replies) == len(engine.seen) == 1000 and {r["text"] for r in replies} == {"ab"}
    assert [r.input_ids.tolist() for r in engine.seen] == body["input_ids"]


def test_big_bodies(client, engine):
    """More than a megabyte, taken apart before it is decoded: the same meaning and the same errors."""
    sampling = [
        {"max_new_tokens": 1 + i % 3, "logit_bias": {str(j): i for j in range(64)}} for i in range(99)
    ]
    body = {"text": ["x"] * 99, "sampling_params": sampling, "padding": "p" * 2**20}
    assert [r["text"] for r in generate(client, None, **body)] == ["abc"[: 1 + i % 3] for i in range(99)]
    assert [r.sampling.logit_bias[63] for r in engine.seen] == list(range(99))
    assert generate(client, {"max_new_tokens": 2}, padding="p" * 2**20)["text"] == "ab"
    engine.seen.clear()
    for wrong, param in [
        ([*sampling[1:], {"max_new_tokens": "5"}], "sampling_params[98].max_new_tokens"),
        ([*sampling[1:], 5], "sampling_params[98]"),
        ("x", "sampling_params"),
        (sampling[1:], "sampling_params"),
    ]:
        reply = client.post("/generate", json={**body, "sampling_params": wrong})
        assert error_of(reply, 400)["param"] == param
    error_of(client.post("/generate", content=msgspec.json.encode(body)[:-1]), 400)
    assert engine.seen == []


def test_too_many_logprobs_are_refused(client, engine):
    body = {"input_ids": [[1]] * 300, "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
    wide = {"token_ids_logprob": [1] * 1000}
    error = error_of(client.post("/generate", json={**body, **wide}), 400)
    assert error["code"] == "too_many_logprobs" and str(2**18) in error["message"]
    assert engine.seen == []
    assert client.post("/generate", json={**body, "top_logprobs_num": 20}).status_code == 200


def test_more_logprobs_of_prompts_than_one_answer_may_hold_are_refused(client, engine):
    """One small body could ask for gigabytes."""
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 250}
    body = {"input_ids": [1] * 60, **fields, "sampling_params": {"n": 200, "max_new_tokens": 1}}
    error = error_of(client.post("/generate", json=body), 400)
    assert error["code"] == "too_many_logprobs" and str(2**21) in error["message"]
    echo = {"prompt": [1] * 60, "echo": True, "logprobs": 20, "n": 1024, "max_tokens": 0}
    many = error_of(client.post("/v1/completions", json={**echo, "prompt": [[1] * 60] * 2}), 400)
    assert many["code"] == "too_many_logprobs"
    assert engine.seen == []


def test_unknown_fields_and_empty_wishes_are_ignored(client):
    body = {"lora_path": None, "image_data": [], "brand_new": {"x": 1}, "return_hidden_states": False}
    assert generate(client, {"max_new_tokens": 1, "regex": None}, **body)["text"] == "a"


def test_prompt_and_context(client, engine):
    """B23: refused with both numbers, or capped and ended by `length`."""
    for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
        error = error_of(client.post("/generate", json={"input_ids": [1] * length}), 400)
        assert str(length) in error["message"] and str(CONTEXT) in error["message"]
    reply = generate(client, {"max_new_tokens": 999_999}, text=None, input_ids=[1] * (CONTEXT - 1))
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert len(engine.seen) == 1


def test_body_too_large(tmp_path, tmp_path_factory):
    folder = write_byte_tokenizer(tmp_path)
    settings = make_settings(folder, max_body_bytes=1000)
    with running(tmp_path_factory.mktemp("run"), settings) as server:
        for path in ("/generate", "/tokenize"):
            error_of(httpx.post(server.url + path, json={"text": "x" * 2000}), 413)
            error_of(httpx.post(server.url + path, content=iter([b"x" * 2000])), 413)  # it names no length
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.settimeout(PATIENCE_S)
                sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n".encode())
                assert sock.recv(1000).startswith(b"HTTP/1.1 413")  # before any of it has come
        assert httpx.post(f"{server.url}/generate", json={"text": "x"}).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_engine_refuses_keeps_its_status(client, engine, is_stream):
    engine.refuse = lambda request: (503, "the queue is full")
    reply = client.post("/generate", json={"text": "x", "stream": is_stream})
    assert error_of(reply, 503)["message"] == "the queue is full"


def test_one_refusal_in_a_batch_leaves_the_others(client, engine):
    engine.refuse = lambda request: (400, "too long") if len(request.input_ids) > 2 else None
    good, bad = generate(client, {"max_new_tokens": 2}, text=["x", "xyz"])
    assert good["text"] == "ab"
    reason = bad["meta_info"]["finish_reason"]
    assert reason["type"] == "abort" and reason["message"] == "too long" and reason["status_code"] == 400
    events = stream(client, {"max_new_tokens": 2}, text=["x", "xyz"])
    failed = [e for e in events if "error" in e]
    assert len(failed) == 1 and failed[0]["index"] == 1 and failed[0]["error"]["message"] == "too long"
    assert [e for e in events if e["index"] == 0][-1]["text"] == "ab"


def test_failure_in_the_middle_of_a_stream_is_an_event(client, engine):
    engine.reply, engine.step_s = (lambda request: [97, 98, -2]), 0.05
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 9}}
    events = sse_events(client.post("/generate", json=body).text)
    assert events[-1]["error"]["message"] == "not finite" and "[DONE]" not in events
    assert "text" in events[0]
    error_of(client.post("/generate", json={"text": "x"}), 500)


# ---- anything at all


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def bodies(*schemas):
    names = sorted({name for schema in schemas for name in schema.__struct_fields__})
    return st.dictionaries(st.sampled_from(names), JSON, max_size=4)


ANY_BODY = {
    "/generate": st.builds(
        lambda body, sampling: {"text": "hi", "sampling_params": sampling, **body},
        bodies(GenerateBody),
        bodies(SamplingFields),
    ),
    "/v1/completions": bodies(CompletionBody).map(lambda body: {"prompt": "hi", **body}),
    "/v1/chat/completions": bodies(ChatBody).map(
        lambda body: {"messages": [{"role": "user", "content": "hi"}], **body}
    ),
    "/tokenize": bodies(TokenizeBody),
    "/detokenize": bodies(DetokenizeBody),
}


@pytest.mark.fuzz
@pytest.mark.parametrize("path", ANY_BODY)
@given(st.data())
def test_any_body_is_served_or_refused(client, path, data):
    """Never a 500, whatever the fields hold."""
    body = data.draw(ANY_BODY[path])
    reply = client.post(path, content=msgspec.json.encode(body))
    if reply.status_code == 200:
        assert "internal error" not in reply.text
    else:
        assert reply.status_code in (400, 404), (body, reply.text)
        error_of(reply, reply.status_code)


# ---- management


def test_facts(client, server):
    for path in ("/server_info", "/get_server_info"):
        info = client.get(path).json()
        assert info["page_size"] == 16 and info["cache"]["page_size"] == 16
        assert info["context_length"] == CONTEXT and info["scheduler"]["max_running_requests"] == 64
        assert info["model_path"] == MODEL and info["disable_overlap_schedule"] is False
        assert info["kv_cache"] == {
            "page_size": 16,
            "total_pages": TOTAL_PAGES,
            "free_pages": TOTAL_PAGES,
            "cached_pages": 0,
            "held_pages": 0,
        }
    for path in ("/model_info", "/get_model_info"):
        assert client.get(path).json()["model_path"] == MODEL
    models = client.get("/v1/models").json()
    assert [m["id"] for m in models["data"]] == [MODEL] and models["data"][0]["max_model_len"] == CONTEXT
    assert client.get(f"/v1/models/{MODEL}").json() == models["data"][0]
    assert error_of(client.get("/v1/models/other/name"), 404)["code"] == "model_not_found"


def test_metrics(client):
    generate(client, {"max_new_tokens": 3})
    text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = f'{{model_name="{MODEL}"}}'
    assert values["sglang:num_running_reqs" + label] == "0" and values["sglang:token_usage" + label] == "0"
    assert int(values["sglang:generation_tokens_total" + label]) >= 3
    assert values["sglang:prompt_tokens_total" + label] == "5"


def test_tokenize_and_detokenize(client):
    reply = client.post("/tokenize", json={"prompt": "hé"}).json()
    assert reply == {"tokens": list("hé".encode()), "count": 3, "max_model_len": CONTEXT}
    reply = client.post("/tokenize", json={"prompt": ["a", "bc"], "model": MODEL}).json()
    assert reply["tokens"] == [[97], [98, 99]] and reply["count"] == [1, 2]
    reply = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert reply["tokens"] == [256, *b"user:x>"]
    assert client.post("/detokenize", json={"tokens": list("hé".encode())}).json() == {"text": "hé"}
    reply = client.post("/detokenize", json={"tokens": [[97, EOS], [98]], "skip_special_tokens": False})
    assert reply.json() == {"text": ["a</s>", "b"]}
    error_of(client.post("/detokenize", json={"tokens": [VOCAB_SIZE]}), 400, "tokens")
    error_of(client.post("/detokenize", json={"tokens": [10**30]}), 400, "tokens")
    error_of(client.post("/detokenize", json={}), 400, "tokens")
    error_of(client.post("/tokenize", json={}), 400, "prompt")
    assert client.post("/tokenize", json={"prompt": []}).json()["tokens"] == []


def test_much_to_tokenize_and_detokenize(client):
    """More than is done inline: many texts, and long ones."""
    words = [f"wörd {i}" for i in range(3000)]
    reply = client.post("/tokenize", json={"prompt": words}).json()
    assert reply["tokens"] == [list(word.encode()) for word in words]
    reply = client.post("/detokenize", json={"tokens": reply["tokens"]})
    assert reply.json() == {"text": words}
    long = "né " * 60_000
    reply = client.post("/tokenize", json={"prompt": long}).json()
    assert reply["count"] == len(long.encode())
    assert client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"text": long}
    error_of(client.post("/detokenize", json={"tokens": [[1]] * 9000 + [[-1]]}), 400, "tokens")


def test_flush_cache(client, engine):
    assert client.post("/flush_cache").status_code == 200
    engine.budget = 1
    with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as reply:
        lines = reply.iter_lines()  # kept: a generator that is dropped closes the connection
        assert next(lines)
        error_of(client.get("/flush_cache"), 400)
    wait_until(lambda: client.post("/flush_cache").status_code == 200, "a flush after the client left")
    for timeout in ("soon", "nan", "inf", "-inf", "-1", "-0.001"):
        error_of(client.post(f"/flush_cache?timeout={timeout}"), 400, "timeout")
    assert client.get("/flush_cache?timeout=1e18").status_code == 200


def test_flush_that_waits_ends_with_its_client(client, server, engine):
    engine.budget, asked = 1, []
    handle = engine.handle

    def count(worker, message):
        asked.append(message) if getattr(message, "op", "") == "flush_cache" else None
        handle(worker, message)

    def is_quiet() -> bool:
        before = len(asked)
        time.sleep(0.5)  # the worker asks ten times a second
        return len(asked) == before

    with client.stream("POST", "/generate", json={"text": "x", "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        engine.handle = count
        try:
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(
                    b"POST /flush_cache?timeout=1e18 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
                )
                wait_until(lambda: len(asked) > 1, "the second question")
            wait_until(is_quiet, "the end of the questions")
        finally:
            engine.handle = handle


def test_abort_request(client, engine):
    engine.budget = 2
    body = {"text": "x", "stream": True, "rid": "job-1", "sampling_params": {"max_new_tokens": 50}}
    error_of(client.post("/abort_request", json={}), 400, "rid")
    assert client.post("/abort_request", json={"rid": "nobody"}).status_code == 200
    for order in ({"rid": "job-1"}, {"abort_all": True}):
        with client.stream("POST", "/generate", json=body) as reply:
            lines = reply.iter_lines()
            assert any('"text":"ab"' in line for line in lines)  # all that the engine gives
            assert client.post("/abort_request", json={"rid": "job-"}).status_code == 200  # another's name
            assert not engine.aborted or order == {"abort_all": True}
            assert client.post("/abort_request", json=order).status_code == 200
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"type":"abort"' in rest[-2] and '"text":"ab"' in rest[-2]
    wait_until(lambda: len(engine.aborted) == 2, "aborts in the engine")


@pytest.mark.parametrize(
    ("fields", "order", "num_ended"),
    [
        ({"text": ["x", "y"]}, "job", 4),
        ({"text": ["x", "y"]}, "job_1", 2),
        ({"text": ["x", "y"]}, "job_1_0", 1),
        ({"text": ["x", "y"], "rid": ["a", "b"]}, "b", 2),
        ({"text": ["x", "y"]}, "job_", 0),
    ],
)
def test_abort_names_a_request_a_prompt_or_a_sequence(client, engine, fields, order, num_ended):
    engine.budget = 1
    body = {"rid": "job", "stream": True, "sampling_params": {"max_new_tokens": 3, "n": 2}, **fields}
    with client.stream("POST", "/generate", json=body) as reply:
        lines = reply.iter_lines()
        assert next(lines)
        assert client.post("/abort_request", json={"rid": order}).status_code == 200
        engine.budget = None
        events = [line for line in lines if line]
    assert sum('"type":"abort"' in event for event in events) == num_ended
    assert sum('"type":"length"' in event for event in events) == 4 - num_ended
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
def test_health_has_three_names(client, path):
    for url in (path, path + "/"):
        assert client.get(url).status_code == 200


def test_health_generate(client, engine):
    assert client.get("/health_generate").status_code == 200
    (request,) = engine.seen
    assert request.sampling.max_new_tokens == 1
    engine.refuse = lambda request: (503, "full")
    error_of(client.get("/health_generate"), 503)


def test_openapi_tells_of_every_route(client):
    document = client.get("/openapi.json").json()
    for path in (
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/health",
        "/v1/models",
    ):
        assert path in document["paths"]
    schema = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    assert "return_logprob" in document["components"]["schemas"][name]["properties"]
    operations = [op for methods in document["paths"].values() for op in methods.values()]
    ids = [op["operationId"] for op in operations if "operationId" in op]
    assert len(set(ids)) == len(ids) >= 10
    assert set(document["paths"]["/flush_cache"]) == {"get", "post"}


def test_preflight_is_open(client):
    reply = client.options(
        "/generate", headers={"origin": "http://x", "access-control-request-method": "POST"}
    )
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "*"
    assert client.get("/v1/models").headers["access-control-allow-origin"] == "*"
