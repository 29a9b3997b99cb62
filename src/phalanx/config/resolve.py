"""From wishes and hardware to settled facts: every "auto" is decided here, once, with its reason."""

from __future__ import annotations

import argparse

from phalanx.config.groups import (
    PAGE_SIZES,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ModelSource,
    SchedulerConfig,
    Settings,
)
from phalanx.config.hardware import Hardware
from phalanx.config.resolve_engine import Log, settle_engine, settle_graphs
from phalanx.config.resolve_server import settle_server
from phalanx.core.errors import ConfigError

# SGLang's rule for --max-running-requests without a flag ends between 2048 and 4096; on a CPU the GEMMs of
# a small model saturate well before (benchmarks/cpu_layers.py), so fewer rows keep inter-token times short.
_MAX_RUNNING = 4096
_MAX_RUNNING_SMALL = ((14, 256), (32, 1024), (60, 2048))  # on cards of less than so many GiB
_MAX_RUNNING_CPU = 256
# Beyond these the flags are a mistake: bytes of request-to-token tables, rows, pages of a pool on paper.
_MAX_TABLE_BYTES, _MAX_ROWS, _MAX_PAGES = 16 * 2**30, 2**20, 2**30


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
    _refuse_no_text(args, source)
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
        server=settle_server(args, hardware, source, log),
        choices=tuple(log.lines),
    )


def _refuse_no_text(args: argparse.Namespace, source: ModelSource) -> None:
    """Bytes that are no UTF-8, which Python lets through as lone surrogates: JSON and clients cannot."""
    flags = {f"--{dest.replace('_', '-')}": value for dest, value in vars(args).items() if dest != "api_key"}
    paths = {"the model's path": source.path, "the tokenizer's path": source.tokenizer_path}
    for name, value in (flags | paths).items():
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            raise ConfigError(f"{name} is no valid text (UTF-8): {value!a}")


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
    if running > _MAX_ROWS:
        raise ConfigError(f"--max-running-requests must be at most {_MAX_ROWS}, got {running}")
    if running * context * 4 > _MAX_TABLE_BYTES:
        raise ConfigError(
            f"--max-running-requests {running} x --context-length {context} needs a request table of "
            f"{running * context * 4 // 2**30} GiB: lower one of them"
        )
    chunk = args.chunked_prefill_size
    if chunk is None:
        chunk = 512 if engine.device == "cpu" else 8192
        log(f"chunked_prefill_size = {chunk} (bounds the length of a step)")
    if chunk != -1 and chunk < 1:
        raise ConfigError(f"--chunked-prefill-size must be -1 (off) or at least 1, got {chunk}")
    if chunk == -1 and engine.device == "cpu":
        log(
            f"chunked_prefill_size = -1 (off): a step may take {args.max_prefill_tokens} prompt tokens, "
            "which is many seconds on a CPU, and no running request goes on meanwhile"
        )
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
    tokens = args.max_total_tokens
    if tokens is None and engine.device == "null":
        tokens = scheduler.max_running_requests * scheduler.context_length
    if tokens is not None and tokens // page_size >= _MAX_PAGES:
        what = "the KV pool" if args.max_total_tokens is None else f"--max-total-tokens {tokens}"
        raise ConfigError(f"{what} makes {tokens // page_size} pages; there may be {_MAX_PAGES - 1}")
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
