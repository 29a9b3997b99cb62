"""From wishes and hardware to settled facts: every "auto" is decided here, once, with its reason."""

from __future__ import annotations

import argparse
import math
from urllib.parse import urlsplit

from phalanx.config.groups import (
    PAGE_SIZES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ModelSource,
    SchedulerConfig,
    ServerConfig,
    Settings,
)
from phalanx.config.hardware import Hardware
from phalanx.config.resolve_engine import Log, settle_engine, settle_graphs
from phalanx.core.errors import ConfigError

# SGLang's rule for --max-running-requests without a flag ends between 2048 and 4096; on a CPU the GEMMs of
# a small model saturate well before (benchmarks/cpu_layers.py), so fewer rows keep inter-token times short.
_MAX_RUNNING = 4096
_MAX_RUNNING_SMALL = ((32, 1024), (60, 2048))  # on cards of less than so many GiB
_MAX_RUNNING_CPU = 256
# One worker writes 60,000 events in a second of a core; a second one halves the time in which a wide step
# reaches all its clients.
# qwen3-0.6b on 10 cores of an H200 host: 914 req/s with one worker, 2709 with four (docs/measured.md).
_CORES_PER_API_WORKER, _MAX_AUTO_API_WORKERS, _MAX_API_WORKERS = 4, 4, 64
_MAX_TABLE_BYTES = 16 * 2**30  # request-to-token tables beyond this are a mistake in the flags


def resolve(
    args: argparse.Namespace, hardware: Hardware, source: ModelSource, model: ModelConfig
) -> Settings:
    """Settle everything.

    Args:
        args: of `config.cli.build_parser` (or of add_model_arguments alone: server flags take defaults).
        hardware: of `config.hardware.detect`.
        source, model: where the model lies and its shape.

    Raises:
        ConfigError: a flag asks for what cannot be done.
    """
    log = Log()
    _refuse_unbuilt(args, log)
    engine = settle_engine(args, hardware, model, log)
    scheduler = _scheduler(args, hardware, engine, model, log)
    engine = settle_graphs(args, engine, scheduler, log)
    cache = _cache(args, engine, scheduler, log)
    return Settings(
        source=source,
        model=model,
        cache=cache,
        scheduler=scheduler,
        engine=engine,
        server=_server(args, hardware, source, log),
        choices=tuple(log.lines),
    )


def _refuse_unbuilt(args: argparse.Namespace, log: Log) -> None:
    for flag, name in (
        ("tp_size", "--tensor-parallel-size"),
        ("dp_size", "--data-parallel-size"),
        ("pp_size", "--pipeline-parallel-size"),
    ):
        size = getattr(args, flag)
        if size != 1:
            raise ConfigError(f"{name} {size} is not possible: this version runs on one device")
    if args.quantization not in (None, "none"):
        raise ConfigError(f"--quantization {args.quantization} is not built yet")
    if args.kv_cache_dtype not in ("auto",):
        raise ConfigError(f"--kv-cache-dtype {args.kv_cache_dtype} is not built yet: only auto")
    if args.schedule_policy != "fcfs":
        raise ConfigError(f"--schedule-policy {args.schedule_policy} is not built yet: only fcfs")
    if args.disable_radix_cache:
        log("--disable-radix-cache: so already, there is no prefix cache in this version")
    if args.trust_remote_code:
        log("--trust-remote-code: accepted, no code of a checkpoint is ever run")
    if getattr(args, "enable_metrics", False):
        log("--enable-metrics: accepted, /metrics is always there")
    if args.enable_mixed_chunk:
        log("--enable-mixed-chunk: so already, prompt chunks and decode rows share a step")


def _default_running(device: str, hardware: Hardware) -> tuple[int, str]:
    """Rows, and why so many. What rows take of a small card is missed by the KV pool (`engine.needs`)."""
    if device == "cpu":
        return _MAX_RUNNING_CPU, "default on cpu"
    if device == "cuda" and hardware.gpu_bytes:
        for gib, rows in _MAX_RUNNING_SMALL:
            if hardware.gpu_bytes < gib << 30:
                return rows, f"default on a GPU of less than {gib} GiB"
    return _MAX_RUNNING, f"default on {device}"


def _scheduler(
    args: argparse.Namespace, hardware: Hardware, engine: EngineConfig, model: ModelConfig, log: Log
) -> SchedulerConfig:
    context = args.context_length
    if context is None:
        context = model.max_position_embeddings
        if model.sliding_window is not None:
            context = min(context, model.sliding_window)
        log(f"context_length = {context} (what the model is made for)")
    if context < 2:
        raise ConfigError(f"--context-length must be at least 2, got {context}")
    if context > model.max_position_embeddings:
        raise ConfigError(
            f"--context-length {context} is beyond the model's {model.max_position_embeddings} positions"
        )
    if model.sliding_window is not None and context > model.sliding_window:
        raise ConfigError(
            f"--context-length {context} is beyond the sliding window of {model.sliding_window} tokens; "
            "windowed attention is not built yet"
        )
    running = args.max_running_requests
    if running is None:
        running, why = _default_running(engine.device, hardware)
        log(f"max_running_requests = {running} ({why})")
    if running < 1:
        raise ConfigError(f"--max-running-requests must be at least 1, got {running}")
    if running * context * 4 > _MAX_TABLE_BYTES:
        raise ConfigError(
            f"--max-running-requests {running} x --context-length {context} needs a request table of "
            f"{running * context * 4 / 2**30:.0f} GiB: lower one of them"
        )
    chunk = args.chunked_prefill_size
    if chunk is None:
        chunk = 512 if engine.device == "cpu" else 8192
        log(f"chunked_prefill_size = {chunk} (bounds the length of a step)")
    if chunk != -1 and chunk < 1:
        raise ConfigError(f"--chunked-prefill-size must be -1 (off) or at least 1, got {chunk}")
    if args.max_prefill_tokens < 1:
        raise ConfigError(f"--max-prefill-tokens must be at least 1, got {args.max_prefill_tokens}")
    if chunk > args.max_prefill_tokens:
        log(f"chunked_prefill_size = {args.max_prefill_tokens} (--max-prefill-tokens; {chunk} would be more)")
        chunk = args.max_prefill_tokens
    if args.max_queued_requests is not None and args.max_queued_requests < 1:
        raise ConfigError(f"--max-queued-requests must be at least 1, got {args.max_queued_requests}")
    return SchedulerConfig(
        max_running_requests=running,
        context_length=context,
        max_prefill_tokens=args.max_prefill_tokens,
        chunked_prefill_size=chunk,
        schedule_policy=args.schedule_policy,
        max_queued_requests=args.max_queued_requests,
    )


def _cache(
    args: argparse.Namespace, engine: EngineConfig, scheduler: SchedulerConfig, log: Log
) -> CacheConfig:
    page_size = args.page_size
    if page_size is None:
        page_size = 16
        log("page_size = 16 (fewer pages to account for; --page-size 1 wastes no slot)")
    if page_size not in PAGE_SIZES:
        raise ConfigError(f"--page-size must be a power of two up to {PAGE_SIZES[-1]}, got {page_size}")
    if args.max_total_tokens is not None and args.max_total_tokens < page_size:
        raise ConfigError(
            f"--max-total-tokens {args.max_total_tokens} holds not even one page of {page_size}"
        )
    fraction = args.mem_fraction_static
    if fraction is not None and engine.device == "null":
        raise ConfigError("--mem-fraction-static is not possible on null: no model takes memory there")
    if fraction is None:
        fraction = 0.5 if engine.device == "cpu" else 0.88
        if args.max_total_tokens is None and engine.device != "null":
            log(f"mem_fraction_static = {fraction} (default on {engine.device})")
    elif args.max_total_tokens is not None:
        log(
            f"--max-total-tokens {args.max_total_tokens} sets the size of the KV pool: "
            f"--mem-fraction-static {fraction:g} is not used"
        )
    if not 0 < fraction < 1:
        raise ConfigError(f"--mem-fraction-static must be between 0 and 1, got {fraction}")
    return CacheConfig(
        page_size=page_size,
        max_total_tokens=args.max_total_tokens,
        mem_fraction_static=fraction,
        dtype=engine.dtype,
    )


def _api_workers(args: argparse.Namespace, hardware: Hardware, log: Log) -> int:
    wanted: int | None = args.api_workers
    if wanted is None:
        wanted = min(max(hardware.num_cpus // _CORES_PER_API_WORKER, 1), _MAX_AUTO_API_WORKERS)
        log(f"api_workers = {wanted} ({hardware.num_cpus} cores, the engine needs some of them too)")
    if not 1 <= wanted <= _MAX_API_WORKERS:
        raise ConfigError(f"--api-workers must be in [1, {_MAX_API_WORKERS}], got {wanted}")
    return wanted


def _timeout(value: float, flag: str, low: float) -> float:
    if value != 0 and not low <= value < math.inf:  # NaN is in no range
        raise ConfigError(f"{flag} must be 0 or at least {low:g} seconds, got {value}")
    return value


def _origins(text: str) -> tuple[str, ...]:
    """`--cors-allow-origins`: "*", or scheme://host[:port] and more of them."""
    origins = tuple(origin.strip().rstrip("/") for origin in text.split(",") if origin.strip())
    if origins == ("*",):
        return origins
    for origin in origins:
        parts = urlsplit(origin)
        if not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}":
            raise ConfigError(f"--cors-allow-origins takes * or scheme://host[:port], got {origin!r}")
    return origins


def _server(args: argparse.Namespace, hardware: Hardware, source: ModelSource, log: Log) -> ServerConfig:
    if not hasattr(args, "host"):
        return ServerConfig(host="", port=0, served_model_name=source.name, chat_template=args.chat_template)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {args.port}")
    if args.api_key == "":
        raise ConfigError("--api-key must not be empty")
    if args.request_timeout is not None and not 0 < args.request_timeout < math.inf:
        raise ConfigError(f"--request-timeout must be a number above 0, got {args.request_timeout:g}")
    if args.stream_interval < 1:
        raise ConfigError(f"--stream-interval must be at least 1, got {args.stream_interval}")
    if args.skip_tokenizer_init and args.chat_template is not None:
        raise ConfigError(
            "--chat-template is not possible with --skip-tokenizer-init: a chat needs a tokenizer"
        )
    name = args.served_model_name
    if name is None:
        name = source.name
        log(f"served_model_name = {name} (as typed)")
    return ServerConfig(
        host=args.host,
        port=args.port,
        served_model_name=name,
        api_key=args.api_key,
        cors_allow_origins=_origins(args.cors_allow_origins),
        request_timeout_s=args.request_timeout,
        enable_cache_report=args.enable_cache_report,
        log_requests_level=args.log_requests_level if args.log_requests else None,
        log_requests_format=args.log_requests_format,
        api_workers=_api_workers(args, hardware, log),
        shutdown_timeout_s=_timeout(args.shutdown_timeout, "--shutdown-timeout", 0.0),
        watchdog_timeout_s=_timeout(args.watchdog_timeout, "--watchdog-timeout", 1.0),
        log_level=args.log_level,
        skip_tokenizer_init=args.skip_tokenizer_init,
        stream_interval=args.stream_interval,
        incremental_streaming_output=args.incremental_streaming_output,
        chat_template=args.chat_template,
    )
