"""How many KV pages fit."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from phalanx.config.groups import ModelConfig, Settings
from phalanx.core.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken: free GPU memory, or free RAM within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), _cgroup_available(Path("/sys/fs/cgroup")))


def _cgroup_available(root: Path) -> int:
    """What cgroup v2 leaves to this container; a huge number where it sets no limit."""
    unlimited = 1 << 62
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return unlimited
    if limit == "max":
        return unlimited
    # Cached file pages count as used, but the kernel drops them when memory is asked for.
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def check_memory(settings: Settings, available: int) -> None:
    """Raise ConfigError if weights alone leave no room for a page, before they are loaded.

    available: bytes, before the weights are loaded.
    """
    cache = settings.cache
    share = 1.0 if cache.max_total_tokens is not None else cache.mem_fraction_static
    needed = weight_bytes(settings.model, DTYPES[settings.engine.dtype].itemsize)
    if needed >= share * available:
        where = f"{_gib(available)} are available"
        if share < 1:
            where += f", of which --mem-fraction-static leaves {share:g} to weights and pool"
        raise ConfigError(
            f"no memory is left for the KV pool: the weights of {settings.source.name} take {_gib(needed)} "
            f"in {settings.engine.dtype}, and {where}"
        )


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of a model's weights; of a tied embedding once. Biases and the norms of heads are left out."""
    attention = config.hidden_size * 2 * (config.q_size + config.kv_size)
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    return itemsize * (config.num_layers * layer + (tables * config.vocab_size + 1) * config.hidden_size)


def count_pages(settings: Settings, *, available_at_start: int, available_now: int) -> int:
    """Pages of the KV pool, padding page 0 included.

    As many as hold cache.max_total_tokens if that is set. Otherwise weights and pool together may take
    mem_fraction_static of the memory that was available before the weights were loaded, and the pool is never
    larger than all rows need at full context.

    Args:
        settings: sizes and limits.
        available_at_start: bytes available before the weights were loaded.
        available_now: bytes available after.

    Raises ConfigError if not even one page fits, or if max_total_tokens needs more memory than there is.
    """
    cache, scheduler = settings.cache, settings.scheduler
    page_size = cache.page_size
    token_bytes = settings.model.kv_bytes_per_token(DTYPES[cache.dtype].itemsize)
    page_bytes = token_bytes * page_size
    if cache.max_total_tokens is not None:
        pages = cache.max_total_tokens // page_size
        if (pages + 1) * page_bytes > available_now:
            raise ConfigError(
                f"--max-total-tokens {cache.max_total_tokens} needs a KV pool of "
                f"{_gib((pages + 1) * page_bytes)}, but {_gib(available_now)} are available"
            )
    else:
        reserve = int((1 - cache.mem_fraction_static) * available_at_start)
        fits = (available_now - reserve) // page_bytes - 1
        pages = min(fits, scheduler.max_running_requests * -(-scheduler.context_length // page_size))
    if pages < 1:
        raise ConfigError(
            f"no memory is left for the KV pool: {_gib(available_now)} of {_gib(available_at_start)} are "
            f"available after loading the weights, and --mem-fraction-static is {cache.mem_fraction_static:g}"
        )
    return pages + 1


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
