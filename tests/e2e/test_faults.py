"""What goes wrong around a running server (B16, B48, B50-B52): real processes, an engine without a model."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server_harness import PATIENCE_S, wait_until
from tests.e2e.serving import Server, free_port, running, start

BASE = ("--load-format", "dummy", "--device", "null", "--api-workers", "2")
MODEL = "tiny-llama"
FLAGS = (*BASE, "--max-running-requests", "8", "--null-step-ms", "10")
PROMPT = [5, 6, 7]


def body(num_tokens: int, **fields: object) -> dict[str, object]:
    return {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
        **fields,
    }


class Client(threading.Thread):
    """One request; `status` is None if the connection broke, `last` the last line or the body."""

    def __init__(self, server: Server, num_tokens: int, *, is_stream: bool) -> None:
        super().__init__(daemon=True)
        self._url, self._is_stream, self._max_tokens = server.url, is_stream, num_tokens
        self.status: int | None = None
        self.last = ""
        self.num_events = 0
        self.answer = ""
        self.ended_s = 0.0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            request = body(self._max_tokens, stream=self._is_stream)
            with httpx.stream("POST", f"{self._url}/generate", json=request) as reply:
                for line in reply.iter_lines():
                    self.last = line or self.last
                    self.answer = line if "meta_info" in line else self.answer
                    self.num_events += bool(line)
                self.status = reply.status_code
        self.ended_s = time.monotonic()

    def num_tokens(self) -> int:
        return len(json.loads(self.answer.removeprefix("data: "))["output_ids"])

    def error(self) -> dict[str, object]:
        return json.loads(self.last.removeprefix("data: "))["error"]


def gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive, f"left behind: {[p.cmdline() for p in alive]}"


def join(clients: list[Client]) -> None:
    for client in clients:
        client.join(PATIENCE_S)
        assert not client.is_alive(), "a client still waits"


@pytest.fixture
def temporary_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The servers' folder for temporary files; its path is short, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_killed_engine(tmp_path: Path, temporary_files: Path) -> None:
    server = start(tmp_path / "log", *FLAGS, model=MODEL)
    children = server.children()
    clients = [Client(server, 3000, is_stream=i % 2 == 0) for i in range(20)]
    wait_until(lambda: server.stats()["running"] == 8 and server.stats()["queued"] == 12, "all to be there")
    server.child("engine_process").kill()
    join(clients)
    for client in clients:
        assert client.status in (200, 503)  # told inside the stream, or instead of an answer
        assert "[DONE]" not in client.last and client.error()["code"] in (503, "engine_dead", None)
    assert sum(client.status == 200 for client in clients) <= 8
    assert server.process.wait(PATIENCE_S) == 1
    gone(children)
    assert "the engine ended with code -9" in server.log.read_text()
    assert list(temporary_files.glob("*phalanx-run-*")) == []


def test_killed_launcher_and_the_next_start(tmp_path: Path, temporary_files: Path) -> None:
    server = start(tmp_path / "log", *FLAGS, model=MODEL)
    children = server.children()
    assert len(children) == 3
    (left,) = temporary_files.glob("phalanx-run-*")
    client = Client(server, 3000, is_stream=True)
    wait_until(lambda: client.num_events > 2, "tokens")
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    gone(children)
    join([client])
    assert left.exists()  # nobody was there to remove it
    with running(tmp_path / "log2", *FLAGS, model=MODEL) as server:
        assert not left.exists() and len(list(temporary_files.glob("phalanx-run-*"))) == 1
        server.assert_live()
    assert list(temporary_files.iterdir()) == []


def test_sigterm_drains_what_runs_and_what_is_queued(tmp_path: Path) -> None:
    with running(tmp_path / "log", *FLAGS, "--shutdown-timeout", "600", model=MODEL) as server:
        children = server.children()
        order = {"mode": "in_place"}  # none ends before all are there
        assert httpx.post(f"{server.url}/pause_generation", json=order).status_code == 200
        clients = [Client(server, 100, is_stream=i % 2 == 0) for i in range(10)]  # two more than can run
        wait_until(lambda: server.stats()["queued"] == 10, "all to be there")
        assert httpx.post(f"{server.url}/continue_generation").status_code == 200
        server.process.terminate()
        join(clients)
        assert server.process.wait(PATIENCE_S) == 0
        gone(children)
    assert [client.status for client in clients] == [200] * 10
    assert [client.last == "data: [DONE]" for client in clients] == [True, False] * 5
    assert [client.num_tokens() for client in clients] == [100] * 10
    assert "Traceback" not in server.log.read_text()


def test_sigterm_aborts_with_an_error_what_lasts_too_long(tmp_path: Path) -> None:
    with running(tmp_path / "log", *FLAGS, "--shutdown-timeout", "2", model=MODEL) as server:
        children = server.children()
        run = [Client(server, 4000, is_stream=i % 2 == 0) for i in range(8)]
        wait_until(lambda: server.stats()["running"] == 8 and all(c.num_events for c in run[::2]), "tokens")
        queued = [Client(server, 4000, is_stream=i % 2 == 0) for i in range(2)]
        wait_until(lambda: server.stats()["queued"] == 2, "two to wait")
        began_s = time.monotonic()
        server.process.terminate()
        join([*run, *queued])
        assert server.process.wait(PATIENCE_S) == 0
        gone(children)
    for client in (*run, *queued):
        assert client.ended_s - began_s >= 2
        assert "shutting down" in client.error()["message"]
    assert [client.status for client in (*run, *queued)] == [200, 503] * 4 + [503, 503]
    assert "Traceback" not in server.log.read_text()


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_sigterm_does_not_wait_for_a_prompt_of_megabytes(tmp_path: Path) -> None:
    """It is tokenized beside the worker; after the shutdown timeout its client gets a 503."""
    server = start(tmp_path / "log", *FLAGS, "--shutdown-timeout", "0.5", model=MODEL)
    children = server.children()
    statuses: list[int] = []

    def ask(client: httpx.Client) -> None:
        statuses.append(client.post("/tokenize", json={"prompt": "jb kg \u4e16 " * 4_000_000}).status_code)

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.client_of(worker)) for worker in server.workers().values()]
        threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        # It is started for a body that has come whole.
        wait_until(lambda: str(command_lines(server)).count("side_process") == 2, "both side processes")
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(PATIENCE_S)
    assert statuses == [503, 503]
    assert server.process.wait(PATIENCE_S) == 0
    gone(children)


def command_lines(server: Server) -> list[list[str]]:
    """Of its children."""
    lines = []
    for child in server.children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            lines.append(child.cmdline())
    return lines


def test_a_second_signal_ends_at_once_and_the_supervisor_hears_of_each_step(
    tmp_path: Path, temporary_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(temporary_files / "notify"))
    notices.settimeout(PATIENCE_S)
    monkeypatch.setenv("NOTIFY_SOCKET", str(temporary_files / "notify"))
    with notices, running(tmp_path / "log", *FLAGS, "--shutdown-timeout", "600", model=MODEL) as server:
        children = server.children()
        client = Client(server, 4000, is_stream=True)
        wait_until(lambda: client.num_events > 2, "tokens")
        assert notices.recv(100) == b"READY=1"
        server.process.terminate()
        assert notices.recv(100) == b"STOPPING=1"
        wait_until(lambda: not _accepts(server.port), "the port to be closed")
        assert server.process.poll() is None and client.is_alive()
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0
        gone(children)
        join([client])
        assert client.last != "data: [DONE]"


def _leave(server: Server, seed: int) -> None:
    """Send a request and go away at some moment: while it is queued, prefilled, or answered."""
    rng = random.Random(seed)
    request = json.dumps(body(rng.choice([3, 400, 3000]), stream=rng.random() < 0.7)).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(request)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        data = head + request
        sock.sendall(data if rng.random() < 0.9 else data[: rng.randrange(len(data))])
        if rng.random() < 0.5:
            sock.settimeout(rng.random())
            with contextlib.suppress(TimeoutError):
                sock.recv(4096)
        else:
            time.sleep(rng.random() * 0.3)
        if rng.random() < 0.5:  # a reset instead of an orderly end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_two_hundred_clients_that_leave(tmp_path: Path) -> None:
    with running(tmp_path / "log", *FLAGS, model=MODEL) as server:
        stays = Client(server, 600, is_stream=True)
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda seed: _leave(server, seed), range(200)))
        wait_until(lambda: server.stats()["running"] <= 1 and server.stats()["queued"] == 0, "aborts")
        join([stays])
        assert stays.last == "data: [DONE]" and stays.num_tokens() == 600
        server.assert_live()
        assert "Traceback" not in server.log.read_text()


def faulty(kind: str, trigger: Path) -> tuple[str, ...]:
    return ("tests.e2e.faulty_server", kind, str(trigger))


def test_a_step_that_fails_ends_its_requests_and_no_others(tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    module = faulty("engine-error", trigger)
    with running(tmp_path / "log", *FLAGS, model=MODEL, module=module) as server:
        hit = [Client(server, 3000, is_stream=i % 2 == 0) for i in range(8)]
        wait_until(lambda: server.stats()["running"] == 8, "all to run")
        waits = Client(server, 20, is_stream=True)
        wait_until(lambda: server.stats()["queued"] == 1, "one to wait")
        trigger.touch()
        join([*hit, waits])
        assert [client.status for client in hit] == [200, 500] * 4
        for client in hit:
            assert "the test broke this step" in client.error()["message"] and "[DONE]" not in client.last
        assert waits.status == 200 and waits.last == "data: [DONE]" and waits.num_tokens() == 20
        server.assert_live()
        log = server.log.read_text()
        assert re.search(r"step \d+ failed; its requests end with an error", log)
        assert server.process.poll() is None


@pytest.mark.parametrize(
    ("kind", "flags"), [("crash", ()), *((kind, ("--watchdog-timeout", "60")) for kind in ("hang", "lock"))]
)
def test_an_engine_that_cannot_go_on_ends_the_server(
    tmp_path: Path, kind: str, flags: tuple[str, ...]
) -> None:
    trigger = tmp_path / "now"
    server = start(tmp_path / "log", *FLAGS, *flags, model=MODEL, module=faulty(kind, trigger))
    children = server.children()
    clients = [Client(server, 3000, is_stream=i % 2 == 0) for i in range(12)]
    wait_until(lambda: server.stats()["running"] + server.stats()["queued"] == 12, "all to be there")
    trigger.touch()
    join(clients)
    assert {client.status for client in clients} <= {200, 503}
    for client in clients:
        assert "the engine process has ended" in client.error()["message"]
    assert server.process.wait(PATIENCE_S) == 1
    gone(children)
    log = server.log.read_text()
    said = {
        "crash": ["ended with code 1", "ZeroDivisionError"],
        "hang": ["ended with code 1", "the loop has not turned for 2 s", 'faulty_server.py", line'],
        "lock": [
            "ended with code -9",
            "the engine has given no sign of life for 10 s",
            'faulty_server.py", line',
        ],
    }
    assert all(part in log for part in said[kind]), log


def test_a_worker_that_was_stopped_is_replaced_and_others_go_on(tmp_path: Path) -> None:
    """It cannot end itself; the launcher sees that it stands still, and ends and replaces it."""
    flags = (*FLAGS, "--watchdog-timeout", "60")
    with running(tmp_path / "log", *flags, model=MODEL, module=faulty("hasty", tmp_path / "no")) as server:
        stopped, other = (server.workers()[slot] for slot in (0, 1))
        with server.client_of(stopped) as doomed, server.client_of(other) as client:
            lost: list[object] = []

            def read() -> None:
                try:
                    lost.append(doomed.post("/generate", json=body(3000)).status_code)
                except httpx.HTTPError as error:
                    lost.append(error)

            thread = threading.Thread(target=read)
            thread.start()
            wait_until(lambda: client.get("/server_info").json()["internal_states"][0]["running"] == 1, "it")
            stopped.suspend()
            kept = client.post("/generate", json=body(100))
            assert kept.json()["meta_info"]["completion_tokens"] == 100
            thread.join(PATIENCE_S)
            assert len(lost) == 1 and isinstance(lost[0], httpx.HTTPError)
        wait_until(lambda: server.workers().get(0, stopped).pid != stopped.pid, "a successor")
        gone([stopped])
        with server.client_of(server.workers()[0]) as client:
            assert client.post("/generate", json=body(5)).json()["meta_info"]["completion_tokens"] == 5
        server.assert_live()
        assert "API worker 0 has not turned for" in server.log.read_text()
        assert other.pid == server.workers()[1].pid


def test_health_answers_while_a_step_lasts(tmp_path: Path) -> None:
    flags = (*BASE, "--max-running-requests", "8", "--null-step-ms", "2000")
    with running(tmp_path / "log", *flags, model=MODEL) as server:
        client = Client(server, 1000, is_stream=True)
        wait_until(lambda: client.num_events > 0, "a first token")
        num_events = num_answers = 0
        while num_answers < 5:  # between one token and the next
            assert httpx.get(f"{server.url}/health").status_code == 200
            num_answers = num_answers + 1 if client.num_events == num_events else 0
            num_events = client.num_events
        assert client.is_alive()
        assert httpx.post(f"{server.url}/abort_request", json={"abort_all": True}).status_code == 200
        join([client])


def _limited(soft: int, hard: int, port: int) -> list[str]:
    command = ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-m", "phalanx.launch_server"]
    return [*command, "--model", MODEL, "--port", str(port), *FLAGS]


def test_too_few_descriptors_are_refused_with_the_numbers() -> None:
    done = subprocess.run(_limited(100, 200, free_port()), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("phalanx: error: ")]
    assert len(errors) == 1 and "at most 200 files may be open (ulimit -Hn)" in errors[0]


def test_clients_beyond_the_descriptors_are_refused_and_others_served(tmp_path: Path) -> None:
    """The soft limit is raised to the hard one; beyond that, clients are told, and later ones are served."""
    port = free_port()
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(_limited(64, 300, port), stdout=out, stderr=subprocess.STDOUT)
    server = Server(process, port, log)
    try:
        wait_until(lambda: _accepts(port) and "is ready" in log.read_text(), "the server")
        with contextlib.ExitStack() as stack:
            socks = []
            for _ in range(900):  # two workers have at most 600 descriptors
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
                with contextlib.suppress(OSError):
                    sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                socks.append(sock)
            answers = [_status(sock) for sock in socks]
            assert answers.count(200) >= 300 and answers.count(503) >= 100
            assert set(answers) <= {200, 503, None}  # None: cut off before it could be told
        wait_until(lambda: _is_served(server), "room again")
        server.assert_live()
        assert process.poll() is None and len(server.workers()) == 2
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def _is_served(server: Server) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health").status_code == 200
    return False


def _status(sock: socket.socket) -> int | None:
    try:
        answer = sock.recv(4096)
    except OSError:
        return None
    return int(answer.split(b" ", 2)[1]) if answer else None


def test_a_run_directory_that_no_socket_fits_in_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "phalanx.launch_server",
        "--model",
        MODEL,
        "--port",
        str(free_port()),
        *FLAGS,
    ]
    env = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=env)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("phalanx: error: ")]
    assert len(errors) == 1 and "too long for a socket" in errors[0]
    assert list(folder.iterdir()) == []


def test_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "phalanx.launch_server",
            "--model",
            MODEL,
            "--port",
            str(port),
            *FLAGS,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ)
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "loading" not in done.stderr
