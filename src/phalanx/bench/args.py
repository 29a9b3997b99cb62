"""The command line: SGLang's `bench_serving` options, as far as they are built here.

An option that is not built is not defined, so argparse refuses it (exit 2); an option that the chosen dataset
or backend would ignore is refused by `check_arguments`. Defaults that depend on another choice are None until
then.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from phalanx.bench.backends import BACKENDS
from phalanx.bench.errors import BenchError

DATASETS = ("random", "random-ids", "custom", "sharegpt", "generated-shared-prefix")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

_RANDOM = ("random", "random-ids")
_CONVERSATIONS = ("sharegpt", "custom")
_GSP = ("generated-shared-prefix",)
# option (argparse dest) -> (datasets that use it, its default there)
_DATASET_OPTIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    "dataset_path": (("random", *_CONVERSATIONS), ""),
    "num_prompts": ((*_RANDOM, *_CONVERSATIONS), 1000),
    "random_input_len": (_RANDOM, 1024),
    "random_output_len": (_RANDOM, 1024),
    "random_range_ratio": (_RANDOM, 0.0),
    "sharegpt_output_len": (_CONVERSATIONS, None),
    "sharegpt_context_len": (_CONVERSATIONS, None),
    "apply_chat_template": (_CONVERSATIONS, False),
    "tokenize_prompt": ((*_RANDOM, *_GSP), False),
    "gsp_num_groups": (_GSP, 64),
    "gsp_prompts_per_group": (_GSP, 16),
    "gsp_system_prompt_len": (_GSP, 2048),
    "gsp_question_len": (_GSP, 128),
    "gsp_output_len": (_GSP, 256),
    "gsp_range_ratio": (_GSP, 1.0),
    "gsp_ordered": (_GSP, False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of `bench serving` to `parser`. Call `check_arguments` on what it parses."""
    _add_target(parser.add_argument_group("target"))
    _add_data(parser.add_argument_group("data"))
    _add_load(parser.add_argument_group("load and requests"))
    _add_output(parser.add_argument_group("output"))


def check_arguments(args: argparse.Namespace) -> None:
    """Check the options against each other and fill in the dependent defaults, in place.

    Raises:
        BenchError: exit code 2, naming the option.
    """
    _settle_dataset_options(args)
    backend = BACKENDS[args.backend]
    if args.port is None:
        args.port = backend.default_port
    args.extra_request_body = _json_object(args.extra_request_body)
    args.goodput = dict(args.goodput or ())
    _check_numbers(args)
    _require(
        not (args.dataset_name in _CONVERSATIONS and not args.dataset_path),
        f"--dataset-name {args.dataset_name} needs --dataset-path: nothing is ever downloaded "
        "(--dataset-name random needs no file)",
    )
    _require(
        not (args.tokenize_prompt and not backend.accepts_token_ids),
        f"--tokenize-prompt: backend {args.backend} takes text only",
    )
    _require(
        not (args.apply_chat_template and backend.is_chat),
        f"--apply-chat-template: with backend {args.backend} the server applies the template itself",
    )
    _require(
        not (args.flush_cache and backend.flush_path is None),
        f"--flush-cache: backend {args.backend} has no such route",
    )
    _require(
        not (args.disable_stream and set(args.goodput) - {"e2el"}),
        "--goodput ttft and tpot cannot be measured with --disable-stream",
    )


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
    add("--header", nargs="+", metavar="KEY=VALUE", type=_header, help="extra HTTP headers")


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, default="sharegpt", help="default: %(default)s")
    add("--dataset-path", help="a local file: ShareGPT JSON (random, sharegpt) or JSONL (custom)")
    add("--num-prompts", type=int, help="default: 1000")
    add("--random-input-len", type=int, help="longest prompt in tokens (default: 1024)")
    add("--random-output-len", type=int, help="longest output in tokens (default: 1024)")
    add("--random-range-ratio", type=float, help="shortest = ratio x longest, at least 1 (default: 0.0)")
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
    add("--request-rate", type=float, default=math.inf, help="requests/s, Poisson arrivals (default: inf)")
    add("--max-concurrency", type=int, help="most requests in flight (default: no limit)")
    add("--disable-stream", action="store_true", help="ask for whole answers: only E2E latency is measured")
    add("--disable-ignore-eos", action="store_true", help="let answers end at the model's EOS")
    add("--temperature", type=float, default=0.0, help="default: %(default)s")
    add("--top-p", type=float, default=1.0, help="default: %(default)s")
    add("--extra-request-body", metavar="JSON", help="object merged into every request body")
    add("--warmup-requests", type=int, default=1, help="copies of request 0, 32 tokens at most (default: 1)")
    add("--flush-cache", action="store_true", help="empty the server's prefix cache after the warm-up")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output-file", help="JSONL file to append to; default: {backend}_{MMDD}_{num_prompts}_...jsonl")
    add("--output-details", action="store_true", help="add per-request lists to the JSON line")
    add("--goodput", nargs="+", metavar="KEY:MS", type=_slo, help="SLOs; KEY in ttft, tpot, e2el")
    add(
        "--disable-tqdm",
        action="store_true",
        help="no progress line (also off when stderr is not a terminal)",
    )
    add("--cache-report", action="store_true", help="print how many prompt tokens came from the prefix cache")
    add("--tag", help="free text copied into the JSON line")


def _settle_dataset_options(args: argparse.Namespace) -> None:
    """Refuse options that the dataset would ignore, then put its defaults in place of None."""
    asked_prompts = args.num_prompts
    if args.dataset_name in _GSP:
        args.num_prompts = None
    for dest, (datasets, default) in _DATASET_OPTIONS.items():
        if getattr(args, dest) is None:
            setattr(args, dest, default)
        else:
            option = "--" + dest.replace("_", "-")
            _require(
                args.dataset_name in datasets, f"{option} has no meaning for dataset {args.dataset_name}"
            )
    if args.dataset_name in _GSP:
        args.num_prompts = args.gsp_num_groups * args.gsp_prompts_per_group
        _require(
            asked_prompts in (None, args.num_prompts),
            f"--num-prompts {asked_prompts}: groups x prompts per group is {args.num_prompts}",
        )


def _check_numbers(args: argparse.Namespace) -> None:
    at_least_one = (
        "num_prompts random_input_len random_output_len gsp_num_groups gsp_prompts_per_group "
        "gsp_system_prompt_len gsp_question_len gsp_output_len"
    )
    for dest in at_least_one.split():
        _require(getattr(args, dest) >= 1, f"--{dest.replace('_', '-')} must be at least 1")
    for dest, least in (("max_concurrency", 1), ("sharegpt_output_len", 4), ("sharegpt_context_len", 4)):
        value = getattr(args, dest)
        _require(value is None or value >= least, f"--{dest.replace('_', '-')} must be at least {least}")
    for dest in ("random_range_ratio", "gsp_range_ratio"):
        _require(0.0 <= getattr(args, dest) <= 1.0, f"--{dest.replace('_', '-')} must lie in [0, 1]")
    _require(args.request_rate > 0, "--request-rate must be above 0")
    _require(args.warmup_requests >= 0, "--warmup-requests must be 0 or more")
    _require(0 <= args.ready_check_timeout_sec < math.inf, "--ready-check-timeout-sec must be 0 or more")
    _require(0 <= args.temperature < math.inf, "--temperature must be 0 or more")
    _require(0.0 < args.top_p <= 1.0, "--top-p must lie in (0, 1]")
    _require(0 <= args.seed < 2**32, "--seed must lie in [0, 2**32)")
    _require(0 < args.port < 65536, "--port must lie in [1, 65535]")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BenchError(message, exit_code=2)


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchError(f"--extra-request-body is not JSON: {error}", exit_code=2) from None
    _require(isinstance(value, dict), "--extra-request-body must be a JSON object")
    return value


def _header(pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key or any(c in pair for c in "\r\n") or not key.isascii() or ":" in key:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {pair!r}")
    if key.lower() in ("content-length", "transfer-encoding", "connection"):
        raise argparse.ArgumentTypeError(f"{key} is the client's own")
    return key, value


def _slo(pair: str) -> tuple[str, float]:
    key, _, text = pair.partition(":")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if key not in GOODPUT_METRICS or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected KEY:MS with KEY in {GOODPUT_METRICS}, got {pair!r}")
    return key, value
