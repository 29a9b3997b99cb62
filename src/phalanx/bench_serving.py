"""`python -m phalanx.bench_serving`, the same as `phalanx bench serving`: SGLang's benchmark command line.

The load client in `phalanx.bench` speaks HTTP only and knows no tokenizer; here it gets the package's own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.bench.args import add_arguments
from phalanx.bench.datasets import TokenizerLike
from phalanx.bench.errors import BenchError
from phalanx.bench.run import run as run_benchmark
from phalanx.core.errors import PhalanxError

__all__ = ["add_arguments", "load_named_tokenizer", "main", "run", "run_command"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 (nothing succeeded, or a broken run), 2 (bad input)."""
    parser = argparse.ArgumentParser(
        prog="phalanx.bench_serving", description="Benchmark an LLM server over HTTP.", allow_abbrev=False
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Run with arguments parsed by a parser that `add_arguments` filled; returns the exit code."""
    return run_command("bench serving", lambda: run_benchmark(args, load_named_tokenizer))


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run one of the load client's commands; errors become one line on stderr and an exit code."""
    try:
        return command()
    except BenchError as error:
        message, exit_code = str(error), error.exit_code
    except PhalanxError as error:
        message, exit_code = str(error), 2
    except KeyboardInterrupt:
        message, exit_code = "interrupted", 130
    print(f"{name}: error: {message}", file=sys.stderr)
    return exit_code


def load_named_tokenizer(name: str) -> TokenizerLike:
    """Load the tokenizer of a folder, a .gguf file, a pulled model (smollm2), a built-in shape or a hub id.

    Raises:
        ModelError: none is found there.
    """
    from phalanx.models.dummy import BUILTIN_CONFIGS
    from phalanx.models.source import resolve_source
    from phalanx.text.tokenizer import load_tokenizer

    if Path(name).expanduser().exists():
        return load_tokenizer(str(Path(name).expanduser()))
    # Format "dummy" asks for shape and tokenizer only: the client must not fetch weights.
    path = resolve_source(name, load_format="dummy").tokenizer_path
    vocab_size = BUILTIN_CONFIGS[name].vocab_size if path == "dummy" else None
    return load_tokenizer(path, vocab_size=vocab_size)


if __name__ == "__main__":
    sys.exit(main())
