"""What can never run, said before it waits."""

from __future__ import annotations

from phalanx.config.groups import SchedulerConfig
from phalanx.core.errors import ConfigError, RequestError
from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import MAX_STOP_TOKEN_IDS
from phalanx.scheduler.pages import RowPages
from phalanx.scheduler.queue import Waiting
from phalanx.scheduler.records import pack


def check_config(config: SchedulerConfig, num_pages: int, page_size: int) -> None:
    """Raise ConfigError for a setting that cannot work."""
    if config.schedule_policy != "fcfs":
        raise ConfigError(f"schedule policy {config.schedule_policy!r} is not supported, only 'fcfs' is")
    if config.chunked_prefill_size < 1 and config.chunked_prefill_size != -1:
        raise ConfigError(f"chunked_prefill_size must be -1 or positive, got {config.chunked_prefill_size}")
    for name, value, low in (
        ("max_running_requests", config.max_running_requests, 1),
        ("context_length", config.context_length, 2),
        ("max_prefill_tokens", config.max_prefill_tokens, 1),
        ("grant_tokens", config.grant_tokens, 1),
        ("page_size", page_size, 1),
        ("num_pages", num_pages, 2),
    ):
        if value < low:
            raise ConfigError(f"{name} must be at least {low}, got {value}")


def check_request(request: EngineRequest, context_length: int, pages: RowPages) -> Waiting:
    """A request as it waits, its output bound cut to the context.

    Raises:
        RequestError: 400, it can never run; the message names both numbers.
    """
    prompt_len = len(request.input_ids)
    if prompt_len < 1:
        raise RequestError("the prompt is empty: it has 0 tokens, at least 1 is needed")
    if prompt_len >= context_length:
        raise RequestError(
            f"the prompt has {prompt_len} tokens; the context length of {context_length} leaves no room for "
            "output",
            code="context_length_exceeded",
        )
    if request.max_new_tokens < 0:
        raise RequestError(
            f"max_new_tokens must be at least 0, got {request.max_new_tokens}", param="max_new_tokens"
        )
    if len(request.stop_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"{len(request.stop_ids)} stop token ids, at most {MAX_STOP_TOKEN_IDS} are possible",
            param="stop_token_ids",
        )
    max_new_tokens = min(request.max_new_tokens, context_length - prompt_len)
    # The last token is never run through the model, so it needs no room.
    num_tokens = prompt_len + max(max_new_tokens - 1, 0)
    num_pages = pages.pages_for(num_tokens)
    total = pages.allocator.num_usable
    if num_pages > total:
        raise RequestError(
            f"a prompt of {prompt_len} tokens with max_new_tokens {max_new_tokens} takes {num_tokens} tokens "
            f"of KV cache, which has room for {total * pages.page_size}",
            code="kv_cache_exceeded",
        )
    return Waiting(request, prompt_len, num_pages, pack(request, max_new_tokens, num_pages))
