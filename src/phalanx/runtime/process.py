"""Small things that every process of a server does."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_MAX_FILES = 2**20
_STACKS_SIGNAL, _STACKS_S = signal.SIGUSR1, 1.0


def die_with_parent(parent_pid: int) -> None:
    """Make sure this process does not outlive `parent_pid`, however that one ends.

    On Linux the kernel sends SIGKILL; elsewhere a thread watches the parent's id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before prctl took effect
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def show_stacks_on_signal() -> None:
    """SIGUSR1 writes every thread's stack to stderr, also while the interpreter's lock is held."""
    faulthandler.register(_STACKS_SIGNAL, all_threads=True)


def kill_with_stacks(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a child that hangs, after a second in which it may say where (`show_stacks_on_signal`)."""
    process.send_signal(_STACKS_SIGNAL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STACKS_S)
    process.kill()


def notify_supervisor(state: str) -> None:
    """Tell systemd (Type=notify) how the service stands: "READY=1" or "STOPPING=1"; nothing without it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.sendall(state.encode())


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, since every client is a descriptor; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def tame_libraries() -> None:
    """Settings of the compute libraries. Call before torch is loaded; what a user has set stays.

    Idle OpenMP threads sleep instead of spin: the engine's threads share the cores with API workers, clients
    and the scheduler, and a spinning barrier waits for a thread that has no core. At a load of 5 on 2 cores,
    sampling 256 rows took 68 ms with libgomp's default and 5 ms so; on quiet cores both are the same.

    Every number of tokens in a step is a shape of its own for oneDNN. Its cache of compiled shapes and, above
    that, the one of torch's bridge to it (LRU_CACHE_CAPACITY) keep 1024 each by default, with their scratch
    memory; bounded so, the heap in use stays flat after the first requests (docs/measured.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def setup_logging(level: str, name: str) -> None:
    """Log to stderr, one line a record, with the process's name."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s {name:<8} %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )


@contextlib.contextmanager
def start_up_log() -> Iterator[None]:
    """Inside, this package's log goes to stderr, the bare lines: for commands without a log of their own."""
    ours, handler = logging.getLogger("phalanx"), logging.StreamHandler(sys.stderr)
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
