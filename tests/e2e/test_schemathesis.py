"""schemathesis reads the server's own OpenAPI page and sends what it says and what it forbids: never a 5xx.

Two hundred cases in the ordinary suite; 5,000 with PHALANX_PROFILE=fuzz (`make fuzz`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e import server_harness
from tests.e2e.serving import TINY, TINY_ON_CPU, Server, running

IS_LONG = os.environ.get("PHALANX_PROFILE") == "fuzz"
# They stop the engine, or write wherever they are told: a scripted engine takes them instead.
WITH_EFFECTS = ("pause_generation", "continue_generation", "start_profile", "stop_profile")

pytestmark = [pytest.mark.fuzz, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = (*TINY_ON_CPU, "--max-total-tokens", "4096", "--context-length", "64")
    with running(log, *flags, model=TINY) as server:
        yield server


def run_cases(url: str, folder: Path, num_cases: int, is_chosen: Callable[[str], bool]) -> None:
    """Send at least `num_cases` requests; fails with schemathesis' account of those that got a 5xx."""
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    chosen = [path for path in paths if is_chosen(path.strip("/"))]
    # One without body and parameters is asked once.
    num_inputs = sum(
        "requestBody" in op or "parameters" in op for path in chosen for op in paths[path].values()
    )
    per_operation = -(-num_cases // num_inputs) + 1
    choice = [flag for path in chosen for flag in ("--include-path", path)]
    # The coverage phase goes through each field's limits and wrong types: thousands of cases by itself.
    phases = "examples,coverage,fuzzing" if IS_LONG else "fuzzing"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--no-color"]
    command += ["--checks", "not_a_server_error", "--phases", phases, "--max-examples", str(per_operation)]
    command += ["--request-timeout", "300", "--suppress-health-check", "too_slow"]
    command += ["--warnings", "off", "--generation-database", "none", *choice]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    generated = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert generated is not None, done.stdout
    assert int(generated[1]) == int(generated[2]) >= num_cases


def test_no_server_error(server: Server, tmp_path: Path) -> None:
    run_cases(server.url, tmp_path, 5000 if IS_LONG else 200, lambda name: name not in WITH_EFFECTS)
    server.assert_live()


def test_no_server_error_on_routes_with_effects(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = server_harness.make_settings(server_harness.write_byte_tokenizer(tmp_path))
    with server_harness.running(run_dir, settings) as server:
        run_cases(server.url, tmp_path, 500 if IS_LONG else 20, lambda name: name in WITH_EFFECTS)
        assert httpx.get(f"{server.url}/health").status_code == 200
