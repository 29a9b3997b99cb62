"""Starts real servers for tests: the same command a user types, in its own process."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from tests.e2e.server_harness import PATIENCE_S, wait_until

READY_S = 300
TINY = "tiny-llama"
TINY_ON_CPU = ("--load-format", "dummy", "--device", "cpu")


def free_port() -> int:
    """Below the ports that the kernel gives to clients: none of them takes it before the server does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class Server:
    """A running `phalanx serve`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        """The child whose command line holds `word`."""
        return next(c for c in self.children() if word in " ".join(c.cmdline()))

    def workers(self) -> dict[int, psutil.Process]:
        """The API workers' processes by slot."""
        found = {}
        for child in self.children():
            try:
                words = child.cmdline()
            except psutil.Error:  # it has just ended
                continue
            if "--slot" in words:
                found[int(words[words.index("--slot") + 1])] = child
        return found

    @contextlib.contextmanager
    def client_of(self, worker: psutil.Process) -> Iterator[httpx.Client]:
        """A client with one kept connection, which is this worker's."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:  # the kernel hands connections to any of them
            with httpx.Client(base_url=self.url, limits=limits) as client:
                stream = client.get("/health").extensions["network_stream"]
                port = stream.get_extra_info("client_addr")[1]
                if any(c.raddr and c.raddr.port == port for c in worker.net_connections("tcp")):
                    yield client
                    return
        raise AssertionError("no connection went to this worker")

    def stats(self) -> dict[str, int]:
        """The engine's counters."""
        return httpx.get(f"{self.url}/server_info").json()["internal_states"][0]

    def kv_cache(self) -> dict[str, int]:
        return httpx.get(f"{self.url}/server_info").json()["kv_cache"]

    def assert_live(self) -> None:
        """It answers, and idle KV accounting is exact: free + cached = total, nothing held."""
        body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        reply = httpx.post(f"{self.url}/generate", json=body)
        assert reply.status_code == 200, reply.text
        wait_until(lambda: self.kv_cache()["held_pages"] == 0, "all pages to be given back")
        kv = self.kv_cache()
        assert kv["free_pages"] + kv["cached_pages"] == kv["total_pages"], kv


def start(
    log: Path, *flags: str, model: str = "smollm2", module: tuple[str, ...] = ("phalanx.launch_server",)
) -> Server:
    """Start a server and wait until /health is 200."""
    port = free_port()
    command = [sys.executable, "-m", *module, "--model", model, "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    server = Server(process, port, log)
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"server ended with {process.returncode}:\n{log.read_text()}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                return server
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"server not ready after {READY_S} s:\n{log.read_text()}")


def stop(server: Server) -> int:
    """SIGTERM and wait; returns the exit code."""
    server.process.terminate()
    try:
        return server.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
        raise AssertionError(f"server did not stop:\n{server.log.read_text()}") from None


@contextlib.contextmanager
def running(
    log: Path, *flags: str, model: str = "smollm2", module: tuple[str, ...] = ("phalanx.launch_server",)
) -> Iterator[Server]:
    """A server that is stopped at the end, whatever happened."""
    server = start(log, *flags, model=model, module=module)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            stop(server)
