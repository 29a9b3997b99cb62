"""Every field of SGLang's and OpenAI's requests: honoured, refused by name, or unknown and ignored.

The tables hold what the interfaces list, and a test fails for a field of our schemas that no table names.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from phalanx.server.schema_generate import MISPLACED, GenerateBody, SamplingFields
from phalanx.server.schema_openai import ChatBody, CompletionBody, StreamOptions
from tests.e2e.fake_engine import count_up, logprob_of
from tests.e2e.server_harness import (
    BOS,
    EOS,
    MODEL,
    make_settings,
    running,
    sse_events,
    wait_until,
    write_byte_tokenizer,
)

ROUTES = {
    "generate": ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 6}}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 6}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}),
}
Check = Callable[
    [dict, Any], bool
]  # the reply's body, the engine's request -> whether the field had its effect


def param(name: str, value: object, ours: str | None = None) -> Check:
    """The engine's request carries it."""
    return lambda reply, request: getattr(request.sampling, ours or name) == value


def text_of(reply: dict) -> str:
    if "choices" not in reply:
        return reply["text"]
    choice = reply["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def says(text: str) -> Check:
    return lambda reply, request: text_of(reply) == text


def nothing(reply: dict, request: Any) -> bool:
    """It changes nothing here, and says so in the docs."""
    return text_of(reply) == "abcdef"


# ---- honoured: field, value, what shows it

SAMPLING: list[tuple[str, Any, Check]] = [
    ("max_new_tokens", 3, says("abc")),
    ("temperature", 0.5, param("temperature", 0.5)),
    ("top_p", 0.5, param("top_p", 0.5)),
    ("top_k", 5, param("top_k", 5)),
    ("min_p", 0.2, param("min_p", 0.2)),
    ("frequency_penalty", 1.5, param("frequency_penalty", 1.5)),
    ("presence_penalty", -1.5, param("presence_penalty", -1.5)),
    ("repetition_penalty", 1.2, param("repetition_penalty", 1.2)),
    ("min_new_tokens", 2, param("min_new_tokens", 2)),
    ("stop", "cd", says("ab")),
    ("stop", ["zz", "d"], says("abc")),
    ("stop_regex", "[d-f]", says("abcd")),
    ("stop_regex", ["x+", "b(c|d)"], says("abc")),
    ("stop_token_ids", [99], lambda reply, request: request.stop_ids == (EOS, 99)),
    ("ignore_eos", True, lambda reply, request: request.stop_ids == ()),
    ("skip_special_tokens", False, param("skip_special_tokens", False)),
    ("spaces_between_special_tokens", False, nothing),
    ("no_stop_trim", True, param("no_stop_trim", True)),
    ("logit_bias", {"65": 2.5}, param("logit_bias", {65: 2.5})),
    ("sampling_seed", 11, param("sampling_seed", 11)),
    ("stream_interval", 2, nothing),  # of a stream: see below
]
GENERATE: list[tuple[str, Any, Check]] = [
    ("rid", "mine", lambda reply, request: reply["meta_info"]["id"] == "mine"),
    ("stream", False, nothing),
    ("return_logprob", True, lambda r, q: len(r["meta_info"]["output_token_logprobs"]) == 6),
    ("return_text_in_logprobs", False, nothing),
    ("return_prompt_token_ids", True, lambda r, q: r["prompt_token_ids"] == list(b"hi")),
    ("extra_key", "tenant", nothing),
    ("cache_salt", "tenant", nothing),
    ("routing_key", "user-7", nothing),
    ("routed_dp_rank", 0, nothing),
    ("no_logs", True, nothing),
    ("log_metrics", True, nothing),
    ("frequency_penalty", 0, nothing),  # beside the prompt, where they are ignored: defaults
    ("min_new_tokens", 0, nothing),
]
OPENAI: list[tuple[str, Any, Check]] = [
    ("model", MODEL, lambda reply, request: reply["model"] == MODEL),
    ("n", 2, lambda reply, request: [c["index"] for c in reply["choices"]] == [0, 1]),
    ("temperature", 0.5, param("temperature", 0.5)),
    ("top_p", 0.5, param("top_p", 0.5)),
    ("top_k", 5, param("top_k", 5)),
    ("min_p", 0.2, param("min_p", 0.2)),
    ("frequency_penalty", 1.5, param("frequency_penalty", 1.5)),
    ("presence_penalty", -1.5, param("presence_penalty", -1.5)),
    ("repetition_penalty", 1.2, param("repetition_penalty", 1.2)),
    ("min_tokens", 2, param("min_tokens", 2, "min_new_tokens")),
    ("max_tokens", 3, says("abc")),
    ("max_completion_tokens", 2, says("ab")),
    ("stop", "cd", says("ab")),
    ("stop", ["zz", "d"], says("abc")),
    ("stop_regex", "[d-f]", says("abcd")),
    ("stop_token_ids", [99], lambda reply, request: request.stop_ids == (EOS, 99)),
    ("ignore_eos", True, lambda reply, request: request.stop_ids == ()),
    ("seed", 11, param("seed", 11, "sampling_seed")),
    ("logit_bias", {"65": 2.5}, param("logit_bias", {65: 2.5})),
    ("skip_special_tokens", False, param("skip_special_tokens", False)),
    ("spaces_between_special_tokens", False, nothing),
    ("include_stop_str_in_output", True, param("", True, "no_stop_trim")),
    ("no_stop_trim", True, param("no_stop_trim", True)),
    ("rid", "mine", lambda reply, request: request.rid == "mine"),
    ("return_token_ids", True, lambda reply, request: reply["choices"][0]["token_ids"] == [*range(97, 103)]),
    ("response_format", {"type": "text"}, nothing),
    ("user", "someone", nothing),
    ("extra_key", "tenant", nothing),
    ("cache_salt", "tenant", nothing),
    ("stream", False, nothing),
    ("length_penalty", 1.0, nothing),
    ("top_logprobs_num", 0, nothing),
]
COMPLETIONS: list[tuple[str, Any, Check]] = [
    ("prompt", [104, 105], nothing),
    ("echo", True, says("hiabcdef")),
    ("logprobs", 1, lambda reply, request: reply["choices"][0]["logprobs"]["tokens"] == [*"abcdef"]),
    ("best_of", 1, nothing),
    ("add_special_tokens", True, lambda reply, request: request.input_ids.tolist() == [*b"hi"]),
    ("top_logprobs", 0, nothing),
]
CHAT: list[tuple[str, Any, Check]] = [
    ("messages", [{"role": "user", "content": "yo"}], lambda reply, request: text_of(reply) == "abcdef"),
    ("logprobs", True, lambda reply, request: len(reply["choices"][0]["logprobs"]["content"]) == 6),
    ("add_generation_prompt", False, lambda reply, request: request.input_ids.tolist()[-1] != ord(">")),
    ("chat_template_kwargs", {"x": 1}, nothing),
    ("reasoning_effort", "low", nothing),  # of templates that read it: see below
    ("add_special_tokens", False, lambda reply, request: request.input_ids.tolist() == [BOS, *b"user:hi>"]),
    ("best_of", 1, nothing),
    ("modalities", ["text"], nothing),
    ("tools", [], nothing),
    ("tool_choice", "none", nothing),
    ("tool_choice", "auto", nothing),
    ("function_call", "none", nothing),
]
HONOURED = [
    *(("generate", "sampling_params", {"max_new_tokens": 6, f: v}, check) for f, v, check in SAMPLING),
    *(("generate", *row) for row in GENERATE),
    *(("completions", *row) for row in [*OPENAI, *COMPLETIONS]),
    *(("chat", *row) for row in [*OPENAI, *CHAT]),
]

# ---- refused by name

SAMPLING_REFUSED = [
    ("beam_width", 4),
    ("json_schema", "{}"),
    ("regex", "a+"),
    ("ebnf", 'root ::= "a"'),
    ("structural_tag", "{}"),
    ("custom_params", {"x": 1}),
    ("watermark", True),
    ("max_tokens", 4),  # names of other APIs
    ("max_completion_tokens", 4),
    ("min_tokens", 1),
    ("seed", 0),
]
GENERATE_REFUSED = [
    ("input_embeds", [[0.5]]),
    ("image_data", "x.png"),
    ("video_data", ["x.mp4"]),
    ("audio_data", "x.wav"),
    ("lora_path", "adapter"),
    ("session_params", {"id": "s"}),
    ("return_hidden_states", True),
    ("return_routed_experts", True),
    ("custom_logit_processor", "gAS"),
    ("priority", 3),
    ("routed_dp_rank", 1),
    ("bootstrap_host", "2.2.2.2"),
    ("bootstrap_port", 8998),
    ("bootstrap_room", 7),
    ("log_metrics", False),
    ("logprobs", 2),  # of OpenAI's routes
    ("top_logprobs", 2),
    ("temperature", 0),  # sampling parameters beside the prompt
    ("temperature", 0.7),
    ("max_new_tokens", 0),
    ("sampling_seed", 0),
    ("min_new_tokens", 1),
    ("top_p", 0.5),
    ("top_k", 5),
    ("min_p", 0.1),
    ("frequency_penalty", 1.5),
    ("presence_penalty", -1.5),
    ("repetition_penalty", 1.2),
    ("stop", "cd"),
    ("stop", ["cd"]),
    ("stop_regex", "[d-f]"),
    ("stop_token_ids", [99]),
    ("ignore_eos", True),
    ("skip_special_tokens", True),
    ("spaces_between_special_tokens", True),
    ("no_stop_trim", True),
    ("n", 2),
    ("logit_bias", {"65": 2.5}),
    ("stream_interval", 2),
    *SAMPLING_REFUSED,
]
OPENAI_REFUSED = [
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    ("json_schema", "{}"),
    ("regex", "a+"),
    ("ebnf", 'root ::= "a"'),
    ("structural_tag", {"x": 1}),
    ("structured_outputs", {"choice": ["a"]}),
    ("guided_json", {"x": 1}),
    ("guided_regex", "a+"),
    ("guided_choice", ["a"]),
    ("guided_grammar", "x"),
    ("lora_path", "adapter"),
    ("session_params", {"id": "s"}),
    ("beam_width", 4),
    ("use_beam_search", True),
    ("custom_logit_processor", "gAS"),
    ("return_hidden_states", True),
    ("priority", 3),
    # vLLM's
    ("allowed_token_ids", [5]),
    ("bad_words", ["x"]),
    ("truncate_prompt_tokens", 1),
    ("truncate_prompt_tokens", -1),
    ("prompt_logprobs", 1),
    ("length_penalty", 2.0),
    ("length_penalty", -1),
    ("early_stopping", True),
    ("logits_processors", ["x"]),
    ("guided_whitespace_pattern", "x"),
    ("guided_decoding_backend", "x"),
    ("return_tokens_as_token_ids", True),
    ("thinking_token_budget", 3),
    # names of other APIs
    ("max_new_tokens", 2),
    ("max_new_tokens", 0),
    ("min_new_tokens", 2),
    ("sampling_seed", 4),
    ("sampling_seed", 0),
    ("stop_sequences", ["x"]),
    ("return_logprob", True),
    ("top_logprobs_num", 2),
    ("sampling_params", {"top_k": 1}),
]
COMPLETIONS_REFUSED = [
    ("suffix", "end"),
    ("best_of", 2),
    ("best_of", 0),
    ("prompt_embeds", "x"),
    ("top_logprobs", 2),
    ("add_special_tokens", False),
]
CHAT_REFUSED = [
    ("add_special_tokens", True),
    ("best_of", 3),
    ("documents", [{"a": "b"}]),
    ("echo", True),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("continue_final_message", True),
    ("chat_template", "{{ messages }}"),
    ("web_search_options", {"x": 1}),
]
REFUSED = [
    *(("generate", "sampling_params", f, {f: v}) for f, v in SAMPLING_REFUSED),
    *(("generate", f, f, v) for f, v in GENERATE_REFUSED),
    *(("completions", f, f, v) for f, v in [*OPENAI_REFUSED, *COMPLETIONS_REFUSED]),
    *(("chat", f, f, v) for f, v in [*OPENAI_REFUSED, *CHAT_REFUSED]),
]

# ---- shown by tests of their own, below or elsewhere

ELSEWHERE = {
    "generate": {
        "text",
        "input_ids",
        "sampling_params",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
    },
    "completions": {"stream_options"},
    "chat": {"stream_options", "top_logprobs"},
    "sampling": {"n"},
}

# ---- unknown, and ignored as OpenAI's clients expect

IGNORED = ["brand_new", "store", "metadata", "service_tier", "parallel_tool_calls", "prediction", "verbosity"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tok"))
    with running(tmp_path_factory.mktemp("run"), make_settings(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url) as http:
        yield http


@pytest.fixture(autouse=True)
def engine(server):
    engine = server.engine
    engine.reply, engine.budget = count_up, None
    engine.seen.clear()
    yield engine
    wait_until(lambda: not engine.running, "an idle engine")


def ask(http: httpx.Client, route: str, **fields: Any) -> httpx.Response:
    path, body = ROUTES[route]
    return http.post(path, json={**body, **fields})


def stream(http: httpx.Client, route: str, **fields: Any) -> list[Any]:
    reply = ask(http, route, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    *events, done = sse_events(reply.text)
    assert done == "[DONE]"
    return events


def name_of(value):
    """The same in every process, which a function's address is not."""
    return getattr(value, "__name__", str(value))[:40]


@pytest.mark.parametrize(("route", "field", "value", "check"), HONOURED, ids=name_of)
def test_honoured(http, engine, route, field, value, check):
    reply = ask(http, route, **{field: value})
    assert reply.status_code == 200, reply.text
    assert check(reply.json(), engine.seen[0]), (reply.json(), engine.seen[0])


@pytest.mark.parametrize(("route", "field", "name", "value"), REFUSED, ids=name_of)
@pytest.mark.parametrize("is_stream", [False, True])
def test_refused_by_name(http, engine, route, field, name, value, is_stream):
    reply = ask(http, route, stream=is_stream, **{field: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == name and name in error["message"]
    assert error["type"] == "invalid_request_error" and engine.seen == []


@pytest.mark.parametrize(
    ("route", "name", "ours"),
    [
        ("generate", "temperature", "belongs in sampling_params"),
        ("generate", "max_tokens", "belongs in sampling_params, where it is called max_new_tokens"),
        ("generate", "logprobs", "is called return_logprob here"),
        ("completions", "max_new_tokens", "is called max_tokens or max_completion_tokens here"),
        ("completions", "top_logprobs_num", "is called logprobs here"),
        ("chat", "top_logprobs_num", "is called top_logprobs here"),
        ("chat", "sampling_seed", "is called seed here"),
    ],
)
def test_a_name_from_elsewhere_is_refused_with_ours(http, route, name, ours):
    assert ours in ask(http, route, **{name: 3}).json()["error"]["message"]


CLIENTS = [
    # SGLang's bench_serving: its own backend, and vLLM's
    (
        "generate",
        {
            "lora_path": None,
            "return_logprob": False,
            "return_routed_experts": False,
            "logprob_start_len": -1,
            "stream": True,
        },
    ),
    ("generate", {"lora_path": "", "image_data": None, "top_logprobs_num": 0, "token_ids_logprob": None}),
    ("completions", {"model": MODEL, "temperature": 0.0, "best_of": 1, "stream": True, "ignore_eos": True}),
    # lm-eval
    ("completions", {"model": MODEL, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}),
    ("completions", {"model": MODEL, "temperature": 0, "max_tokens": 6, "stop": ["\n"], "seed": 1234}),
    (
        "chat",
        {"model": MODEL, "temperature": 0, "stop": ["\n"], "seed": 1234, "type": "x", "do_sample": False},
    ),
    # LangChain's ChatOpenAI and VLLMOpenAI, with what they leave open
    (
        "chat",
        {
            "model": MODEL,
            "n": 1,
            "temperature": 0.7,
            "stream": True,
            "stream_options": {"include_usage": True},
            "parallel_tool_calls": None,
            "frequency_penalty": None,
            "logit_bias": None,
            "logprobs": None,
            "top_logprobs": None,
            "reasoning_effort": None,
            "user": None,
        },
    ),
    (
        "completions",
        {
            "model": MODEL,
            "temperature": 0.7,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "n": 1,
            "best_of": 1,
            "logit_bias": {},
        },
    ),
]


@pytest.mark.parametrize(("route", "fields"), CLIENTS)
def test_what_clients_send_as_a_habit_is_served(http, route, fields):
    reply = ask(http, route, **fields)
    assert reply.status_code == 200, reply.text


def test_every_sampling_parameter_beside_the_prompt_is_refused(http):
    assert set(MISPLACED) == set(SamplingFields.__struct_fields__)
    assert set(MISPLACED) <= {name for name, _ in GENERATE_REFUSED}


@pytest.mark.parametrize("field", IGNORED)
@pytest.mark.parametrize("route", ROUTES)
def test_unknown_and_ignored(http, engine, route, field):
    assert text_of(ask(http, route, **{field: {"any": ["thing"]}}).json()) == "abcdef"


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("name", ["temprature", "max_new_token", "stop_token_id", "t\u00f6p_p", "a`b"])
def test_an_unknown_sampling_parameter_is_refused(http, engine, name, as_list):
    params = {"max_new_tokens": 6, name: 1}
    reply = ask(
        http, "generate", sampling_params=[params] if as_list else params, text=["hi"] if as_list else "hi"
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].startswith("sampling_params") and error["param"].endswith(f".{name}"), error
    assert name in error["message"] and engine.seen == []


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_asked_for_is_nothing_refused(http, route):
    """Clients send what they do not use as null, false, empty or a list of nulls."""
    fields = {name for r, f, name, _ in REFUSED if r == route and f == name}
    for empty in (None, False, [], [None]):
        typed = {"response_format", "tools", "tool_choice", "modalities", "best_of", "log_metrics"} | {
            "function_call",
            "add_special_tokens",
        }
        reply = ask(http, route, **{name: empty for name in fields - typed})
        assert reply.status_code == 200, reply.text
    assert ask(http, route, **dict.fromkeys(fields)).status_code == 200


def test_every_field_of_the_schemas_is_in_a_table():
    tables = {route: set(names) for route, names in ELSEWHERE.items()}
    for route, field, _, _ in HONOURED:
        tables[route].add(field)
    for route, _, name, _ in REFUSED:
        tables[route].add(name)
    tables["sampling"] |= {f for f, _, _ in SAMPLING} | {f for f, _ in SAMPLING_REFUSED}
    for route, schema in (
        ("generate", GenerateBody),
        ("completions", CompletionBody),
        ("chat", ChatBody),
        ("sampling", SamplingFields),
    ):
        assert set(schema.__struct_fields__) - tables[route] == set(), route
    assert set(StreamOptions.__struct_fields__) == {"include_usage", "continuous_usage_stats"}


# ---- streams


def test_stream_interval_of_one_request(http, engine):
    engine.step_s = 0.02  # or several tokens come at once anyhow
    try:
        params = {"max_new_tokens": 10, "stream_interval": 4}
        events = stream(http, "generate", sampling_params=params)
        counts = [e["meta_info"]["completion_tokens"] for e in events]
        assert counts[-1] == 10 and counts[0] < 4
        assert all(b - a >= 4 for a, b in pairwise(counts[:-1]))
        assert len(events) < len(stream(http, "generate", sampling_params={"max_new_tokens": 10}))
    finally:
        engine.step_s = 0.0
    reply = ask(http, "generate", sampling_params={"stream_interval": 0})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "stream_interval"


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("include", [False, True])
def test_continuous_usage(http, route, include):
    options = {"continuous_usage_stats": True, "include_usage": include}
    events = stream(http, route, n=2, stream_options=options)
    num_prompt = 2 if route == "completions" else 9
    if include:
        last = events.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    for index in range(2):
        mine = [e for e in events if e["choices"][0]["index"] == index]
        counts = [e["usage"]["completion_tokens"] for e in mine]
        assert counts == sorted(counts) and counts[-1] == 6
        assert {e["usage"]["prompt_tokens"] for e in mine} == {num_prompt}
        assert all(e["usage"]["total_tokens"] == num_prompt + c for e, c in zip(mine, counts, strict=True))
    key = "text" if route == "completions" else "delta"
    pieces = [e["choices"][0][key] for e in events if e["choices"][0]["index"] == 0]
    assert "".join(p if route == "completions" else p.get("content", "") for p in pieces) == "abcdef"


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_streamed_token_ids(http, route):
    choices = [e["choices"][0] for e in stream(http, route, return_token_ids=True)]
    assert [i for c in choices for i in c.get("token_ids", ())] == [*range(97, 103)]
    prompts = [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c]
    assert prompts == [[*b"hi"] if route == "completions" else [BOS, *b"user:hi>"]]
    whole = ask(http, route, return_token_ids=True).json()["choices"][0]
    assert whole["prompt_token_ids"] == prompts[0] and whole["token_ids"] == [*range(97, 103)]


@pytest.mark.parametrize("fields", [{}, {"stream_interval": 3}])
def test_a_stop_regex_ends_stream_and_answer_alike(http, engine, fields):
    """Its match is kept whole, with all of the token that completes it, and nothing follows."""
    params = {"max_new_tokens": 20, "stop_regex": [r"[e-g]h"], **fields}
    whole = ask(http, "generate", sampling_params=params).json()
    assert whole["text"] == "abcdefgh" and whole["meta_info"]["completion_tokens"] == 8
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"[e-g]h"}
    last = stream(http, "generate", sampling_params=params)[-1]
    assert last["text"] == "abcdefgh" and last["meta_info"]["finish_reason"]["matched"] == r"[e-g]h"
    both = {"max_new_tokens": 20, "stop_regex": "gh", "stop": ["ghi", "h"]}
    assert ask(http, "generate", sampling_params=both).json()["text"] == "abcdefg"
    held = {"max_new_tokens": 20, "stop_regex": "gh", "stop": "ghiJ"}
    assert ask(http, "generate", sampling_params=held).json()["text"] == "abcdefgh"


@pytest.mark.parametrize(
    "expression", ["(", "(?=a)b", r"(a)\1", "a" * 300, r"\w{200}", "(a{20}){20}", "(?x)a", ["a"] * 9, [""]]
)
def test_bad_expressions_are_refused(http, engine, expression):
    for route, body in (
        ("generate", {"sampling_params": {"stop_regex": expression}}),
        ("chat", {"stop_regex": expression}),
    ):
        error = ask(http, route, **body).json()["error"]
        assert error["param"] == "stop_regex" and engine.seen == []


# ---- responses


def test_response_fields_of_generate(http):
    reply = ask(
        http, "generate", return_logprob=True, logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[5]
    ).json()
    meta = reply["meta_info"]
    assert set(reply) == {"text", "output_ids", "meta_info"}
    assert set(meta) == {
        "id",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "reasoning_tokens",
        "weight_version",
        "num_retractions",
        "e2e_latency",
        "input_token_logprobs",
        "input_token_logprobs_length",
        "input_top_logprobs",
        "input_token_ids_logprobs",
        "output_token_logprobs",
        "output_token_logprobs_length",
        "output_top_logprobs",
        "output_token_ids_logprobs",
    }
    assert meta["input_token_logprobs_length"] == len(meta["input_token_logprobs"]) == 2
    assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == 6
    assert meta["output_token_ids_logprobs"][0] == [[logprob_of(5), 5, None]]
    for event in stream(http, "generate", return_logprob=True):
        meta = event["meta_info"]
        assert meta["output_token_logprobs_length"] == meta["completion_tokens"]
        assert meta["num_retractions"] == meta["reasoning_tokens"] == meta["cached_tokens"] == 0


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_response_fields_of_openai(http, route):
    reply = ask(http, route).json()
    assert set(reply) == {"id", "object", "created", "model", "choices", "usage", "metadata"}
    assert reply["metadata"] == {"weight_version": "default"}
    assert reply["usage"]["prompt_tokens_details"] is None and reply["usage"]["reasoning_tokens"] == 0
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length" and choice["matched_stop"] is None


def test_cache_report(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = make_settings(write_byte_tokenizer(tmp_path), enable_cache_report=True)
    with running(run_dir, settings) as server, httpx.Client(base_url=server.url) as http:
        assert ask(http, "chat").json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        last = stream(http, "completions", stream_options={"include_usage": True})[-1]
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_templates_get_reasoning_effort(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    template = "{{ reasoning_effort }}|{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    settings = make_settings(write_byte_tokenizer(tmp_path), chat_template=template)
    with running(run_dir, settings) as server, httpx.Client(base_url=server.url) as http:
        messages = [
            {"role": role, "content": role[0]}
            for role in ("system", "developer", "user", "assistant", "tool")
        ]
        reply = ask(http, "chat", messages=messages, reasoning_effort="high", return_token_ids=True).json()
        text = bytes(reply["choices"][0]["prompt_token_ids"]).decode()
        assert text == "high|system=s;developer=d;user=u;assistant=a;tool=t;"


@pytest.mark.parametrize(("fields", "num_choices"), [({"n": 2, "best_of": 2}, 2), ({"best_of": 1}, 1)])
def test_best_of_as_many_as_are_asked_for(http, fields, num_choices):
    assert len(ask(http, "completions", **fields).json()["choices"]) == num_choices
    reply = ask(http, "completions", n=2, best_of=1)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "best_of"


# ---- the request log


@pytest.mark.parametrize(
    ("level", "style"), [(None, "text"), (0, "text"), (1, "json"), (2, "text"), (3, "json")]
)
def test_prompts_are_logged_only_if_asked_for(tmp_path, capfd, level, style):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = make_settings(
        write_byte_tokenizer(tmp_path), log_requests_level=level, log_requests_format=style, log_level="error"
    )
    with running(run_dir, settings) as server, httpx.Client(base_url=server.url) as http:
        params = {"max_new_tokens": 4, "temperature": 0.25}
        for body in ({"text": "zebra\nforged line", "rid": "r\n1"}, {"text": "quiet", "no_logs": True}):
            reply = http.post("/generate", json={**body, "sampling_params": params})
            assert reply.status_code == 200
        http.post("/generate", json={"text": "zebra", "sampling_params": {"top_p": "wrong"}})
        assert http.get("/health_generate").status_code == 200
    log = capfd.readouterr().err
    lines = [line for line in log.splitlines() if "r\\n1" in line]
    assert len(lines) == (0 if level is None else 2) and "quiet" not in log and "HEALTH" not in log
    assert "\nforged" not in log
    assert ("zebra" in log) == (level is not None and level >= 2) == ("abcd" in log)
    assert ("0.25" in log) == (level is not None and level >= 1)
    if level is not None:
        assert "received" in lines[0] and "ended" in lines[1] and "length" in lines[1]
        assert ('"prompt_tokens":[17]' if style == "json" else "prompt_tokens=[17]") in lines[0]
