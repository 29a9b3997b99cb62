"""Compare two JSONL files of results, or two servers measured in turn, as ratios with intervals."""

from __future__ import annotations

import argparse

from phalanx.bench import compare
from phalanx.bench.compare import add_arguments
from phalanx.bench_serving import load_named_tokenizer, run_command

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Run with arguments parsed by a parser that `add_arguments` filled; returns the exit code."""
    return run_command("bench compare", lambda: compare.run(args, load_named_tokenizer))
