"""The command line: SGLang's `bench_serving` options, as far as they are built here, and a few of vLLM's.

An option that is not built is not defined, so argparse refuses it (exit 2); `settle.check_arguments` refuses
an option that the rest of the command line would ignore. Defaults that depend on another choice are None
until then.
"""

from __future__ import annotations

import argparse
import math

from phalanx.bench.backends import BACKENDS

DATASETS = ("random", "random-ids", "custom", "sharegpt", "generated-shared-prefix")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
RAMPS = ("linear", "exponential")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of `bench serving` to `parser`. Call `settle.check_arguments` on what it parses."""
    _add_target(parser.add_argument_group("target"))
    _add_data(parser.add_argument_group("data"))
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    _add_around(parser.add_argument_group("before and after the run"))
    _add_output(parser.add_argument_group("output"))


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--backend", choices=list(BACKENDS), default="sglang", help="API to speak (default: %(default)s)")
    add("--base-url", help="server URL, e.g. http://10.0.0.1:30000; replaces --host and --port")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=int, help="default: 30000 for sglang*, 8000 for the others")
    add("--ready-check-timeout-sec", type=float, default=60.0, help="wait for /v1/models; 0 skips the check")
    add("--model", help="model name or folder; default: the first of /v1/models")
    add("--served-model-name", help="name to send in requests when it differs from --model")
    add("--tokenizer", help="tokenizer name, folder or file; default: --model")
    add("--header", action="extend", nargs="+", metavar="KEY=VALUE", type=_header, help="extra HTTP headers")


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, default="sharegpt", help="default: %(default)s")
    add("--dataset-path", help="a local file of conversations: a JSON array, as ShareGPT's, or JSONL")
    add("--num-prompts", type=int, help="default: 1000")
    add("--random-input-len", type=int, help="longest prompt in tokens (default: 1024)")
    add("--random-output-len", type=int, help="longest output in tokens (default: 1024)")
    add("--random-range-ratio", type=float, help="shortest = ratio x longest, at least 1 (default: 0.0)")
    add(
        "--vllm-random-range",
        action="store_const",
        const=True,
        help="read --random-range-ratio as vLLM does: lengths in [len x (1 - ratio), len x (1 + ratio)]",
    )
    add("--sharegpt-output-len", type=int, help="output tokens of every request, at least 4")
    add("--sharegpt-context-len", type=int, help="drop conversations longer than this many tokens")
    add("--apply-chat-template", action="store_const", const=True, help="wrap prompts in the chat template")
    add("--tokenize-prompt", action="store_const", const=True, help="send token ids: exact lengths")
    add("--seed", type=int, default=42, help="default: %(default)s")
    add("--gsp-num-groups", type=int, help="shared prefixes (default: 64)")
    add("--gsp-prompts-per-group", type=int, help="default: 16")
    add("--gsp-system-prompt-len", type=int, help="tokens of each shared prefix (default: 2048)")
    add("--gsp-question-len", type=int, help="tokens of each question (default: 128)")
    add("--gsp-output-len", type=int, help="default: 256")
    add("--gsp-range-ratio", type=float, help="as --random-range-ratio (default: 1.0)")
    add("--gsp-ordered", action="store_const", const=True, help="keep groups together: no shuffle")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--request-rate", type=float, help="requests/s, Poisson arrivals (default: inf, all at once)")
    add("--burstiness", type=float, help="gamma arrivals: below 1 bursty, above 1 even (default: 1, Poisson)")
    add(
        "--ramp-up-strategy", choices=RAMPS, help="let the rate rise over the run, in place of --request-rate"
    )
    add("--ramp-up-start-rps", type=float, help="requests/s at the first request")
    add("--ramp-up-end-rps", type=float, help="requests/s at the last request")
    add("--max-concurrency", type=int, help="most requests in flight (default: no limit)")
    add(
        "--client-processes",
        type=_processes,
        metavar="N|auto",
        help="processes that send; auto (default): one per 1024 in flight, half of the cores at most",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--disable-stream", action="store_true", help="ask for whole answers: only E2E latency is measured")
    add("--disable-ignore-eos", action="store_true", help="let answers end at the model's EOS")
    add("--temperature", type=float, default=0.0, help="default: %(default)s")
    add("--top-p", type=float, default=1.0, help="default: %(default)s")
    add("--top-k", type=int, help="the server's default if not given; so are the next ones")
    add("--min-p", type=float)
    add("--frequency-penalty", type=float)
    add("--presence-penalty", type=float)
    add("--repetition-penalty", type=float)
    add("--return-logprob", action="store_true", help="ask for log-probabilities (backend sglang)")
    add("--top-logprobs-num", type=int, help="with --return-logprob (default: 0)")
    add("--logprob-start-len", type=int, help="with --return-logprob (default: -1, output only)")
    add("--extra-request-body", metavar="JSON", help="object merged into every request body")


def _add_around(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--warmup-requests", type=int, default=1, help="copies of request 0, 32 tokens at most (default: 1)")
    add("--flush-cache", action="store_true", help="empty the server's prefix cache after the warm-up")
    add(
        "--server-metrics",
        action="store_true",
        help="note running and queued requests of /metrics each second",
    )
    add("--profile", action="store_true", help="POST /start_profile before the load, /stop_profile after it")
    add(
        "--profile-activities",
        nargs="+",
        choices=("CPU", "GPU", "CUDA_PROFILER", "MEM"),
        help="default: CPU GPU",
    )
    add("--profile-num-steps", type=int, help="let the server stop after so many steps")
    add("--profile-by-stage", action="store_const", const=True, help="prefill and decode apart")
    add("--profile-output-dir", help="a folder on the server; a folder named by the time is made in it")
    add("--profile-prefix", help="prefix of the trace's file names")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output-file", help="JSONL file to append to; default: {backend}_{MMDD}_{num_prompts}_...jsonl")
    add("--output-details", action="store_true", help="add per-request lists to the JSON line")
    add(
        "--goodput",
        action="extend",
        nargs="+",
        metavar="KEY:MS",
        type=slo,
        help="SLOs; KEY in ttft, tpot, e2el",
    )
    add(
        "--disable-tqdm",
        action="store_true",
        help="no progress line (also off when stderr is not a terminal)",
    )
    add("--cache-report", action="store_true", help="print how many prompt tokens came from the prefix cache")
    add("--plot", action="store_true", help="a small plot of the run in the terminal, above the JSON line")
    add("--tag", help="free text copied into the JSON line")


def _processes(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= 256:
        raise argparse.ArgumentTypeError(f"expected auto or a number from 1 to 256, got {text!r}")
    return count


def _header(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key or any(c in pair for c in "\r\n") or not key.isascii() or ":" in key:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {pair!r}")
    if key.lower() in ("content-length", "transfer-encoding", "connection"):
        raise argparse.ArgumentTypeError(f"{key} is the client's own")
    return key, value


def slo(pair: str) -> tuple[str, float]:
    """Parse KEY:MS of --goodput."""
    key, _, text = pair.partition(":")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if key not in GOODPUT_METRICS or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected KEY:MS with KEY in {GOODPUT_METRICS}, got {pair!r}")
    return key, value
