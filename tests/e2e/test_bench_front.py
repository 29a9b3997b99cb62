"""`phalanx bench front` in small: whole servers, every answer checked, figures that add up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.server_harness import PATIENCE_S


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "bench", "front", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)


def test_every_measurement_in_small() -> None:
    sizes = ["--streams", "24", "--tokens", "20", "--cumulative-tokens", "10", "--many-streams", "40"]
    done = bench(*sizes, "--requests", "50", "--tokens-per-s", "4000", "--prompt-mb", "0.2")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {run["name"]: run for run in json.loads(done.stdout.splitlines()[-1])["runs"]}
    assert set(runs) == {
        "chat",
        "completions",
        "incremental",
        "cumulative",
        "many",
        "one-token",
        "big-prompt",
    }
    for name, streams, tokens in (("chat", 24, 20), ("incremental", 24, 20), ("cumulative", 24, 10)):
        run = runs[name]
        assert run["num_streams"] == streams
        assert run["num_events"] * run["tokens_per_event"] == pytest.approx(streams * tokens)
        assert 0 < run["num_events"] <= streams * tokens and run["per_cpu_s"] > 0
    assert runs["many"]["num_streams"] == 40 and runs["one-token"]["num_events"] == 50
    assert runs["big-prompt"]["max_gap_ms"] > 0 and runs["chat"]["max_gap_ms"] is None


def test_bad_flags_are_refused_in_one_line() -> None:
    for flags, word in ((["--streams", "0"], "--streams"), (["--model", "nothing"], "nothing")):
        done = bench(*flags)
        assert done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1
    done = bench("--only", "chat", "--serve-flags=--no-such-flag")
    assert done.returncode == 2 and "--no-such-flag" in done.stderr


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_server_is_left_when_it_is_ended_while_one_starts(signum: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "bench", "front", "--only", "chat", "big-prompt"]
    with subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, process_group=0
    ) as bench:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (servers := children(bench.pid)):
            assert bench.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.01)
        bench.send_signal(signum)
        assert bench.wait(PATIENCE_S) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(signum, -signum)
        while any(map(is_alive, servers)):
            assert time.monotonic() < deadline_s, "the server outlives the benchmark"
            time.sleep(0.01)
        assert bench.stderr is not None and b"Traceback" not in bench.stderr.read()
    if signum != signal.SIGKILL:
        assert not list(tmp_path.iterdir())
