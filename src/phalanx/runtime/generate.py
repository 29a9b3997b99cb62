"""Generate text in this process, without a server.

Prompts come from the command line, or one a line from a file ("-" is standard input).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.config.cli import add_model_arguments
from phalanx.core.errors import ConfigError
from phalanx.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from phalanx.runtime.outputs import Completion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phalanx generate`."""
    add_model_arguments(parser)
    parser.add_argument("prompts", nargs="*", help="prompts")
    parser.add_argument(
        "--file", metavar="FILE", help="prompts, one a line (blank ones are left out); - is standard input"
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user message")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, help="tokens to generate at most for a prompt"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    parser.add_argument("--top-k", type=int, default=-1, help="-1 is off")
    parser.add_argument("--stop", action="append", default=[], help="a stop string; may be given again")
    parser.add_argument("--seed", type=int, help="makes sampled text repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Generate and print, in the order of the prompts."""
    prompts = list(args.prompts)
    if args.file:
        lines = _read(args.file).replace("\r\n", "\n").split("\n")  # not splitlines: U+2028 ends no line
        prompts += [line for line in lines if line]
    if not prompts:
        raise ConfigError("no prompt: name some, or give --file")
    from phalanx.runtime.llm import LLM, model_options

    logging.basicConfig(level=logging.WARNING)
    llm = LLM(args.model, progress=sys.stderr.isatty(), **model_options(args))
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        stop=tuple(args.stop),
        sampling_seed=args.seed,
    )
    progress = sys.stderr.isatty()
    if args.chat:
        messages = [[{"role": "user", "content": p}] for p in prompts]
        results = llm.chat(messages, params, progress=progress)
    else:
        results = llm.generate(prompts, params, progress=progress)
    for prompt, result in zip(prompts, results, strict=True):
        completion = result.outputs[0]
        if args.json:
            reason = completion.finish_reason.kind
            print(json.dumps({"prompt": prompt, "text": completion.text, "finish_reason": reason}))
        else:
            if len(prompts) > 1:
                print(f"> {prompt}")
            print(completion.text)
    _say_what_was_cut([result.outputs[0] for result in results], args.max_new_tokens)
    return 0


def _say_what_was_cut(completions: list[Completion], max_new_tokens: int) -> None:
    """Tell on stderr, so that nobody takes text that ends at a limit for all there was to say."""
    cut = [c for c in completions if c.finish_reason.kind == "length"]
    full = sum(len(c.token_ids) < max_new_tokens for c in cut)
    if len(cut) > full:
        note = f"stopped at --max-new-tokens {max_new_tokens}; a higher one lets it go on"
        print(f"phalanx: {len(cut) - full} of {len(completions)} texts {note}", file=sys.stderr)
    if full:
        print(f"phalanx: {full} of {len(completions)} texts filled the context", file=sys.stderr)


def _read(path: str) -> str:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: byte {error.start} is not UTF-8") from error
