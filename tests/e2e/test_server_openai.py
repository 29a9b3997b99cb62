"""The OpenAI routes of the real worker process, with the real client, against a scripted engine."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.e2e.fake_engine import count_up, logprob_of
from tests.e2e.server_harness import (
    BOS,
    CONTEXT,
    EOS,
    MODEL,
    make_settings,
    running,
    sse_events,
    wait_until,
    write_byte_tokenizer,
)

USER = [{"role": "user", "content": "hi"}]
PROMPT = [BOS, *b"user:hi>"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tok"))
    with running(tmp_path_factory.mktemp("run"), make_settings(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, verify=False) as http:
        yield http


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def engine(server, http):
    engine = server.engine
    engine.reply, engine.refuse = count_up, lambda request: None
    engine.seen.clear()
    yield engine
    wait_until(lambda: not engine.running, "an idle engine")
    assert http.get("/health").status_code == 200


def chat(client, **fields):
    return client.chat.completions.create(**{"model": MODEL, "messages": USER, **fields})


# ---- chat


def test_chat(client, engine):
    reply = chat(client, max_tokens=3)
    (choice,) = reply.choices
    assert choice.message.role == "assistant" and choice.message.content == "abc"
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert reply.object == "chat.completion" and reply.model == MODEL and reply.id.startswith("chatcmpl-")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 3, 12)
    assert engine.seen[0].input_ids.tolist() == PROMPT


def test_chat_stream(client, engine):
    engine.reply = lambda request: [*"né 👍".encode(), EOS]
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "né 👍"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks)
    assert all(c.object == "chat.completion.chunk" for c in chunks)


@pytest.mark.parametrize("n", [1, 2])
def test_usage_chunk_only_if_asked(client, n):
    """B41."""
    chunks = list(chat(client, stream=True, n=n, max_tokens=4, stream_options={"include_usage": True}))
    *others, last = chunks
    assert last.choices == [] and all(c.usage is None and c.choices for c in others)
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 4 * n, 9 + 4 * n)
    for index in range(n):
        mine = [c.choices[0] for c in others if c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == "abcd"
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"] and mine[-1].finish_reason


def test_stream_on_the_wire(http):
    body = {"model": MODEL, "messages": USER, "stream": True, "max_tokens": 2}
    events = sse_events(http.post("/v1/chat/completions", json=body).text)
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        assert set(event["choices"][0]) >= {"index", "delta", "finish_reason", "logprobs"}


def test_n_choices(client, engine):
    engine.reply = lambda request: [97 + request.sampling.sampling_seed % 2, EOS]
    reply = chat(client, n=4, seed=8)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3] and reply.choices[0].message.content == "a"
    assert engine.seen[0].sampling.sampling_seed == 8
    assert reply.usage.prompt_tokens == 9 and reply.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, CONTEXT - 9),
        ({"max_tokens": None}, CONTEXT - 9),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 7}, 5),
        ({"max_tokens": 999_999}, CONTEXT - 9),
    ],
)
def test_output_bound(client, engine, fields, limit):
    """B45: max_completion_tokens wins, and nothing means all the room, never 16."""
    assert chat(client, **fields).usage.completion_tokens == limit
    assert engine.seen[0].max_new_tokens == limit


def test_output_bound_of_completions(http, engine):
    for fields, limit in (({}, CONTEXT - 2), ({"max_completion_tokens": 3, "max_tokens": 9}, 3)):
        reply = http.post("/v1/completions", json={"prompt": "hi", **fields}).json()
        assert reply["usage"]["completion_tokens"] == limit


def test_parameters_reach_the_engine(client, engine):
    extra = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    chat(
        client,
        max_tokens=4,
        temperature=0,
        top_p=0.5,
        frequency_penalty=1,
        presence_penalty=-1,
        seed=5,
        stop=["zz"],
        logit_bias={"65": 3},
        extra_body=extra,
    )
    (request,) = engine.seen
    s = request.sampling
    assert (s.top_k, s.min_p, s.repetition_penalty, s.min_new_tokens) == (7, 0.1, 1.5, 2)
    assert (s.temperature, s.top_p, s.frequency_penalty, s.presence_penalty) == (0, 0.5, 1, -1)
    assert s.sampling_seed == 5 and s.stop == ("zz",) and s.logit_bias == {65: 3.0}
    assert s.no_stop_trim and not s.skip_special_tokens and request.stop_ids == (9,)


@pytest.mark.parametrize(("keep", "text"), [(False, "abc"), (True, "abcdefghij")])
def test_stop_string(client, keep, text):
    fields = {"stop": "defghij", "extra_body": {"include_stop_str_in_output": keep}}
    reply = chat(client, **fields)
    streamed = "".join(c.choices[0].delta.content or "" for c in chat(client, stream=True, **fields))
    assert reply.choices[0].message.content == streamed == text
    assert reply.choices[0].finish_reason == "stop" and reply.usage.completion_tokens == 10
    assert reply.choices[0].matched_stop == "defghij"


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], None),
        ([{"role": "user", "content": ""}], b"user:"),
        ([{"role": "system", "content": "s"}, *USER], None),
        (
            [
                *USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
            ],
            None,
        ),
    ],
)
def test_message_contents(client, engine, messages, rendered):
    """B44: accepted, and BOS only where the template writes it."""
    chat(client, messages=messages, max_tokens=1)
    ids = engine.seen[0].input_ids.tolist()
    assert ids.count(BOS) == len(messages)
    if rendered is not None:
        assert ids == [BOS, *rendered, *b">"]


def test_chat_logprobs(client):
    reply = chat(client, max_tokens=2, logprobs=True, top_logprobs=2)
    first, second = reply.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("a", logprob_of(97), [97])
    assert [(t.token, t.logprob) for t in second.top_logprobs] == [
        ("b", logprob_of(98)),
        ("c", logprob_of(99)),
    ]
    assert chat(client, max_tokens=1, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    chunks = list(chat(client, max_tokens=5, logprobs=True, stream=True))
    content = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert "".join(e.token for e in content) == "abcde"


def test_logprobs_of_half_characters(client, engine):
    engine.reply = lambda request: list("é".encode())
    content = chat(client, max_tokens=2, logprobs=True).choices[0].logprobs.content
    assert bytes(b for e in content for b in e.bytes).decode() == "é"


# ---- completions


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hi", [[104, 105]]),
        (["hi", "x"], [[104, 105], [120]]),
        ([104, 105], [[104, 105]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_kinds(client, engine, prompt, ids):
    reply = client.completions.create(model="default", prompt=prompt, max_tokens=2, n=2)
    assert [r.input_ids.tolist() for r in engine.seen] == [x for x in ids for _ in range(2)]
    assert [c.index for c in reply.choices] == list(range(2 * len(ids)))
    assert {c.text for c in reply.choices} == {"ab"} and reply.object == "text_completion"
    assert reply.usage.prompt_tokens == sum(map(len, ids))
    assert reply.usage.completion_tokens == 4 * len(ids)
    named = client.completions.create(
        model="default", prompt=prompt, max_tokens=2, n=2, extra_body={"rid": "mine"}
    )
    assert len(named.choices) == 2 * len(ids)
    rids = [r.rid for r in engine.seen if r.rid is not None]
    assert len(set(rids)) == len(rids) == 2 * len(ids), "the engine refuses a name that is in use"


def test_completion_stream(client):
    chunks = list(client.completions.create(model=MODEL, prompt=["x", "y"], max_tokens=3, stream=True))
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.text for c in mine) == "abc"
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]


@pytest.mark.parametrize("prompt", ["hé", list("hé".encode())])
def test_echo(client, prompt):
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "echo": True}
    assert client.completions.create(**fields).choices[0].text == "héab"
    chunks = list(client.completions.create(**fields, stream=True))
    assert chunks[0].choices[0].text == "hé" and "".join(c.choices[0].text for c in chunks) == "héab"


def test_echo_with_logprobs(client):
    fields = {"model": MODEL, "prompt": "hi!", "max_tokens": 2, "echo": True, "logprobs": 1}
    logprobs = client.completions.create(**fields).choices[0].logprobs
    assert logprobs.tokens == ["h", "i", "!", "a", "b"] and logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs == [None, *(logprob_of(t) for t in b"i!ab")]
    assert logprobs.top_logprobs == [None, *({chr(t): logprob_of(t)} for t in b"i!ab")]
    streamed = [c.choices[0].logprobs for c in client.completions.create(**fields, stream=True)]
    assert [t for part in streamed if part for t in part.tokens] == ["h", "i", "!", "a", "b"]
    assert [t for part in streamed if part for t in part.text_offset] == [0, 1, 2, 3, 4]
    only_prompt = client.completions.create(**{**fields, "max_tokens": 0}).choices[0]
    assert only_prompt.text == "hi!" and only_prompt.logprobs.tokens == ["h", "i", "!"]


def test_text_offsets_count_characters(client, engine):
    """Half characters and hidden special tokens do not shift them."""
    engine.reply = lambda request: [*"é".encode(), BOS, 98, EOS]
    logprobs = client.completions.create(model=MODEL, prompt="x", logprobs=0).choices[0].logprobs
    assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "<s>", "b", "</s>"]
    assert logprobs.text_offset == [0, 1, 1, 1, 2]


def test_completion_logprobs_hold_the_chosen_token(client):
    reply = client.completions.create(model=MODEL, prompt="x", max_tokens=2, logprobs=0)
    assert reply.choices[0].logprobs.top_logprobs == [{"a": logprob_of(97)}, {"b": logprob_of(98)}]


# ---- errors


CHAT_BAD = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"stop": ["a", ""]}, "stop"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"rid": "r" * 257}, "rid"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"lora_path": "x"}, "lora_path"),
    ({"regex": "x"}, "regex"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"continue_final_message": True}, "continue_final_message"),
]
COMPLETION_BAD = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [-1]}, None),
    ({"prompt": [10**9], "echo": True}, None),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 99}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt": ["x"] * 16385}, "prompt"),
    ({"prompt": [[1]] * 17, "n": 1024, "echo": True}, "n"),
    ({"rid": "r" * 257}, "rid"),
    ({"guided_json": {}, "guided_regex": "x"}, "guided_regex"),
]


def check_error(reply, status, param):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param and param in error["message"], error


@pytest.mark.parametrize(("fields", "param"), CHAT_BAD, ids=lambda x: str(x)[:50])
def test_bad_chats(http, engine, fields, param):
    """B43: OpenAI's error body; unknown fields are in test_harmless_wishes_are_accepted."""
    body = {k: v for k, v in {"messages": USER, **fields}.items() if v is not None}
    check_error(http.post("/v1/chat/completions", json=body), 400, param)
    assert engine.seen == []


@pytest.mark.parametrize(("fields", "param"), COMPLETION_BAD, ids=lambda x: str(x)[:50])
def test_bad_completions(http, engine, fields, param):
    check_error(http.post("/v1/completions", json={"prompt": "x", **fields}), 400, param)
    assert engine.seen == []


def test_harmless_wishes_are_accepted(client, engine):
    extra = {"best_thing": 1, "user": "me", "lora_path": None, "regex": "", "metadata": {"a": "b"}}
    chat(
        client,
        max_tokens=1,
        response_format={"type": "text"},
        tool_choice="none",
        tools=[],
        modalities=["text"],
        extra_body=extra,
    )
    chat(client, max_tokens=1, tool_choice="none", tools=[{"type": "function", "function": {"name": "f"}}])
    assert [r.input_ids.tolist() for r in engine.seen] == [PROMPT, PROMPT]


@pytest.mark.parametrize(
    "name", ["function", "size_bytes", "args", "kwargs", "loop", "enable_thinking", "no name"]
)
def test_template_variables_may_have_any_other_name(client, engine, name):
    chat(client, max_tokens=1, extra_body={"chat_template_kwargs": {name: 1}})
    assert engine.seen[0].input_ids.tolist() == PROMPT


def test_tools_are_refused_with_the_reason(http):
    body = {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert "tool calling is not built yet" in error["message"]


def test_unknown_model(client):
    """B43: a 404."""
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-4")
    assert caught.value.code == "model_not_found" and "gpt-4" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert client.models.list().data[0].id == MODEL


def test_prompt_beyond_the_context(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x" * CONTEXT)
    assert caught.value.code == "context_length_exceeded" and str(CONTEXT) in caught.value.message


def test_engine_errors_reach_the_client(client, engine):
    engine.refuse = lambda request: (503, "the queue is full")
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            list(chat(client, stream=stream, n=2))
        assert caught.value.status_code == 503 and "queue is full" in caught.value.message


def test_base_model_without_template(tmp_path):
    """B44: a 400 that says why; completions still work."""
    folder = write_byte_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with running(run_dir, make_settings(folder)) as server:
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": USER})
        check_error(reply, 400, None)
        assert "template" in reply.json()["error"]["message"]
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200
