"""The private directory in which a server's processes find each other's sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from phalanx.core.errors import ConfigError

_PREFIX, _UNFINISHED = "phalanx-run-", ".phalanx-run-"


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory of mode 0700, removed at the end.

    A launcher that is killed cannot remove it, and takes its children with it: so every start removes what
    dead servers left behind. Whether one lives shows the lock on its directory, which dies with the process.

    Args:
        parent: where; the system's folder for temporary files by default.

    Raises:
        ConfigError: it cannot be made there.
    """
    parent = Path(tempfile.gettempdir() if parent is None else parent)
    remove_stale(parent)
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot make a run directory in {parent}: {error.strerror}") from error
    lock = os.open(unfinished, os.O_RDONLY)  # not inherited by children
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = parent / (_PREFIX + unfinished.name.removeprefix(_UNFINISHED))
        unfinished.rename(path)  # under this name it is seen, and by then it is locked
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def remove_stale(parent: Path) -> int:
    """Remove the run directories of this user's dead servers; returns how many."""
    count = 0
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, in use, or just removed by another start
            if path.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                count += 1
            finally:
                os.close(lock)
    return count
