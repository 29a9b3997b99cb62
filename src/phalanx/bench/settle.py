"""The command line's options checked against each other, and the defaults that depend on others."""

from __future__ import annotations

import argparse
import math
from typing import Any

import orjson

from phalanx.bench.backends import BACKENDS, Flavor
from phalanx.bench.errors import BenchError

_RANDOM = ("random", "random-ids")
_CONVERSATIONS = ("sharegpt", "custom")
_GSP = ("generated-shared-prefix",)
# option (argparse dest) -> (datasets that use it, its default there)
DATASET_OPTIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    "dataset_path": (("random", *_CONVERSATIONS), ""),
    "num_prompts": ((*_RANDOM, *_CONVERSATIONS), 1000),
    "random_input_len": (_RANDOM, 1024),
    "random_output_len": (_RANDOM, 1024),
    "random_range_ratio": (_RANDOM, 0.0),
    "vllm_random_range": (_RANDOM, False),
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


def check_arguments(args: argparse.Namespace) -> None:
    """Check the options against each other and fill in the dependent defaults, in place.

    Raises:
        BenchError: exit code 2, naming the option.
    """
    _check_text(args)
    _settle_dataset_options(args)
    backend = BACKENDS[args.backend]
    if args.port is None:
        args.port = backend.default_port
    args.extra_request_body = _json_object(args.extra_request_body)
    _check_extra_body(args.extra_request_body)
    names = [name for name, _ in args.goodput or ()]
    _require(len(set(names)) == len(names), f"--goodput: a target is given twice: {' '.join(names)}")
    args.goodput = dict(args.goodput or ())
    args.client_processes = args.client_processes or "auto"
    _settle_rate(args)
    _check_sampling(args)
    _settle_logprobs(args)
    _settle_profile(args)
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


def _check_text(args: argparse.Namespace) -> None:
    """Refuse bytes that are no UTF-8: the result could not be written as JSON."""
    for dest, value in vars(args).items():
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise BenchError(f"--{dest.replace('_', '-')} is not UTF-8", exit_code=2) from None


def _settle_dataset_options(args: argparse.Namespace) -> None:
    """Refuse options that the dataset would ignore, then put its defaults in place of None."""
    asked_prompts = args.num_prompts
    if args.dataset_name in _GSP:
        args.num_prompts = None
    for dest, (datasets, default) in DATASET_OPTIONS.items():
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


def _settle_rate(args: argparse.Namespace) -> None:
    ramp_rates = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        _require(
            ramp_rates == (None, None), "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy"
        )
    else:
        _require(args.request_rate is None, "--ramp-up-strategy takes the place of --request-rate: give one")
        _require(
            None not in ramp_rates and all(0 < rate < math.inf for rate in ramp_rates),
            "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0",
        )
    paced = args.ramp_up_strategy is not None or (args.request_rate or math.inf) < math.inf
    _require(
        args.burstiness is None or paced, "--burstiness has no meaning when all requests are sent at once"
    )
    if args.request_rate is None:
        args.request_rate = math.inf
    if args.burstiness is None:
        args.burstiness = 1.0
    _require(0 < args.burstiness < math.inf, "--burstiness must be above 0")


def _check_sampling(args: argparse.Namespace) -> None:
    for dest in ("top_k", "min_p", "repetition_penalty"):
        _require(
            getattr(args, dest) is None or BACKENDS[args.backend].extensions,
            f"--{dest.replace('_', '-')}: backend {args.backend} sends only OpenAI's own fields",
        )
    _require(
        args.top_k is None or args.top_k == -1 or args.top_k >= 1, "--top-k must be -1 (off) or at least 1"
    )
    _require(args.min_p is None or 0.0 <= args.min_p <= 1.0, "--min-p must lie in [0, 1]")
    for dest in ("frequency_penalty", "presence_penalty"):
        value = getattr(args, dest)
        _require(value is None or -2.0 <= value <= 2.0, f"--{dest.replace('_', '-')} must lie in [-2, 2]")
    value = args.repetition_penalty
    _require(value is None or 0.0 < value <= 2.0, "--repetition-penalty must lie in (0, 2]")


def _settle_logprobs(args: argparse.Namespace) -> None:
    native = BACKENDS[args.backend].flavor is Flavor.NATIVE
    _require(native or not args.return_logprob, f"--return-logprob: backend {args.backend} has no such field")
    for dest, default, least in (("top_logprobs_num", 0, 0), ("logprob_start_len", -1, -1)):
        option = f"--{dest.replace('_', '-')}"
        if getattr(args, dest) is None:
            setattr(args, dest, default)
        else:
            _require(args.return_logprob, f"{option} needs --return-logprob")
        _require(getattr(args, dest) >= least, f"{option} must be at least {least}")


def _settle_profile(args: argparse.Namespace) -> None:
    """SGLang's server takes the details of a profile; vLLM's has them in its own environment."""
    backend = BACKENDS[args.backend]
    details = ("activities", "num_steps", "by_stage", "output_dir", "prefix")
    _require(not args.profile or backend.can_profile, f"--profile: backend {args.backend} has no such route")
    for detail in details:
        if getattr(args, f"profile_{detail}") is not None:
            option = f"--profile-{detail.replace('_', '-')}"
            _require(args.profile, f"{option} needs --profile")
            _require(backend.has_server_info, f"{option}: backend {args.backend} takes no such field")
    _require(
        args.profile_num_steps is None or args.profile_num_steps >= 1, "--profile-num-steps must be 1 or more"
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
    _require(
        not (args.vllm_random_range and args.random_range_ratio >= 1.0),
        "--random-range-ratio must be below 1 with --vllm-random-range",
    )
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


def _check_extra_body(body: dict[str, Any]) -> None:
    """Refuse fields that would change the shape of the answers behind the client's back."""
    _require("stream" not in body, "--extra-request-body: stream is --disable-stream's")
    sampling = body.get("sampling_params")
    for fields in (body, sampling if isinstance(sampling, dict) else {}):
        for name in ("n", "best_of"):
            _require(
                fields.get(name) in (None, 1),
                f"--extra-request-body: {name} must be 1, since a request's figures are those of one answer",
            )


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BenchError(f"--extra-request-body is not JSON: {error}", exit_code=2) from None
    _require(isinstance(value, dict), "--extra-request-body must be a JSON object")
    return value
