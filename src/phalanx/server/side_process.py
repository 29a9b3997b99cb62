"""A process beside an API worker that decodes and tokenizes big requests.

Decoding megabytes of JSON and making lists of a million ids hold the interpreter's lock in one piece, and
with it every stream of the worker (docs/measured.md). Here they hold up nobody. The process is started when
it is needed first, ends when nothing was for a minute, and never outlives its worker.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from phalanx.core.errors import RequestError
from phalanx.runtime.process import die_with_parent, setup_logging
from phalanx.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")
Job = Callable[[Tokenizer | None], T]  # a partial of a module's function, so that it can be pickled

_NICENESS = 5  # where cores are short, tokens of running streams go first


@dataclass(frozen=True, slots=True)
class SideSettings:
    """What the process is told at its start.

    path, vocab_size, chat_template: what `load_tokenizer` takes; path is None for no tokenizer.
    idle_s: it ends when nothing was asked for so long.
    """

    path: str | None
    vocab_size: int
    chat_template: str | None
    log_level: str = "info"
    idle_s: float = 60.0


class SideProcess:
    """Calls jobs in the process, one after the other; use `call` from one thread, `close` from any."""

    def __init__(self, settings: SideSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The process's id while there is one."""
        return None if self._process is None else self._process.pid

    def call(self, job: Job[T]) -> T:
        """What the job returns, given the process's own tokenizer.

        Raises:
            RequestError: raised by the job; or 503: the process ended over it (out of memory, killed).
            RuntimeError: the job raised anything else.
        """
        message = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        while True:
            process, connection = self._started()
            try:
                connection.send_bytes(message)
                reply = connection.recv_bytes()
                break
            except (EOFError, OSError):
                code = process.wait()
                self._forget()
                if code == 0 and not self._is_closed:
                    continue  # it was idle for long and has just left
                logger.error("the side process ended with code %s over a big request", code)
                raise RequestError("the request could not be read: its process ended", status=503) from None
        kind, value = pickle.loads(reply)
        if kind == "refused":
            raise RequestError(value.pop("message"), **value)
        if kind == "failed":
            raise RuntimeError(value)
        result: T = value
        return result

    def close(self) -> None:
        """End the process; a call that waits for it raises."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        with self._lock:
            if self._is_closed:
                raise RequestError("the server is stopping", status=503)
            if self._process is None or self._connection is None:
                ours, theirs = Pipe()
                fd = theirs.fileno()
                command = [sys.executable, "-m", __name__, "--fd", str(fd), "--parent-pid", str(os.getpid())]
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,))
                theirs.close()
                self._connection = ours
                with contextlib.suppress(OSError):  # it has ended: the caller's own sending tells
                    ours.send_bytes(pickle.dumps(self._settings))
            return self._process, self._connection

    def _forget(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._process = self._connection = None


def _answer(job: Job[Any], tokenizer: Tokenizer | None) -> tuple[str, Any]:
    try:
        return "done", job(tokenizer)
    except RequestError as error:
        return "refused", {name: getattr(error, name) for name in ("message", "status", "param", "code")}
    except Exception as error:
        logger.exception("a job failed")
        return "failed", f"{type(error).__name__} in the side process"


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process: takes SideSettings, then jobs, until nobody asks any more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(args.parent_pid)
    os.nice(_NICENESS)
    connection = Connection(args.fd)
    try:
        settings: SideSettings = pickle.loads(connection.recv_bytes())
        setup_logging(settings.log_level, "side")
        tokenizer = None
        if settings.path is not None:
            tokenizer = load_tokenizer(
                settings.path, vocab_size=settings.vocab_size, chat_template=settings.chat_template
            )
        while connection.poll(settings.idle_s):
            reply = _answer(pickle.loads(connection.recv_bytes()), tokenizer)
            connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
            del reply
    except (EOFError, BrokenPipeError):
        pass  # the worker has ended
    return 0


if __name__ == "__main__":
    # Under its own name, so that what is pickled here and there is the same.
    from phalanx.server.side_process import main as run

    sys.exit(run())
