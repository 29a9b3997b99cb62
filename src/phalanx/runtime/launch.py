"""`phalanx serve`: bind the port, start the processes, watch them all.

    launcher (this process; no torch) ── engine process (rank 0)
                                      └─ API worker 0 .. N-1 (share the listening socket)

The launcher owns nothing but lives: whoever dies, the rest is ended; nobody survives the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from phalanx.config.cli import build_parser
from phalanx.config.groups import Settings
from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.runtime.models import check_tokenizer, settle_settings
from phalanx.runtime.process import setup_logging

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # thousands of clients connect at once
_POLL_S = 0.1
_DRAIN_S = 30.0  # how long requests may finish after SIGTERM
_KILL_S = 5.0


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow is done.

    Raises:
        ConfigError: the address cannot be had (in use, no permission, unknown host).
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    sock.set_inheritable(True)
    return sock


class Launcher:
    """Starts and watches the processes of one server."""

    def __init__(self, settings: Settings, listener: socket.socket, run_dir: Path) -> None:
        self._settings = settings
        self._listener = listener
        self._run_dir = run_dir
        self._num_signals = 0
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT (0) or until a process dies (its code, or 1)."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            self._start()
            announced = False
            while not self._num_signals:
                for name, child in self._children.items():
                    code = child.poll()
                    if code is not None and not self._num_signals:
                        return self._ended(name, code)
                if not announced and self._is_ready():
                    announced = True
                    self._announce()
                time.sleep(_POLL_S)
            logger.info("stopping: running requests have %.0f s; a second signal stops at once", _DRAIN_S)
            return 0
        finally:
            self._end_all()
            logger.info("stopped")

    def _ended(self, name: str, code: int) -> int:
        """The exit code for a child that ended by itself; with 2 it has said why in one line."""
        if code == 2:
            return 2
        logger.error("%s ended with code %s; stopping the server", name, code)
        return 1

    def _on_signal(self, signum: int, frame: object) -> None:
        self._num_signals += 1

    def _start(self) -> None:
        settings_file = self._run_dir / "settings.json"
        settings_file.touch(mode=0o600)  # it holds the API key
        settings_file.write_bytes(msgspec.json.encode(self._settings))
        common = ["--settings", str(settings_file), "--ipc-dir", str(self._run_dir)]
        common += ["--parent-pid", str(os.getpid())]
        fd = self._listener.fileno()
        self._spawn("engine", ["phalanx.runtime.engine_process", *common], ())
        for i in range(self._settings.server.api_workers):
            worker = ["phalanx.server", *common, "--worker-id", str(i), "--fd", str(fd)]
            self._spawn(f"api worker {i}", worker, (fd,))

    def _spawn(self, name: str, module_args: list[str], fds: tuple[int, ...]) -> None:
        command = [sys.executable, "-m", *module_args]
        # A process group of its own: Ctrl-C reaches the launcher alone, which then ends the others in order.
        self._children[name] = subprocess.Popen(command, pass_fds=fds, process_group=0)

    def _is_ready(self) -> bool:
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(host, port, timeout=1.0)
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            finally:
                connection.close()
        return False

    def _announce(self) -> None:
        (self._run_dir / "settings.json").unlink()  # all have read it, and it holds the API key
        host, port = self._listener.getsockname()[:2]
        logger.info(
            "Phalanx is ready: http://%s:%d serves %s",
            f"[{host}]" if ":" in host else host,
            port,
            self._settings.server.served_model_name,
        )

    def _end_all(self) -> None:
        """API workers first (they drain their requests), then the engine; SIGKILL for what stays."""
        self._listener.close()
        engine = self._children.get("engine")
        drains = bool(self._num_signals) and engine is not None and engine.poll() is None
        workers = [child for name, child in self._children.items() if name != "engine"]
        self._terminate(workers, (_DRAIN_S if drains else 0.0) + _KILL_S)
        self._terminate(list(self._children.values()), _KILL_S)

    def _terminate(self, children: list[subprocess.Popen[bytes]], wait_s: float) -> None:
        """SIGTERM, then SIGKILL for what has not ended after `wait_s`, or at once on a second signal."""
        for child in children:
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + wait_s
        while any(child.poll() is None for child in children):
            if time.monotonic() > deadline or self._num_signals > 1:
                for child in children:
                    child.kill()
            time.sleep(_POLL_S / 4)


def main(argv: list[str] | None = None, prog: str = "phalanx serve") -> int:
    """Parse the command line and serve. Exit code 2 with one line for what cannot be done."""
    args = build_parser(prog).parse_args(argv)
    if args.api_key is None:
        args.api_key = os.environ.get("PHALANX_API_KEY")
    try:
        return serve(args)
    except KeyboardInterrupt:  # before the launcher took over the signal
        print("phalanx: interrupted", file=sys.stderr)
        return 130


def serve(args: argparse.Namespace) -> int:
    """Serve with parsed arguments; returns the exit code."""
    setup_logging(args.log_level, "launch")
    try:
        listener = bind(args.host, args.port)
        settings = settle_settings(args)
        check_tokenizer(settings)
    except PhalanxError as error:
        print(f"phalanx: error: {error}", file=sys.stderr)
        return 2
    logger.info("listening on %s:%d; loading %s", *listener.getsockname()[:2], settings.source.path)
    for line in settings.choices:
        logger.info("%s", line)
    with tempfile.TemporaryDirectory(prefix="phalanx-") as run_dir:
        return Launcher(settings, listener, Path(run_dir)).run()
