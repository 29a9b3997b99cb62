"""SGLang's own client and ours, one workload, one scripted server: the same requests and tokens.

Runs where SGLang's client can be imported, or where PHALANX_SGLANG_PATH says what its PYTHONPATH must be. Its
latencies are compared by hand (docs/measured.md): timing never decides a test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sglang_client.py"


def test_both_clients_count_the_same() -> None:
    path = os.environ.get("PHALANX_SGLANG_PATH", "")
    if not path and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang's client is not installed (PHALANX_SGLANG_PATH names its folders)")
    command = [sys.executable, str(SCRIPT), "--sglang-path", path, "--repeats", "1", "--num-prompts", "12"]
    command += ["--num-tokens", "7", "--interval-ms", "5", "--first-ms", "20", "--max-concurrency", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["counts"] == {
        "completed": [[12], [12]],
        "total_input_tokens": [[96], [96]],
        "total_output_tokens": [[84], [84]],
        "total_output_tokens_retokenized": [[84], [84]],
    }
