"""SIGHUP: a terminal that has gone ends the server as SIGTERM does, and under nohup nothing at all."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_harness import PATIENCE_S
from tests.e2e.serving import running, stop

FLAGS = ("--load-format", "dummy", "--device", "null", "--null-step-ms", "20", "--api-workers", "1")
FLAGS += ("--shutdown-timeout", "600")
BODY = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}


@pytest.mark.parametrize("is_ignored", [False, True], ids=["terminal", "nohup"])
def test_hangup_lets_requests_finish(tmp_path: Path, is_ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with running(tmp_path / "log", *FLAGS, model="tiny-llama") as server:
            with httpx.stream("POST", f"{server.url}/generate", json=BODY) as reply:
                lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
                next(lines)
                server.process.send_signal(signal.SIGHUP)
                *_, last = lines
            assert len(json.loads(last.removeprefix("data: "))["output_ids"]) == 60
            if is_ignored:
                time.sleep(0.5)
                assert server.process.poll() is None
                server.assert_live()
                assert stop(server) == 0
            assert server.process.wait(PATIENCE_S) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
