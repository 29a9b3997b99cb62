"""`phalanx bench front` in small: whole servers, every answer checked, figures that add up."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


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
