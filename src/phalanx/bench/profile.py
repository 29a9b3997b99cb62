"""Have the server profile itself during the load."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.bench.backends import BACKENDS
from phalanx.bench.errors import BenchError
from phalanx.bench.target import Target, start_profile, stop_profile


@contextlib.contextmanager
def profiled(args: argparse.Namespace, target: Target, say: Callable[[str], None]) -> Iterator[list[str]]:
    """Profile the server while the block runs, if the command line asks for it.

    A server that refuses to start or to stop costs the profile, not the run: what it answered is said, and
    is in the yielded list when the block is over.

    Args:
        args: checked by `check_arguments`.
        target: the server.
        say: prints a remark.
    """
    problems: list[str] = []
    started = args.profile and _tried(lambda: start_profile(target, _settings(args)), problems, say)
    try:
        yield problems
    finally:
        if started and args.profile_num_steps is None:
            _tried(lambda: stop_profile(target), problems, say)


def _tried(ask: Callable[[], None], problems: list[str], say: Callable[[str], None]) -> bool:
    try:
        ask()
    except BenchError as error:
        problems.append(str(error))
        say(f"Warning: {error}")
        return False
    return True


def _settings(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the body of /start_profile with SGLang's fields; None where the server takes no body."""
    if not BACKENDS[args.backend].has_server_info:
        return None
    output_dir = args.profile_output_dir
    settings = {
        "activities": args.profile_activities or ["CPU", "GPU"],
        "num_steps": args.profile_num_steps,
        "profile_by_stage": bool(args.profile_by_stage),
        # A folder of its own for each run, as in SGLang's client.
        "output_dir": f"{output_dir}/{time.time()}" if output_dir else None,
        "profile_prefix": args.profile_prefix,
    }
    return {name: value for name, value in settings.items() if value is not None}
