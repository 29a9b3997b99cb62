"""`phalanx serve`: bind the port, start the processes, watch them all.

    launcher (this process; no torch) ── engine process (rank 0)
                                      └─ API worker 0 .. N-1 (share the listening socket)

The launcher owns nothing but lives: a dead API worker is replaced, a dead engine ends the server, and nobody
survives the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from phalanx.config.cli import build_parser
from phalanx.config.groups import Settings
from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.runtime.channels import LauncherChannel
from phalanx.runtime.heartbeat import ENGINE_BEAT, Heartbeat, Pulse
from phalanx.runtime.models import check_tokenizer, settle_settings
from phalanx.runtime.process import kill_with_stacks, notify_supervisor, raise_file_limit, setup_logging
from phalanx.runtime.run_dir import run_directory
from phalanx.runtime.workers import WorkerPool

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # thousands of clients connect at once
_POLL_S = 0.1
_LAST_WORDS_S = 10.0  # beyond --shutdown-timeout: aborted requests are told, the last bytes are read
_KILL_S = 5.0
_MIN_FILES = 256
_LATER, _LATER_S = 1.1, 1.0  # a worker's own watchdog goes first, since it says where the worker hangs
# An engine whose watchdog cannot look. Sooner than the workers give it up (engine_client), who would not take
# it back.
_ENGINE_LATER_S = 2.0
_WORKER_MODULE = "phalanx.server"
ENGINE_MODULE = "phalanx.runtime.engine_process"


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
        hint = " (--port takes another)" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from error
    except UnicodeError as error:  # an empty or overlong label, or bytes that are no text
        raise ConfigError(f"--host {host!a} is no address and no host name") from error
    sock.set_inheritable(True)
    return sock


def check_files(num_requests: int) -> None:
    """Raise the limit of open files, which the children inherit, and say so if it is low.

    Raises:
        ConfigError: no server can run with it.
    """
    limit = raise_file_limit()
    if limit < _MIN_FILES:
        raise ConfigError(f"at most {limit} files may be open (ulimit -Hn): {_MIN_FILES} are needed at least")
    if limit < num_requests + _MIN_FILES:
        logger.warning(
            "at most %d files may be open (ulimit -Hn): fewer clients than the %d requests that can run",
            limit,
            num_requests,
        )


class Launcher:
    """Starts and watches the processes of one server.

    Args:
        listener: the socket that all API workers accept from.
        run_dir: for the sockets between the processes.
        engine_module: what runs as the engine process.
    """

    def __init__(
        self, settings: Settings, listener: socket.socket, run_dir: Path, engine_module: str = ENGINE_MODULE
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._run_dir = run_dir
        self._engine_module = engine_module
        self._num_signals = 0
        self._is_ready = False
        self._engine: subprocess.Popen[bytes] | None = None
        self._workers: WorkerPool | None = None

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP (0), or until the server cannot go on (1, or a child's 2)."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self._on_signal)  # the terminal has gone: end in order
        channel = LauncherChannel(str(self._run_dir))
        try:
            self._engine = self._spawn(self._engine_module, [])
            count = self._settings.server.api_workers
            timeout_s = self._settings.server.watchdog_timeout_s

            def on_death(number: int) -> None:
                channel.worker_ended(number)
                Heartbeat(self._run_dir, number).remove()

            self._workers = WorkerPool(
                count,
                self._start_worker,
                on_death,
                beat=lambda number: Heartbeat(self._run_dir, number).last(),
                silence_s=timeout_s and timeout_s * _LATER + _LATER_S,
            )
            return self._watch(self._engine, self._workers)
        finally:
            self._end_all()
            channel.close()
            logger.info("stopped")

    def _watch(self, engine: subprocess.Popen[bytes], workers: WorkerPool) -> int:
        timeout_s, pulse = self._settings.server.watchdog_timeout_s, Pulse()
        while not self._num_signals:
            silent_s = pulse.look(Heartbeat(self._run_dir, ENGINE_BEAT).last())
            if timeout_s and silent_s > timeout_s + _ENGINE_LATER_S:
                logger.error("the engine has given no sign of life for %.0f s: killing it", silent_s)
                pulse = Pulse()
                kill_with_stacks(engine)
            code = engine.poll()
            if code is not None:
                if code != 2:  # with 2 it has said why in one line
                    logger.error("the engine ended with code %s; stopping the server", code)
                return 2 if code == 2 else 1
            if not self._is_ready and any(worker.poll() == 2 for worker in workers.processes):
                return 2
            if workers.check() is not None:
                return 1
            if not self._is_ready and self._is_healthy():
                self._is_ready = True
                self._announce()
            time.sleep(_POLL_S)
        notify_supervisor("STOPPING=1")
        timeout_s = self._settings.server.shutdown_timeout_s
        logger.info("stopping: running requests have %g s; a second signal stops at once", timeout_s)
        return 0

    def _on_signal(self, signum: int, frame: object) -> None:
        self._num_signals += 1

    def _start_worker(self, slot: int, number: int) -> subprocess.Popen[bytes]:
        fd = self._listener.fileno()
        args = ["--worker-id", str(number), "--slot", str(slot), "--fd", str(fd)]
        return self._spawn(_WORKER_MODULE, args, (fd,))

    def _spawn(self, module: str, args: list[str], fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, "--settings", "/dev/stdin", "--ipc-dir", str(self._run_dir)]
        command += ["--parent-pid", str(os.getpid()), *args]
        # A process group of its own: Ctrl-C reaches the launcher alone, which then ends the others in order.
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, process_group=0)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:  # not a file: they hold the API key
            pipe.write(msgspec.json.encode(self._settings))
        return child

    def _is_healthy(self) -> bool:
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
        notify_supervisor("READY=1")
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
        workers = [] if self._workers is None else self._workers.processes
        engines = [] if self._engine is None else [self._engine]
        drains = bool(self._num_signals) and any(engine.poll() is None for engine in engines)
        timeout_s = self._settings.server.shutdown_timeout_s if drains else 0.0
        self._terminate(workers, timeout_s + _LAST_WORDS_S)
        self._terminate(engines, _KILL_S)

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
        args.api_key, args.api_key_origin = os.environ.get("PHALANX_API_KEY"), "PHALANX_API_KEY"
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
        check_files(settings.scheduler.max_running_requests)
        check_tokenizer(settings)
    except PhalanxError as error:
        print(f"phalanx: error: {error}", file=sys.stderr)
        return 2
    logger.info("listening on %s:%d; loading %s", *listener.getsockname()[:2], settings.source.path)
    for line in settings.choices:
        logger.info("%s", line)
    try:
        with run_directory() as run_dir:
            return Launcher(settings, listener, run_dir).run()
    except ConfigError as error:  # the directory's path is too long for a socket, or it cannot be made
        print(f"phalanx: error: {error}", file=sys.stderr)
        return 2
