"""Wrong options of `bench offline`, `profile` and `LLM`: one clear line each, and nothing left behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.cli import main
from phalanx.config.cli import OneLineParser
from phalanx.config.hardware import Hardware
from phalanx.core.errors import ConfigError
from phalanx.engine import build
from phalanx.microbench import host
from phalanx.runtime.llm import LLM
from tests.unit.test_config import GPU, HARDWARE, settle

MODEL = "--model tiny-llama --load-format dummy --device cpu --num-threads 1 --dtype float32 --random-seed 0"
OFFLINE = f"bench offline {MODEL} --context-length 256 --num-prompts 4"
PROFILE = f"profile {MODEL} --context-length 256 --num-prompts 4 --steps 2 --warm-up-steps 1"


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert not printed.out and "Traceback" not in printed.err
    line = printed.err.splitlines()[-1]
    assert line.startswith("phalanx: error: ")
    return line


@pytest.mark.parametrize("command", [OFFLINE, f"{PROFILE} --output t.json"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--seed -1", "--seed must not be negative, got -1"),
        ("--num-prompts 100000000000", "--num-prompts must be at most 10000000"),
        ("--random-output-len 300", "an output of 300 tokens pass the context of 256"),
        ("--random-output-len 0", "--random-output-len must be at least 1"),
        ("--random-input-len 99999999999999999999", "pass the context of 256"),
        ("--random-range-ratio nan", "must be in [0, 1]"),
        ("--num-threads 1025", "--num-threads must be in [1, 1024], got 1025"),
    ],
)
def test_numbers_that_no_run_can_have(
    command: str,
    flags: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("phalanx.runtime.llm.build_worker")  # nothing is loaded before
    assert words in refusal(f"{command} {flags}", capsys)
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_is_said_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace.json"
    folder.mkdir()
    assert "Is a directory" in refusal(f"{PROFILE} --output {folder}", capsys)
    assert folder.is_dir()
    assert "No such file" in refusal(f"{PROFILE} --output /proc/trace.json", capsys)


def test_a_profile_that_fails_keeps_the_last_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "trace.json"
    old.write_text("old")
    command = f"{PROFILE} --random-output-len 4 --steps 1000000000"
    for path in (old, tmp_path / "new.json"):
        assert "raise --num-prompts" in refusal(f"{command} --output {path}", capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"] and old.read_text() == "old"


def test_what_was_settled_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{OFFLINE} --random-output-len 4 --disable-cuda-graph".split()) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "--disable-cuda-graph: so already on cpu" in lines
    for start in ("attention_backend = ", "page_size = 16 (", "KV pool: "):
        assert sum(line.startswith(start) for line in lines) == 1
    assert not logging.getLogger("phalanx").handlers


@pytest.mark.parametrize(
    ("flags", "hardware", "line"),
    [
        ("--attention-backend torch_native", GPU, "no CUDA graphs: torch_native reads lengths on the host"),
        ("--chunked-prefill-size 900 --max-prefill-tokens 800", HARDWARE, "chunked_prefill_size = 800 ("),
        ("--max-prefill-tokens 100", HARDWARE, "chunked_prefill_size = 100 (--max-prefill-tokens"),
    ],
)
def test_what_one_setting_makes_of_another_is_said(flags: str, hardware: Hardware, line: str) -> None:
    found = settle(f"--model m {flags}", hardware=hardware)
    assert sum(choice.startswith(line) for choice in found.choices) == 1
    assert found.scheduler.chunked_prefill_size <= found.scheduler.max_prefill_tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": "16"}, "page_size must be of type int, got '16'"),
        ({"context_length": 128.0}, "context_length must be of type int, got 128.0"),
        ({"max_running_requests": True}, "max_running_requests must be of type int, got True"),
        ({"max_prefill_tokens": None}, "max_prefill_tokens must be of type int, got None"),
        ({"mem_fraction_static": "0.5"}, "mem_fraction_static must be of type float"),
        ({"disable_cuda_graph": "no"}, "disable_cuda_graph must be of type bool, got 'no'"),
        ({"max_queued_requests": 5}, "max_queued_requests is a server's"),
        ({"skip_tokenizer_init": True, "chat_template": "x"}, "a chat_template needs a tokenizer"),
        ({"dtype": "int8"}, "dtype must be one of auto, bfloat16"),
        ({"attention_backend": "fast"}, "attention_backend must be one of auto, flashinfer"),
        ({"kv_indices_backend": "fast"}, "kv_indices_backend must be one of naive, torch"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, null, got 'tpu'"),
    ],
)
def test_options_of_the_wrong_type(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("tiny-llama", **({"load_format": "dummy", "device": "cpu"} | options))
    assert words in str(caught.value)


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delattr("phalanx.microbench.kv_indices.measure")
    line = refusal(f"bench kv-indices --device cpu --plot {tmp_path / 'plot.png'}", capsys)
    assert line.endswith("pip install matplotlib")


def test_options_that_do_not_exist_and_models_that_are_none() -> None:
    for options in ({"cuda_graph": False}, {"host": "localhost"}):
        with pytest.raises(TypeError, match="unexpected option"):
            LLM("tiny-llama", **options)
    with pytest.raises(TypeError, match="not int"):
        LLM(5)  # type: ignore[arg-type]


def test_options_as_people_pass_them(tmp_path: Path) -> None:
    llm = LLM(
        "tiny-llama",
        load_format="dummy",
        device="null",
        skip_tokenizer_init=True,
        progress=False,
        context_length=np.int64(64),
        page_size=None,
        null_step_ms=np.float32(0.5),
    )
    assert llm.settings.scheduler.context_length == 64 and llm.settings.engine.null_step_ms == 0.5
    assert llm.settings.cache.page_size == 16
    with pytest.raises(Exception, match=str(tmp_path)):
        LLM(tmp_path)


def test_a_gpu_that_is_too_small_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nMore lines.")

    monkeypatch.setattr(build, "_load", load)
    line = refusal(OFFLINE, capsys)
    assert "lower --mem-fraction-static" in line and line.endswith(
        "(CUDA out of memory. Tried to allocate 3 GiB.)"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--page-size 3", "--page-size must be a power of two up to 64, got 3"),
        ("--page-size 0", "--page-size must be a power of two up to 64, got 0"),
        ("--page-size 128", "--page-size must be a power of two up to 64, got 128"),
        ("--running 0", "--running must be at least 1, got 0"),
    ],
)
def test_the_host_benchmark_takes_what_a_server_takes(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(f"bench host {flags}", capsys)


def test_the_host_benchmark_has_a_servers_pages() -> None:
    parser = OneLineParser("bench host")
    host.add_arguments(parser)
    assert parser.parse_args([]).page_size == settle("--model m").cache.page_size
