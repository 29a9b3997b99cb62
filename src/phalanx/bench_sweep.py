"""Run a list of rates or concurrencies against a server, find the knee, write report.html."""

from __future__ import annotations

import argparse

from phalanx.bench import sweep
from phalanx.bench.sweep import add_arguments
from phalanx.bench_serving import load_named_tokenizer, run_command

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run with arguments parsed by a parser that `add_arguments` filled; returns the exit code."""
    return run_command("bench sweep", lambda: sweep.run(args, load_named_tokenizer))
