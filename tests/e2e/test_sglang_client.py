"""SGLang's own benchmark client against a real server: every request answered, every token counted.

Runs where SGLang's client can be imported, or where PHALANX_SGLANG_PATH says what its PYTHONPATH must be.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.e2e.serving import TINY, TINY_ON_CPU, Server, running

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sglang_client.py"
NUM_PROMPTS, NUM_TOKENS, PROMPT_LEN = 12, 7, 16

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client_path() -> str:
    path = os.environ.get("PHALANX_SGLANG_PATH", "")
    if not path and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang's client is not installed (PHALANX_SGLANG_PATH names its folders)")
    return path


@pytest.fixture(scope="module")
def helper() -> Any:
    """benchmarks/sglang_client.py, for how the client is launched."""
    spec = importlib.util.spec_from_file_location("sglang_client", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(client_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = (*TINY_ON_CPU, "--max-total-tokens", "8192", "--context-length", "512")
    with running(log, *flags, "--enable-cache-report", model=TINY) as server:
        yield server


def write_tokenizer(folder: Path) -> None:
    """Words with the ids of tiny-llama: the client draws ids from the tokenizer that it is given."""
    words = {f"w{i}": i for i in range(512)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def bench(
    server: Server, helper: Any, client_path: str, folder: Path, backend: str, *flags: str
) -> dict[str, Any]:
    """One run; returns the client's line of JSON."""
    write_tokenizer(folder)
    out = folder / "out.jsonl"
    command = [sys.executable, "-c", helper.LAUNCH, "--backend", backend, "--host", "127.0.0.1"]
    command += ["--port", str(server.port), "--model", "tiny-llama", "--tokenizer", str(folder)]
    command += [
        "--dataset-name",
        "random-ids",
        "--random-range-ratio",
        "1.0",
        "--num-prompts",
        str(NUM_PROMPTS),
    ]
    command += [
        "--random-input-len",
        str(PROMPT_LEN),
        "--random-output-len",
        str(NUM_TOKENS),
        "--disable-tqdm",
    ]
    command += ["--max-concurrency", "5", "--output-file", str(out), "--output-details", *flags]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if client_path:
        env["PYTHONPATH"] = client_path
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("sglang", ()),
        ("sglang", ("--tokenize-prompt", "--return-logprob", "--top-logprobs-num", "2")),
        ("sglang", ("--disable-stream", "--temperature", "0.7", "--top-p", "0.9", "--cache-report")),
        ("sglang", ("--flush-cache", "--request-rate", "50")),
        ("sglang-oai", ("--cache-report",)),
        ("sglang-oai-chat", ()),
        ("vllm", ()),
        ("vllm-chat", ()),
    ],
    ids=str,
)
def test_every_request_is_answered(
    server: Server, helper: Any, client_path: str, tmp_path: Path, backend: str, flags: tuple[str, ...]
) -> None:
    result = bench(server, helper, client_path, tmp_path, backend, *flags)
    assert result["errors"] == [""] * NUM_PROMPTS and result["completed"] == NUM_PROMPTS
    assert result["total_output_tokens"] == NUM_PROMPTS * NUM_TOKENS
    assert result["output_lens"] == [NUM_TOKENS] * NUM_PROMPTS
    assert all(result["generated_texts"])
    if "--disable-stream" not in flags:
        assert all(0 < t for t in result["ttfts"]) and any(map(len, result["itls"]))
    server.assert_live()


def test_profile(server: Server, helper: Any, client_path: str, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    flags = ("--profile", "--profile-num-steps", "3", "--profile-output-dir", str(traces))
    result = bench(server, helper, client_path, tmp_path, "sglang", *flags)
    assert result["completed"] == NUM_PROMPTS
    assert len([*traces.rglob("*.trace.json.gz")]) == 1
    server.assert_live()
