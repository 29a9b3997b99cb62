"""Big requests prepared in a process beside: the same as in this one, and its end is survived."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from functools import partial

import msgspec
import numpy as np
import pytest

from phalanx.core.errors import RequestError
from phalanx.server import routes_generate, routes_manage, routes_openai
from phalanx.server.side_process import SideProcess, SideSettings
from phalanx.server.texts import PackedIds, _encode, pack, unpack
from phalanx.text.tokenizer import load_tokenizer
from tests.e2e.server_harness import PATIENCE_S, make_settings, wait_until, write_byte_tokenizer

PAD = "x" * 2**20  # an unknown field that makes a body big


def anything(num_ids: int, *, at_least: bool = False) -> None:
    """A length is never too long."""


def boom(kind: str, tokenizer: object) -> None:
    if kind == "sleep":
        time.sleep(600)
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"refused": RequestError("no", status=404, param="p", code="c"), "bug": ValueError("secret")}[kind]


def own_pid(tokenizer: object) -> int:
    return os.getpid()


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tok"))
    return SideSettings(str(folder), 260, make_settings(folder).server.chat_template)


@pytest.fixture(scope="module")
def side(settings):
    side = SideProcess(settings)
    yield side
    side.close()


@pytest.fixture(scope="module")
def tokenizer(settings):
    return load_tokenizer(settings.path, vocab_size=260, chat_template=settings.chat_template)


def plain(value):
    """Comparable: arrays as lists, structs as dicts."""
    if isinstance(value, PackedIds):
        return [ids.tolist() for ids in unpack(value)]
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return value


def outcome(call, job):
    try:
        return plain(call(job))
    except RequestError as error:
        return error.message, error.status, error.param, error.code


BODIES = [
    (routes_generate._parse, {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": None}}),
    (routes_generate._parse, {"input_ids": [[1, 2], [3]], "rid": ["a", "b"]}),
    (routes_generate._parse, {"input_ids": [[1], []]}),
    (routes_generate._parse, {"input_ids": [2**70]}),
    (routes_generate._parse, {"input_ids": [1, [2]]}),
    (routes_generate._parse, {"input_ids": ["a"]}),
    (routes_generate._parse, {"input_ids": [1], "lora_path": "x"}),
    (routes_generate._parse, {"text": ["é", "b"], "sampling_params": [{"n": 2, "logit_bias": {"5": 1}}, {}]}),
    (routes_generate._parse, {"text": ["a"], "sampling_params": [{}, {}]}),
    (routes_generate._parse, {"text": [""]}),
    (routes_generate._parse, {"text": "a", "sampling_params": {"temperature": "hot"}}),
    (routes_openai._parse_completion, {"prompt": "é"}),
    (routes_openai._parse_completion, {"prompt": [1, 2], "stream_options": None, "n": 2}),
    (routes_openai._parse_completion, {"prompt": [[1, 2], [3]], "stop": ["x"]}),
    (routes_openai._parse_completion, {"prompt": [1, "a"]}),
    (routes_openai._parse_completion, {"prompt": ["a"] * 16385}),
]


@pytest.mark.parametrize(("parse", "body"), BODIES, ids=lambda x: getattr(x, "__name__", str(x))[:60])
def test_bodies_come_back_as_they_are_here(side, tokenizer, parse, body):
    job = partial(parse, msgspec.json.encode({**body, "pad": PAD}))
    assert outcome(side.call, job) == outcome(lambda job: job(tokenizer), job)


def test_parameters_of_each_prompt_stay_what_they_were(tokenizer):
    """A big body's come back as JSON: unset, null and numbers as keys are told apart."""
    fields = [{"max_new_tokens": None, "logit_bias": {"5": 1.5}}, {"stop": ["a", "b"]}, {}]
    body = {"text": ["a"] * 3, "sampling_params": fields}
    small = routes_generate._parse(msgspec.json.encode(body), tokenizer)
    big = routes_generate._parse(msgspec.json.encode({**body, "pad": PAD}), tokenizer)
    rids = [None] * 3

    def asks(parsed):
        return list(routes_generate._asks(parsed.body, parsed.fields, [[1]] * 3, rids))

    assert small.fields is None and len(big.fields) == 3
    assert asks(small) == asks(big)


MANY = 300_000
PROMPTS = [
    (routes_generate._parse, {"input_ids": [1]}),
    (routes_openai._parse_completion, {"prompt": [1]}),
    (
        partial(routes_openai._parse_chat, check_length=anything),
        {"messages": [{"role": "user", "content": "x"}]},
    ),
]


@pytest.mark.parametrize(("parse", "prompt"), PROMPTS, ids=["generate", "completion", "chat"])
def test_what_is_of_no_use_is_not_handed_over(tokenizer, parse, prompt):
    """Unpickling it would hold up the worker that the process is to spare."""
    idle = {"priority": [[]] * MANY}
    idle |= {"sampling_params": {"regex": [[]] * MANY}} if "input_ids" in prompt else {"regex": [[]] * MANY}
    raw = msgspec.json.encode({**prompt, **idle, "extra_key": "k" * MANY, "pad": PAD})
    assert len(pickle.dumps(parse(raw, tokenizer=tokenizer))) < 5000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(i): 1 for i in range(MANY)}}, "logit_bias"),
        ({"stop": ["a"] * MANY}, "stop"),
        ({"stop_token_ids": [1] * MANY}, "stop_token_ids"),
        ({"temperature": -1}, "temperature"),
    ],
)
@pytest.mark.parametrize(("parse", "prompt"), PROMPTS, ids=["generate", "completion", "chat"])
def test_too_much_is_refused_there(tokenizer, parse, prompt, fields, param):
    own = {"sampling_params": fields} if "input_ids" in prompt else fields
    raw = msgspec.json.encode({**prompt, **own, "pad": PAD})
    with pytest.raises(RequestError) as caught:
        parse(raw, tokenizer=tokenizer)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["rid", "token_ids_logprob", "return_logprob", "top_logprobs_num"])
def test_lists_that_do_not_fit_the_prompts_are_refused_there(tokenizer, name):
    values = {"rid": [str(i) for i in range(MANY)], "return_logprob": [True] * MANY}
    body = {"input_ids": [1], "return_logprob": True, name: values.get(name, [1] * MANY), "pad": PAD}
    with pytest.raises(RequestError, match=name):
        routes_generate._parse(msgspec.json.encode(body), tokenizer)


def test_chats_and_texts(side, tokenizer):
    chat = {"messages": [{"role": "user", "content": "é" * 700_000}], "temperature": 0.5}
    job = partial(routes_openai._parse_chat, msgspec.json.encode(chat), anything)
    assert outcome(side.call, job) == outcome(lambda job: job(tokenizer), job)
    raw = msgspec.json.encode({"prompt": "naïve " * 200_000})
    model, reply = side.call(partial(routes_manage._tokenize, raw, 99))
    answer = msgspec.json.decode(reply)
    assert model is None and answer["count"] == len(("naïve " * 200_000).encode())
    raw = msgspec.json.encode({"tokens": answer["tokens"]})
    assert side.call(partial(routes_manage._detokenize, raw, 260)) == (None, ["naïve " * 200_000], False)
    with pytest.raises(RequestError, match="id 260 "):
        side.call(partial(routes_manage._detokenize, b'{"tokens": [[1], [260]]}', 260))


def test_lists_pack_and_unpack():
    for lists in ([], [[]], [[1], [], [2, 3]], [[2**62, -5]]):
        assert [ids.tolist() for ids in unpack(pack(lists))] == lists
    too_wide = [[1], [2**63]]
    assert unpack(pack(too_wide)) == too_wide


def test_errors_come_back_and_others_hold_no_secret(side):
    assert outcome(side.call, partial(boom, "refused")) == ("no", 404, "p", "c")
    with pytest.raises(RuntimeError) as caught:
        side.call(partial(boom, "bug"))
    assert "secret" not in str(caught.value)
    (ids,) = unpack(side.call(partial(_encode, ["ok"], anything)))
    assert ids.tolist() == list(b"ok") and ids.dtype == np.int64


def test_a_killed_process_refuses_one_request_and_is_replaced(settings):
    side = SideProcess(settings)
    first = side.call(own_pid)
    assert side.call(own_pid) == first == side.pid != os.getpid()
    assert outcome(side.call, partial(boom, "die"))[1] == 503
    assert side.call(own_pid) not in (first, os.getpid())
    side.close()
    assert outcome(side.call, own_pid)[1] == 503


def test_an_idle_process_ends_and_the_next_request_does_not_notice():
    side = SideProcess(SideSettings(None, 260, None, idle_s=0.05))
    first = side.call(own_pid)
    process = side._process
    wait_until(lambda: process.poll() is not None, "the idle process to end")
    assert process.returncode == 0
    assert side.call(own_pid) != first
    side.close()


def test_closing_ends_a_call_that_waits(settings):
    side = SideProcess(settings)
    side.call(own_pid)
    told = []
    thread = threading.Thread(target=lambda: told.append(outcome(side.call, partial(boom, "sleep"))))
    thread.start()
    time.sleep(0.1)
    side.close()
    thread.join(PATIENCE_S)
    assert told and told[0][1] == 503
