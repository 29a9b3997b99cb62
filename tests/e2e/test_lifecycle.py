"""Start and stop of real servers with a real model; tests/e2e/test_faults.py has what goes wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server_harness import PATIENCE_S
from tests.e2e.serving import Server, free_port, running, stop

FLAGS = ("--max-total-tokens", "8192", "--context-length", "1024", "--shutdown-timeout", "600")
LONG_TOKENS = 150  # long enough to be in the middle of it
LONG = {
    "text": "Once",
    "sampling_params": {"max_new_tokens": LONG_TOKENS, "ignore_eos": True},
    "stream": True,
}


def _gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive, f"left behind: {[p.cmdline() for p in alive]}"


def _launch(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx.launch_server", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "smollm2", "--tensor-parallel-size", "2"), "--tensor-parallel-size 2"),
        (("--model", "/no/such/folder"), "/no/such/folder"),
        (("--model", "smollm2", "--max-total-tokens", "3"), "--max-total-tokens 3"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(flags: tuple[str, ...], words: str, smollm2: str) -> None:
    done = _launch(*flags, "--port", str(free_port()))
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("phalanx: error: ")]
    assert len(errors) == 1 and words in errors[0], done.stderr
    assert "Traceback" not in done.stderr


def _stream_until_end(server: Server, seen: list[bytes], first: threading.Event) -> None:
    try:
        with httpx.stream("POST", f"{server.url}/generate", json=LONG) as reply:
            for line in reply.iter_lines():
                if line:
                    seen.append(line.encode())
                    first.set()
    except httpx.HTTPError as error:
        seen.append(repr(error).encode())
    first.set()


def _start_stream(server: Server) -> tuple[threading.Thread, list[bytes]]:
    seen: list[bytes] = []
    first = threading.Event()
    thread = threading.Thread(target=_stream_until_end, args=(server, seen, first), daemon=True)
    thread.start()
    assert first.wait(PATIENCE_S)
    return thread, seen


def test_sigterm_under_load_drains_and_exits_0(smollm2: str, tmp_path: Path) -> None:
    with running(tmp_path / "log", *FLAGS) as server:
        children = server.children()
        thread, seen = _start_stream(server)
        assert stop(server) == 0
        thread.join(PATIENCE_S)
        assert seen[-1] == b"data: [DONE]", seen[-1]
        _gone(children)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health")
