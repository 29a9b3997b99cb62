"""lm-eval's API model as a client: its scores and texts equal transformers'.

Runs where PHALANX_LM_EVAL_PYTHON names a Python that has `lm-eval[api]`, which brings dozens of packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "lm_eval_client.py"

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_and_texts_are_those_of_transformers(smollm2: str, batch_size: int) -> None:
    python = os.environ.get("PHALANX_LM_EVAL_PYTHON", "")
    if not python:
        pytest.skip("lm-eval is not installed (PHALANX_LM_EVAL_PYTHON names a Python that has it)")
    command = [sys.executable, str(SCRIPT), "--lm-eval-python", python, "--model", smollm2]
    done = subprocess.run(
        [*command, "--batch-size", str(batch_size)], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["scores"] == 32 and result["texts"] == 4 and result["wrong"] == []
