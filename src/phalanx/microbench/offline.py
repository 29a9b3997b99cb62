"""Throughput of `LLM.generate`: ids in, ids out, no HTTP and no tokenizer.

Prompt and output lengths are uniform in 1..N, as `bench serving` draws them.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.config.cli import add_model_arguments
from phalanx.core.errors import ConfigError
from phalanx.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from phalanx.runtime.llm import LLM

_MOST_PROMPTS = 10**7  # beyond it is a slip of the finger, and so would be the memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phalanx bench offline`."""
    add_model_arguments(parser)
    parser.add_argument("--num-prompts", type=int, default=256, help="requests, all handed over at once")
    parser.add_argument("--random-input-len", type=int, default=32, help="prompts of 1..this many tokens")
    parser.add_argument("--random-output-len", type=int, default=128, help="outputs of 1..this many tokens")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, help="1.0: exactly the lengths")
    parser.add_argument("--seed", type=int, default=42, help="of prompts and lengths")
    parser.add_argument("--repeats", type=int, default=1, help="runs; the median is reported")


def check_workload(args: argparse.Namespace) -> None:
    """Raise ConfigError for numbers that no workload can have."""
    for name in ("num_prompts", "random_input_len", "random_output_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.num_prompts > _MOST_PROMPTS:
        raise ConfigError(f"--num-prompts must be at most {_MOST_PROMPTS}, got {args.num_prompts}")
    if not 0 <= args.random_range_ratio <= 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1], got {args.random_range_ratio}")
    if args.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {args.seed}")


def check_context(args: argparse.Namespace, context_length: int) -> None:
    """Raise ConfigError for lengths that pass the context."""
    output_len = args.random_output_len or 1
    if args.random_input_len + output_len > context_length:
        raise ConfigError(
            f"--random-input-len {args.random_input_len} and an output of {output_len} tokens pass the "
            f"context of {context_length}: lower one of them, or raise --context-length"
        )


def load(args: argparse.Namespace) -> LLM:
    """The model of a command line, without a tokenizer; what was settled and why goes to standard error."""
    from phalanx.runtime.llm import LLM, model_options
    from phalanx.runtime.process import start_up_log

    with start_up_log():
        return LLM(args.model, skip_tokenizer_init=True, progress=sys.stderr.isatty(), **model_options(args))


def draw_workload(
    num_prompts: int, input_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int
) -> tuple[list[np.ndarray], list[int]]:
    """Random prompts and output lengths.

    Lengths are uniform in [max(1, int(len * range_ratio)), len], inputs drawn before outputs.

    Returns:
        (prompts: int32 arrays of token ids, output lengths).
    """
    rng = np.random.default_rng(seed)
    low_in, low_out = max(1, int(input_len * range_ratio)), max(1, int(output_len * range_ratio))
    input_lens = rng.integers(low_in, input_len + 1, num_prompts)
    output_lens = rng.integers(low_out, output_len + 1, num_prompts)
    prompts = [rng.integers(0, vocab_size, n).astype(np.int32) for n in input_lens]
    return prompts, output_lens.tolist()


def measure(llm: Any, prompts: list[np.ndarray], output_lens: list[int], *, progress: bool) -> float:
    """Seconds that `llm` takes for the workload; every output runs to its length, greedily.

    Raises:
        RuntimeError: an output has another length than asked for.
    """
    params = [SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True) for n in output_lens]
    start = time.perf_counter()
    results = llm.generate(prompts, params, progress=progress)
    elapsed = time.perf_counter() - start
    got = [len(r.outputs[0].token_ids) for r in results]
    if got != output_lens:
        raise RuntimeError("an output has another length than asked for")
    return elapsed


def run(args: argparse.Namespace) -> int:
    """Run the workload and print a table, then one JSON line."""
    check_workload(args)
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {args.repeats}")
    from rich.console import Console
    from rich.table import Table

    from phalanx.runtime.models import settle_settings
    from phalanx.runtime.step_times import difference, summary_ms

    show = sys.stderr.isatty()
    check_context(args, settle_settings(args).scheduler.context_length)
    llm = load(args)
    prompts, output_lens = draw_workload(
        args.num_prompts,
        args.random_input_len,
        args.random_output_len,
        args.random_range_ratio,
        llm.settings.model.vocab_size,
        args.seed,
    )
    warm_up = min(64, len(prompts))
    measure(llm, prompts[:warm_up], [min(n, 8) for n in output_lens[:warm_up]], progress=False)
    before = llm.host_times()
    times = [measure(llm, prompts, output_lens, progress=show) for _ in range(args.repeats)]
    between = summary_ms(difference(llm.host_times(), before), "between_steps")
    elapsed = float(np.median(times))
    num_in, num_out = sum(map(len, prompts)), sum(output_lens)
    result = {
        "model": args.model,
        "dtype": llm.settings.engine.dtype,
        "device": llm.settings.engine.device,
        "num_prompts": len(prompts),
        "input_tokens": num_in,
        "output_tokens": num_out,
        "max_running_requests": llm.settings.scheduler.max_running_requests,
        "duration_s": round(elapsed, 3),
        "durations_s": [round(t, 3) for t in times],
        "request_throughput": round(len(prompts) / elapsed, 3),
        "output_throughput": round(num_out / elapsed, 1),
        "total_throughput": round((num_in + num_out) / elapsed, 1),
        "kv_indices_backend": llm.settings.engine.kv_indices_backend,
        "host_time_between_steps_ms": between,
    }
    table = Table("", "value", title="phalanx bench offline")
    for key, value in result.items():
        if key != "host_time_between_steps_ms":
            table.add_row(key, str(value))
    table.add_row("host time between decode steps, mean (ms)", _shown(between["mean"]))
    table.add_row("host time between decode steps, P99 (ms)", _shown(between["p99"]))
    Console().print(table)
    print(json.dumps(result))
    return 0


def _shown(milliseconds: float | None) -> str:
    return "n/a" if milliseconds is None else f"{milliseconds:.3f}"
