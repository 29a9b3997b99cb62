"""What the front end costs: real API workers and sockets before an engine that only says known tokens.

Every answer is compared with what the engine must have said, so a lost, doubled or reordered token fails the
run (exit code 1). Costs are CPU seconds of the API workers from /proc/PID/stat: "steady" is taken from the
moment when every stream has begun to the moment when the first one ends, "all" from the first connect to the
last byte. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from phalanx.core.errors import ConfigError
from phalanx.engine.null import null_token_ids
from phalanx.microbench.front_check import Expected, Mismatch
from phalanx.microbench.front_runs import (
    BigPrompt,
    Figures,
    OneToken,
    Streams,
    gap_of,
    one_token_of,
    streams_of,
)
from phalanx.microbench.front_server import NullServer
from phalanx.models.configs import load_model_config
from phalanx.models.source import resolve_source
from phalanx.text.tokenizer import Tokenizer, load_tokenizer

NAMES = ("chat", "completions", "incremental", "cumulative", "many", "one-token", "big-prompt")
_BIG_CONTEXT = 2**21
_BIG_STEP_MS = 5.0  # of the stream that is watched
_ASKED_GAP_MS = 100.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phalanx bench front`."""
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="what to measure")
    parser.add_argument("--model", default="llama-3.2-1b", help="a built-in shape: its vocabulary counts")
    parser.add_argument("--tokenizer-path", help="in place of the made-up tokenizer of built-in shapes")
    parser.add_argument("--streams", type=int, default=4096, help="open at once")
    parser.add_argument("--tokens", type=int, default=96, help="per stream")
    parser.add_argument("--cumulative-tokens", type=int, default=64, help="per stream of whole texts")
    parser.add_argument(
        "--tokens-per-s", type=float, default=30_000, help="of all streams together; 0: as fast as can be"
    )
    parser.add_argument("--many-streams", type=int, default=8192, help="of `many`, 16 tokens each")
    parser.add_argument("--requests", type=int, default=10_000, help="of `one-token`, 128 at once")
    parser.add_argument("--prompt-mb", type=float, default=5.0, help="of `big-prompt`, millions of bytes")
    parser.add_argument("--serve-flags", default="", help="more flags of `phalanx serve`, in one string")
    parser.add_argument("--repeats", type=int, default=1, help="of each measurement; the table shows all")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one measurement may take")


class Sayings:
    """What the null engine says, by request number (which is its seed)."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size

    def expected(self, count: int, num_tokens: int) -> list[Expected]:
        """For requests 0 .. count-1."""
        all_ids = [null_token_ids(seed, num_tokens, self._vocab_size) for seed in range(count)]
        return [Expected(ids, self.tokenizer.decode(ids)) for ids in all_ids]

    def prompt(self, num_bytes: int) -> str:
        """Ordinary words."""
        ids = null_token_ids(5, min(num_bytes, 4096), self._vocab_size)
        text = self.tokenizer.decode(ids)
        return (text * (num_bytes // len(text.encode()) + 1))[:num_bytes]


def run(args: argparse.Namespace) -> int:
    """Measure, print a table and one JSON line."""
    _check(args)
    _raise_file_limit()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    source = resolve_source(args.model, load_format="dummy", tokenizer_path=args.tokenizer_path)
    model = load_model_config(source)
    sayings = Sayings(load_tokenizer(source.tokenizer_path, vocab_size=model.vocab_size), model.vocab_size)
    figures: list[Figures] = []
    gc.disable()
    try:
        for flags, names in _servers(args):
            wanted = [name for name in names if name in args.only]
            if not wanted:
                continue
            with _model_flags(args, wanted) as model_flags, NullServer([*model_flags, *flags]) as server:
                for name in wanted:
                    for _ in range(args.repeats):
                        figures.append(_measure(name, args, server, sayings))
                        gc.collect()
    except Mismatch as error:
        print(f"phalanx: error: the answers are wrong: {error}", file=sys.stderr)
        return 1
    finally:
        gc.enable()
    _print(figures)
    print(json.dumps({"benchmark": "front", "runs": [asdict(f) for f in figures]}))
    return 0


def _end(signum: int, frame: object) -> NoReturn:
    """What ends this process unwinds it, so that servers and temporary folders go with it."""
    raise SystemExit(128 + signum)


def _check(args: argparse.Namespace) -> None:
    for name in ("streams", "tokens", "cumulative_tokens", "many_streams", "requests", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.tokens_per_s < 0 or args.timeout <= 0 or args.prompt_mb <= 0:
        raise ConfigError("--tokens-per-s must be at least 0, --timeout and --prompt-mb above 0")


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _servers(args: argparse.Namespace) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """Flags of each server that is started, and what is measured on it."""
    widest = max(args.streams, args.many_streams)
    longest = max(args.tokens, args.cumulative_tokens) + 256
    common = ["--max-running-requests", str(widest), "--context-length", str(longest)]
    if args.tokens_per_s:  # of all streams: a step brings each of them one token
        common += ["--null-step-ms", str(1000 * args.streams / args.tokens_per_s)]
    common += shlex.split(args.serve_flags)
    yield [*common, "--incremental-streaming-output"], ("chat", "completions", "incremental", "many")
    yield common, ("cumulative",)
    fast = ["--max-running-requests", "1024", "--context-length", str(longest)]
    yield [*fast, *shlex.split(args.serve_flags)], ("one-token",)
    slow = ["--max-running-requests", "8", "--incremental-streaming-output"]
    slow += ["--null-step-ms", str(_BIG_STEP_MS), *shlex.split(args.serve_flags)]
    yield slow, ("big-prompt",)


@contextmanager
def _model_flags(args: argparse.Namespace, wanted: Sequence[str]) -> Iterator[list[str]]:
    """Which model the server shows; a big prompt needs a context that no built-in shape has."""
    flags = ["--load-format", "dummy"]
    if "big-prompt" not in wanted:
        tokenizer = ["--tokenizer-path", args.tokenizer_path] if args.tokenizer_path else []
        yield [*flags, "--model", args.model, *tokenizer]
        return
    source = resolve_source(args.model, load_format="dummy")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": load_model_config(source).vocab_size,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": _BIG_CONTEXT,
        "rms_norm_eps": 1e-5,
    }
    with tempfile.TemporaryDirectory(prefix="phalanx-front-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield [*flags, "--model", folder, "--tokenizer-path", args.tokenizer_path or "dummy"]


def _measure(name: str, args: argparse.Namespace, server: NullServer, sayings: Sayings) -> Figures:
    if name == "one-token":
        case = OneToken(args.requests, 128, sayings.expected(args.requests, 1), sayings.prompt(64))
        return one_token_of(case, server, args.timeout)
    if name == "big-prompt":
        prompt = sayings.prompt(int(args.prompt_mb * 1e6))
        return gap_of(BigPrompt(prompt, sayings.expected(1, 4096)[0], _ASKED_GAP_MS), server, args.timeout)
    count = args.many_streams if name == "many" else args.streams
    tokens = {"many": 16, "cumulative": args.cumulative_tokens}.get(name, args.tokens)
    kind = "chat" if name == "many" else name
    asked = {"many": None, "cumulative": 25_000.0}.get(name, 60_000.0)
    case = Streams(name, kind, sayings.expected(count, tokens), sayings.prompt(64), asked)
    return streams_of(case, server, args.timeout)


def _print(figures: Sequence[Figures]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("", "streams", "events", "per CPU s, steady", "per CPU s, all", "asked", "tokens per event")
    table = Table(*columns, "worker CPU", "engine CPU", title="phalanx bench front")
    for f in figures:
        table.add_row(
            f.name,
            str(f.num_streams),
            str(f.num_events),
            "-" if f.per_cpu_s_steady is None else f"{f.per_cpu_s_steady:,.0f}",
            f"{f.max_gap_ms:.1f} ms gap" if f.max_gap_ms is not None else f"{f.per_cpu_s:,.0f}",
            f.asked,
            f"{f.tokens_per_event:.2f}",
            f"{f.worker_share:.0%}",
            f"{f.engine_share:.0%}",
        )
    Console(width=140).print(table)
