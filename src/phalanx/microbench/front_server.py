"""A whole Phalanx server on the null engine, and what its processes cost."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from phalanx.core.errors import ConfigError

_START_S = 60.0
_STOP_S = 45.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# `phalanx serve` that does not outlive the process whose id comes first.
_SERVE = """import sys
from phalanx.runtime.process import die_with_parent
die_with_parent(int(sys.argv[1]))
from phalanx.runtime.launch import main
sys.exit(main(sys.argv[2:]))"""


class NullServer:
    """`phalanx serve --device null` in processes of its own; a context manager.

    Args:
        flags: of `phalanx serve`, after the model's.

    Attributes:
        port: where it listens.

    Raises:
        ConfigError: it did not start; the message ends with its log's last lines.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = list(flags)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # without a name: nothing stays, however this ends
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NullServer:
        # A process group of its own: Ctrl-C reaches this process alone, which then ends the server in order.
        command = [
            sys.executable,
            "-c",
            _SERVE,
            str(os.getpid()),
            "--device",
            "null",
            "--port",
            str(self.port),
        ]
        try:
            self._process = subprocess.Popen(
                [*command, *self._flags], stdout=self._log, stderr=subprocess.STDOUT, process_group=0
            )
            deadline_s = time.monotonic() + _START_S
            while not self._is_ready():
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise ConfigError("the server did not start: " + " | ".join(self._last_lines()))
                time.sleep(0.1)
        except BaseException:  # Ctrl-C and SIGTERM too
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _last_lines(self) -> list[str]:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip().splitlines()[-3:]

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        connection.close()
        return False

    def pids(self, module: str) -> list[int]:
        """Processes of the server that run this module ("phalanx.server", the API workers)."""
        assert self._process is not None, "not entered"
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [
            int(child)
            for child in children
            if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        ]

    def worker_cpu_s(self) -> float:
        """CPU seconds (user and system) that all API workers have used."""
        return sum(map(cpu_s, self.pids("phalanx.server")))

    def engine_cpu_s(self) -> float:
        """CPU seconds that the engine process has used."""
        return sum(map(cpu_s, self.pids("phalanx.runtime.engine_process")))


def cpu_s(pid: int) -> float:
    """User and system time of a process, all its threads, from /proc/PID/stat; its unit is a clock tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
