"""Datasets, arrival times, request bodies and the command line of the load client."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.bench.args import add_arguments
from phalanx.bench.arrivals import Pace, draw_arrivals
from phalanx.bench.backends import BACKENDS, RequestOptions, build_body
from phalanx.bench.datasets import BenchRequest, draw_lengths, load_requests, request_source
from phalanx.bench.errors import BenchError
from phalanx.bench.report import default_file_name
from phalanx.bench.settle import check_arguments
from phalanx.bench.target import make_target


class Letters:
    """Ids 0..99; 0 is a BOS that `encode` adds and no text contains. Each other id is one character.

    Two equal neighbours encode as one id, so that re-encoding shortens some prompts.
    """

    vocab_size = 100
    special_ids = frozenset({0})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(c) - 1000 for i, c in enumerate(text) if i == 0 or c != text[i - 1]]
        return [0, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(1000 + i) for i in ids if i or not skip_special_tokens)

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        assert add_generation_prompt
        return chr(1000) + "<" + messages[0]["content"] + ">"


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    args = parser.parse_args(list(argv))
    check_arguments(args)
    return args


def requests(*argv: str) -> list[BenchRequest]:
    return load_requests(arguments(*argv), Letters())


RANDOM = ("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16")


# ---- random


def test_lengths_are_drawn_in_sglangs_order() -> None:
    np.random.seed(7)
    inputs = np.random.randint(8, 33, size=50)
    outputs = np.random.randint(4, 17, size=50)
    got = requests(
        *RANDOM, "--num-prompts", "50", "--seed", "7", "--random-range-ratio", "0.25", "--tokenize-prompt"
    )
    assert [r.prompt_len for r in got] == inputs.tolist()
    assert [len(r.prompt) for r in got] == inputs.tolist()
    assert [r.output_len for r in got] == outputs.tolist()


@pytest.mark.parametrize(("ratio", "low"), [(0.0, 1), (0.3, 3), (1.0, 10)])
def test_range_ratio_bounds_are_inclusive(ratio: float, low: int) -> None:
    drawn = draw_lengths(np.random.RandomState(0), 10, ratio, 2000)
    assert (drawn.min(), drawn.max()) == (low, 10)


def test_text_prompts_leave_room_for_bos_and_tell_their_real_length() -> None:
    got = requests(*RANDOM, "--num-prompts", "300")
    tokenizer = Letters()
    assert all(isinstance(r.prompt, str) and chr(1000) not in r.prompt for r in got)
    assert [r.prompt_len for r in got] == [len(tokenizer.encode(r.prompt)) for r in got]  # type: ignore[arg-type]
    # One id less than asked is decoded, unless one was asked; the server's BOS makes up for it.
    assert [len(r.prompt) for r in got] == [max(r.asked_len - 1, 1) for r in got]
    assert any(r.prompt_len < r.asked_len for r in got)


def test_same_seed_same_prompts_and_another_seed_others() -> None:
    one, two = requests(*RANDOM, "--num-prompts", "20"), requests(*RANDOM, "--num-prompts", "20")
    assert one == two
    assert one != requests(*RANDOM, "--num-prompts", "20", "--seed", "43")


def test_random_ids_count_up_from_a_random_offset() -> None:
    argv = ("--dataset-name", "random-ids", *RANDOM[2:], "--num-prompts", "9", "--tokenize-prompt")
    np.random.seed(42)
    lengths = np.random.randint(1, 33, size=9)
    np.random.randint(1, 17, size=9)
    offsets = np.random.randint(0, 100, size=9)
    expected = [[int((offsets[i] + i + j) % 100) for j in range(lengths[i])] for i in range(9)]
    assert [r.prompt for r in requests(*argv)] == expected


def test_random_ids_over_text_leave_room_for_bos() -> None:
    got = requests(
        "--dataset-name", "random-ids", *RANDOM[2:], "--num-prompts", "40", "--random-range-ratio", "1.0"
    )
    assert all(r.asked_len == 32 for r in got)
    # 31 consecutive ids plus BOS, or one less where the walk passes id 0, which has no text.
    assert {r.prompt_len for r in got} == {31, 32}


# ---- files


def conversation(prompt: str, answer: str, key: str = "value", name: str = "conversations") -> dict[str, Any]:
    return {name: [{"from": "human", key: prompt}, {"from": "gpt", key: answer}]}


def letters(*ids: int) -> str:
    return Letters().decode(ids)


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    path = tmp_path / "sharegpt.json"
    items = [conversation(letters(*range(1, n)), letters(*range(1, n + 3))) for n in range(3, 12)]
    items += [{"conversations": [{"from": "human", "value": "alone"}]}, {"id": "nothing"}]
    items.append(conversation("", letters(1, 2, 3), name="conversation"))
    path.write_text(json.dumps(items))
    return path


def test_sharegpt_takes_first_turns_in_sglangs_shuffle(sharegpt: Path) -> None:
    pairs = [*range(3, 12), 0]
    random.seed(5)
    random.shuffle(pairs)
    got = requests("--dataset-path", str(sharegpt), "--seed", "5")
    # BOS + (n - 1) letters in, BOS + (n + 2) out; the empty prompt is under two tokens.
    assert [(r.prompt_len, r.output_len) for r in got] == [(n, n + 3) for n in pairs if n]


def test_sharegpt_and_random_read_json_lines_as_they_read_an_array(sharegpt: Path) -> None:
    lines = sharegpt.with_suffix(".jsonl")
    lines.write_text("\ufeff" + "\n".join(map(json.dumps, json.loads(sharegpt.read_text()))))
    assert requests("--dataset-path", str(lines)) == requests("--dataset-path", str(sharegpt))
    assert len(requests(*RANDOM, "--dataset-path", str(lines))) == 10


def test_sharegpt_limits(sharegpt: Path) -> None:
    fixed = requests("--dataset-path", str(sharegpt), "--sharegpt-output-len", "5", "--num-prompts", "4")
    assert [r.output_len for r in fixed] == [5] * 4
    short = requests("--dataset-path", str(sharegpt), "--sharegpt-context-len", "15")
    assert sorted(r.prompt_len for r in short) == [3, 4, 5, 6]


def test_random_from_a_file_cuts_or_repeats(sharegpt: Path) -> None:
    argv = (*RANDOM, "--random-range-ratio", "1.0", "--dataset-path", str(sharegpt), "--tokenize-prompt")
    got = requests(*argv, "--num-prompts", "50")
    assert len(got) == 10
    for request in got:
        assert len(request.prompt) == 32
        period = request.prompt.index(0, 1) if 0 in request.prompt[1:] else 32  # type: ignore[union-attr]
        assert all(request.prompt[i] == request.prompt[i % period] for i in range(32))


def test_custom_reads_json_lines_with_content_and_the_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    line = json.dumps(conversation(letters(5, 6), letters(7, 8, 9), key="content"))
    path.write_text(line + "\n\n" + line + "\n")
    got = requests("--dataset-name", "custom", "--dataset-path", str(path), "--apply-chat-template")
    assert len(got) == 2
    # The template's BOS is cut off: the server adds its own.
    assert got[0].prompt == "<" + letters(5, 6) + ">"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[", "not JSON"),
        ('{"a": 1}', "neither a JSON array of conversations nor one conversation a line"),
        ('{\n "conversations": []\n}', "line 1: not JSON"),
        ("3", "entry 1 is not a conversation"),
        ("", "neither a JSON array of conversations nor one conversation a line"),
        ("[3]", "entry 1 is not a conversation"),
        ('[{"conversations": [{"value": "x"}, {"from": "gpt"}]}]', "entry 1 is not a conversation"),
        ('[{"conversations": [{"value": "x"}, {"value": null}]}]', "entry 1 has a turn without text"),
        ("[]", "neither a JSON array of conversations nor one conversation a line"),
        ('[{"conversations": []}]', "no usable request"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=message) as caught:
        requests("--dataset-path", str(path))
    assert caught.value.exit_code == 2


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(conversation("a", "b")) + "\n{oops\n")
    with pytest.raises(BenchError, match="line 2: not JSON"):
        requests("--dataset-name", "custom", "--dataset-path", str(path))
    with pytest.raises(BenchError, match="No such file"):
        requests("--dataset-path", str(tmp_path / "none.json"))


# ---- shared prefixes


GSP = ("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "3", "--gsp-prompts-per-group", "4")
GSP_LENS = ("--gsp-system-prompt-len", "20", "--gsp-question-len", "6", "--gsp-output-len", "9")


def test_shared_prefixes_are_shared_within_a_group_only() -> None:
    got = requests(*GSP, *GSP_LENS, "--gsp-ordered", "--tokenize-prompt")
    prefixes = [tuple(r.prompt[:20]) for r in got]
    assert len(got) == 12
    assert [prefixes.index(prefix) for prefix in prefixes] == [0] * 4 + [4] * 4 + [8] * 4
    assert all((r.prompt_len, r.asked_len, r.output_len) == (26, 26, 9) for r in got)
    assert len({tuple(r.prompt) for r in got}) == 12


def test_shared_prefixes_are_shuffled_unless_ordered() -> None:
    ordered, shuffled = requests(*GSP, *GSP_LENS, "--gsp-ordered"), requests(*GSP, *GSP_LENS)
    assert ordered != shuffled
    assert sorted(map(repr, ordered)) == sorted(map(repr, shuffled))


# ---- arrivals


def test_arrivals_go_on_from_the_datasets_generator() -> None:
    args = arguments(*RANDOM, "--num-prompts", "6", "--tokenize-prompt", "--dataset-name", "random-ids")
    _, rng = request_source(args, Letters())
    np.random.seed(42)
    for high, low in ((33, 1), (17, 1), (100, 0)):
        np.random.randint(low, high, size=6)
    gaps = [np.random.exponential(1 / 4.0) for _ in range(5)]
    assert draw_arrivals(6, Pace(4.0), rng).tolist() == pytest.approx([0.0, *np.cumsum(gaps)])


def test_rate_inf_is_all_at_once_and_the_mean_rate_is_right() -> None:
    assert draw_arrivals(4, Pace(math.inf), np.random.RandomState(0)).tolist() == [0.0] * 4
    assert draw_arrivals(0, Pace(1.0), np.random.RandomState(0)).tolist() == []
    arrivals = draw_arrivals(20001, Pace(50.0), np.random.RandomState(1))
    assert arrivals[-1] / 20000 == pytest.approx(0.02, rel=0.03)


# ---- bodies


def options(**changes: Any) -> RequestOptions:
    base: dict[str, Any] = {
        "model": "m",
        "stream": True,
        "ignore_eos": True,
        "temperature": 0.0,
        "top_p": 1.0,
        "sampling": {},
        "native_fields": {},
    }
    return RequestOptions(**{**base, "extra_body": {}, **changes})


def body(backend: str, prompt: str | list[int] = "hi", **changes: Any) -> dict[str, Any]:
    return json.loads(build_body(BACKENDS[backend], options(**changes), prompt, 7))


def test_native_body() -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 7, "ignore_eos": True}
    assert body("sglang") == {"text": "hi", "sampling_params": sampling, "stream": True}
    assert body("sglang-native", [1, 2])["input_ids"] == [1, 2]
    changed = body("sglang", top_p=0.5, temperature=0.7, ignore_eos=False, stream=False)
    assert changed["sampling_params"] == {**sampling, "temperature": 0.7, "top_p": 0.5, "ignore_eos": False}
    assert changed["stream"] is False


def test_openai_bodies() -> None:
    completions = body("vllm")
    assert completions["stream_options"] == {"include_usage": True}
    assert (completions["prompt"], completions["max_tokens"], completions["ignore_eos"]) == ("hi", 7, True)
    conversation_body = body("sglang-oai-chat")
    assert conversation_body["messages"] == [{"role": "user", "content": "hi"}]
    assert conversation_body["max_completion_tokens"] == 7
    plain = body("openai")
    assert "ignore_eos" not in plain
    exact = body("vllm", extra_body={"stream_options": {"continuous_usage_stats": True}})
    assert exact["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "stream_options" not in body("openai", stream=False)


def test_extra_body_wins_and_merges_objects() -> None:
    extra = {"sampling_params": {"top_k": 5, "temperature": 1.0}, "rid": "x"}
    made = body("sglang", extra_body=extra)
    assert made["sampling_params"] == {
        "temperature": 1.0,
        "max_new_tokens": 7,
        "ignore_eos": True,
        "top_k": 5,
    }
    assert made["rid"] == "x"


# ---- command line


def test_defaults() -> None:
    args = arguments("--dataset-name", "random")
    assert (args.backend, args.host, args.port, args.num_prompts) == ("sglang", "127.0.0.1", 30000, 1000)
    assert (args.random_input_len, args.random_output_len, args.random_range_ratio) == (1024, 1024, 0.0)
    assert (args.seed, args.request_rate, args.warmup_requests) == (42, math.inf, 1)
    assert arguments("--dataset-name", "random", "--backend", "vllm").port == 8000
    assert arguments(*GSP).num_prompts == 12
    assert arguments(*GSP, "--num-prompts", "12").num_prompts == 12


@pytest.mark.parametrize(
    "argv",
    [
        (),  # sharegpt without a file
        ("--dataset-name", "custom"),
        (*RANDOM, "--gsp-num-groups", "3"),
        (*RANDOM, "--apply-chat-template"),
        (*RANDOM, "--sharegpt-output-len", "5"),
        (*GSP, "--random-input-len", "3"),
        (*GSP, "--num-prompts", "5"),
        ("--dataset-name", "random-ids", "--dataset-path", "x"),
        (*RANDOM, "--tokenize-prompt", "--backend", "vllm-chat"),
        (*RANDOM, "--flush-cache", "--backend", "openai"),
        (*RANDOM, "--disable-stream", "--goodput", "ttft:5"),
        (*RANDOM, "--num-prompts", "0"),
        (*RANDOM, "--random-range-ratio", "1.5"),
        (*RANDOM, "--request-rate", "0"),
        (*RANDOM, "--request-rate", "nan"),
        (*RANDOM, "--max-concurrency", "0"),
        (*RANDOM, "--temperature", "-1"),
        (*RANDOM, "--top-p", "0"),
        (*RANDOM, "--port", "70000"),
        (*RANDOM, "--seed", "-1"),
        (*RANDOM, "--extra-request-body", "[1]"),
        (*RANDOM, "--extra-request-body", "{"),
        (*RANDOM, "--extra-request-body", '{"n": 2}'),
        (*RANDOM, "--extra-request-body", '{"sampling_params": {"n": 4}}'),
        (*RANDOM, "--extra-request-body", '{"stream": false}'),
        (*RANDOM, "--ready-check-timeout-sec", "inf"),
    ],
)
def test_contradictions_are_refused_with_exit_code_2(argv: tuple[str, ...]) -> None:
    with pytest.raises(BenchError) as caught:
        arguments(*argv)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "argv",
    [
        ("--client-processes", "0"),
        ("--ramp-up-strategy", "square"),
        ("--lora-name", "x"),
        ("--gsp-num-turns", "2"),
        ("--backend", "trt"),
        ("--dataset-name", "image"),
        ("--goodput", "itl:5"),
        ("--goodput", "ttft:-5"),
        ("--header", "no-equals"),
        ("--header", "Content-Length=5"),
        ("--header", "a=b\r\nc: d"),
        ("--num-prompt", "5"),  # no abbreviations
    ],
)
def test_unknown_options_and_values_are_refused_by_argparse(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        arguments(*RANDOM, *argv)
    assert caught.value.code == 2


def test_target_from_base_url_and_from_host_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    target = make_target("https://[::1]:444/api/", "unused", 1, [("X-A", "b")])
    assert (target.host, target.port, target.prefix, target.url) == (
        "::1",
        444,
        "/api",
        "https://[::1]:444/api",
    )
    wire = target.wire_request("/generate", b"{}")
    assert wire.startswith(b"POST /api/generate HTTP/1.1\r\nHost: [::1]:444\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in wire
    assert wire.endswith(b"X-A: b\r\nContent-Length: 2\r\n\r\n{}")
    plain = make_target(None, "[::1]", 30000, [("authorization", "mine")])
    assert (plain.host, plain.url) == ("::1", "http://[::1]:30000")
    assert plain.headers == (("authorization", "mine"),)
    other_host = make_target(None, "h", 1, [("host", "virtual")]).wire_request("/", b"{}")
    assert other_host.lower().count(b"host:") == 1
    for bad in ("ftp://x", "http://", "localhost:30000", "http://x:port", "http://x/?q=1"):
        with pytest.raises(BenchError, match="--base-url"):
            make_target(bad, "h", 1, [])


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({}, None),
        ({"API_KEY": "Basic c"}, b"Basic c"),
        ({"API_KEY": "Basic c", "OPENAI_API_KEY": "b"}, b"Bearer b"),
        ({"OPENAI_API_KEY": "b", "PHALANX_API_KEY": "a"}, b"Bearer a"),
        ({"OPENAI_API_KEY": "b", "PHALANX_API_KEY": ""}, b"Bearer b"),
    ],
)
def test_keys_of_the_environment(monkeypatch, keys: dict[str, str], sent: bytes | None) -> None:
    for name in ("PHALANX_API_KEY", "OPENAI_API_KEY", "API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    wire = make_target(None, "h", 1, []).wire_request("/", b"{}")
    lines = [line for line in wire.split(b"\r\n") if line.startswith(b"Authorization")]
    assert lines == ([] if sent is None else [b"Authorization: " + sent])


def test_default_file_names() -> None:
    args = arguments(*RANDOM, "--num-prompts", "5")
    assert default_file_name(args).startswith("sglang_")
    assert default_file_name(args).endswith("_5_32_16.jsonl")
    assert default_file_name(arguments(*GSP)).endswith("_12_generated-shared-prefix.jsonl")
