"""The HTTP side's part of `resolve`: workers, timeouts, keys, names."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from phalanx.config.groups import ModelSource, ServerConfig
from phalanx.config.hardware import Hardware
from phalanx.config.resolve_engine import Log
from phalanx.core.errors import ConfigError

# One worker writes 60,000 events in a second of a core; a second one halves the time in which a wide step
# reaches all its clients.
# qwen3-0.6b on 10 cores of an H200 host: 914 req/s with one worker, 2709 with four (docs/measured.md).
_CORES_PER_API_WORKER, _MAX_AUTO_API_WORKERS, _MAX_API_WORKERS = 4, 4, 64
_MAX_TIMEOUT_S = 366 * 86400.0  # the system's timers do not take every number
_LOG_REQUESTS_LEVEL, _LOG_REQUESTS_FORMAT = 2, "text"


def _api_workers(args: argparse.Namespace, hardware: Hardware, log: Log) -> int:
    wanted: int | None = args.api_workers
    if wanted is None:
        wanted = min(max(hardware.num_cpus // _CORES_PER_API_WORKER, 1), _MAX_AUTO_API_WORKERS)
        log(f"api_workers = {wanted} ({hardware.num_cpus} cores, the engine needs some of them too)")
    if not 1 <= wanted <= _MAX_API_WORKERS:
        raise ConfigError(f"--api-workers must be in [1, {_MAX_API_WORKERS}], got {wanted}")
    return wanted


def _timeout(value: float, flag: str, low: float) -> float:
    if value != 0 and not low <= value <= _MAX_TIMEOUT_S:  # NaN is in no range
        raise ConfigError(f"{flag} must be 0 or {low:g} to {_MAX_TIMEOUT_S:.0f} seconds, got {value:g}")
    return value


def _api_key(args: argparse.Namespace) -> str | None:
    """The key, if a client can send it in a header."""
    key: str | None = args.api_key
    if key is None:
        return None
    if not key:
        raise ConfigError(f"{args.api_key_origin} must not be empty")
    if key != key.strip() or not key.replace(" ", "a").isprintable():
        raise ConfigError(
            f"{args.api_key_origin} begins or ends with white space, or holds a line's end or another "
            "character that cannot be printed: no client can send such a key"
        )
    return key


def _log_requests(args: argparse.Namespace, log: Log) -> tuple[int | None, str]:
    """(level, or None for no log; format) of the request log."""
    level, form = args.log_requests_level, args.log_requests_format
    for flag, value in (("level", level), ("format", form)):
        if value is not None and not args.log_requests:
            log(f"--log-requests-{flag} {value}: not used without --log-requests")
    level = _LOG_REQUESTS_LEVEL if level is None else level
    return level if args.log_requests else None, form or _LOG_REQUESTS_FORMAT


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


def settle_server(
    args: argparse.Namespace, hardware: Hardware, source: ModelSource, log: Log
) -> ServerConfig:
    """The HTTP side; defaults where the command has none of its flags. Raises ConfigError."""
    if not hasattr(args, "host"):
        return ServerConfig(host="", port=0, served_model_name=source.name, chat_template=args.chat_template)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {args.port}")
    if args.request_timeout is not None and not 0 < args.request_timeout <= _MAX_TIMEOUT_S:
        raise ConfigError(
            f"--request-timeout must be above 0 and at most {_MAX_TIMEOUT_S:.0f} seconds, "
            f"got {args.request_timeout:g}"
        )
    if args.stream_interval < 1:
        raise ConfigError(f"--stream-interval must be at least 1, got {args.stream_interval}")
    if args.skip_tokenizer_init and args.chat_template is not None:
        raise ConfigError(
            "--chat-template is not possible with --skip-tokenizer-init: a chat needs a tokenizer"
        )
    if args.skip_tokenizer_init and args.tokenizer_path is not None:
        log(f"--tokenizer-path {args.tokenizer_path}: not used with --skip-tokenizer-init")
    log_level, log_format = _log_requests(args, log)
    name = args.served_model_name
    if name is None:
        name = source.name
        log(f"served_model_name = {name} (as typed)")
    return ServerConfig(
        host=args.host,
        port=args.port,
        served_model_name=name,
        api_key=_api_key(args),
        cors_allow_origins=_origins(args.cors_allow_origins),
        request_timeout_s=args.request_timeout,
        enable_cache_report=args.enable_cache_report,
        log_requests_level=log_level,
        log_requests_format=log_format,
        api_workers=_api_workers(args, hardware, log),
        shutdown_timeout_s=_timeout(args.shutdown_timeout, "--shutdown-timeout", 0.0),
        watchdog_timeout_s=_timeout(args.watchdog_timeout, "--watchdog-timeout", 1.0),
        log_level=args.log_level,
        skip_tokenizer_init=args.skip_tokenizer_init,
        stream_interval=args.stream_interval,
        incremental_streaming_output=args.incremental_streaming_output,
        chat_template=args.chat_template,
    )
