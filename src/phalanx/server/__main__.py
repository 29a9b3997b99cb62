"""`python -m phalanx.server`: one API worker on a listening socket that the launcher bound."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn

from phalanx.config.groups import Settings
from phalanx.core.errors import PhalanxError
from phalanx.runtime.channels import WorkerChannel
from phalanx.runtime.collector import settle_heap
from phalanx.runtime.process import die_with_parent, raise_file_limit, setup_logging, show_stacks_on_signal
from phalanx.server.app import Application
from phalanx.server.state import build_api_worker
from phalanx.server.uvicorn_server import DrainingServer, HttpProtocol
from phalanx.text.tokenizer import load_tokenizer

_BACKLOG = 4096
_RESERVED_FILES = 64  # sockets to the engine, libraries, logs
_KEEP_ALIVE_S = 120  # a client that keeps connections for a minute is never met by a closing one


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM; exit code 0 then, 2 if the tokenizer or the run directory is of no use."""
    parser = argparse.ArgumentParser(prog="python -m phalanx.server")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--worker-id", type=int, required=True, help="never used before in this server")
    parser.add_argument("--slot", type=int, help="the place it takes among the workers")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--ipc-dir", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(args.parent_pid)
    show_stacks_on_signal()
    max_files = raise_file_limit()
    settings = msgspec.json.decode(args.settings.read_bytes(), type=Settings)
    slot = args.worker_id if args.slot is None else args.slot
    setup_logging(settings.server.log_level, f"api-{slot}")
    try:
        application = _build(settings, args.worker_id, slot, args.ipc_dir)
    except PhalanxError as error:
        print(f"phalanx: error: {error}", file=sys.stderr)
        return 2
    serve(
        application,
        socket.socket(fileno=args.fd),
        log_level=settings.server.log_level,
        max_connections=max_files - _RESERVED_FILES,
    )
    return 0


def _build(settings: Settings, worker_id: int, slot: int, ipc_dir: Path) -> Application:
    tokenizer = None
    if not settings.server.skip_tokenizer_init:
        tokenizer = load_tokenizer(
            settings.source.tokenizer_path,
            vocab_size=settings.model.vocab_size,
            chat_template=settings.server.chat_template,
        )
    channel = WorkerChannel(str(ipc_dir), worker_id)
    return Application(build_api_worker(settings, worker_id, channel, tokenizer, slot, ipc_dir))


def serve(
    application: Application,
    listener: socket.socket,
    *,
    log_level: str = "info",
    max_connections: int | None = None,
) -> None:
    """Run uvicorn on the socket until SIGTERM or SIGINT; running requests are finished first.

    max_connections: clients beyond get a 503.
    """
    # Uvicorn raises the signal again after its clean end; a worker that was asked to stop exits with 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    config = uvicorn.Config(
        application,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level=log_level if log_level == "debug" else "warning",
        timeout_keep_alive=_KEEP_ALIVE_S,
        backlog=_BACKLOG,
        server_header=False,
        limit_concurrency=max_connections,
    )
    settle_heap()
    DrainingServer(config, application.worker).run(sockets=[listener])


def _ignore(number: int, frame: FrameType | None) -> None:
    logging.getLogger(__name__).debug("signal %d", number)


if __name__ == "__main__":
    sys.exit(main())
