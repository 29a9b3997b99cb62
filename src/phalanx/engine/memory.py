"""How many KV pages fit beside weights and engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from phalanx.config.groups import ModelConfig, Settings
from phalanx.core.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """Bytes that the engine takes beside weights and pool; counted by `engine.needs`.

    tables: of requests, [num_rows, context_length] and more. logits: one buffer for all steps. steps: what a
    step of step_tokens tokens holds at its most. sampling: of rows that ask for more than a temperature, and
    scratch. logprobs: of steps whose log-probabilities are read. graphs: captured steps. libraries: kernels
    and their workspaces. pool_token: for each token of the pool, beside its K and V.
    """

    num_rows: int
    context_length: int
    step_tokens: int
    pool_token: int
    tables: int
    logits: int
    steps: int
    sampling: int
    logprobs: int
    graphs: int
    libraries: int

    @property
    def total(self) -> int:
        """All but what grows with the pool."""
        parts = (self.tables, self.logits, self.steps, self.sampling, self.logprobs, self.graphs)
        return sum(parts) + self.libraries

    def __str__(self) -> str:
        """What takes how much, in one line."""
        parts = (
            (f"tables of {self.num_rows} rows x {self.context_length} tokens of context", self.tables),
            ("logits and log-probabilities", self.logits + self.logprobs),
            (f"steps of up to {self.step_tokens} tokens", self.steps),
            ("sampling", self.sampling),
            ("captured steps", self.graphs),
            ("libraries", self.libraries),
        )
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size)
        return f"{_gib(self.total)} ({listed})"


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_pages: of the pool, padding page 0 included. note: what bounded them, "" if nothing of note."""

    num_pages: int
    note: str = ""


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


def check_memory(settings: Settings, needs: EngineNeeds, available: int) -> None:
    """Raise ConfigError, before weights are loaded, if no page of the pool (or not the pool that was asked
    for) fits beside weights and engine.

    available: bytes, before the weights are loaded.
    """
    cache = settings.cache
    weights = weight_bytes(settings.model, DTYPES[settings.engine.dtype].itemsize)
    if cache.max_total_tokens is None and weights >= cache.mem_fraction_static * available:
        raise ConfigError(
            f"no memory is left for the KV pool: the weights of {settings.source.name} take {_gib(weights)} "
            f"in {settings.engine.dtype}, and {_gib(available)} are available, of which "
            f"--mem-fraction-static leaves {cache.mem_fraction_static:g} to weights and pool: raise it"
        )
    pages = 1 if cache.max_total_tokens is None else cache.max_total_tokens // cache.page_size
    pool = (pages + 1) * _page_bytes(settings, needs)
    if weights + pool + needs.total > available:
        raise _does_not_fit(settings, needs, f"the weights {_gib(weights)}", pool, available)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of a model's weights (`ModelConfig.num_weights`)."""
    return itemsize * config.num_weights


def size_pool(
    settings: Settings, needs: EngineNeeds, *, available_at_start: int, available_now: int
) -> PoolSize:
    """Pages of the KV pool.

    As many as hold cache.max_total_tokens if that is set. Otherwise what is free after the weights, less what
    the engine needs; but weights and pool together take no more than mem_fraction_static of the memory that
    was available before the weights were loaded, and the pool is never larger than all rows need at full
    context.

    Args:
        settings: sizes and limits.
        needs: of `engine.needs.engine_needs`.
        available_at_start: bytes available before the weights were loaded.
        available_now: bytes available after.

    Raises ConfigError if not even one page fits, or if max_total_tokens needs more memory than there is.
    """
    cache, scheduler = settings.cache, settings.scheduler
    page_bytes = _page_bytes(settings, needs)
    if cache.max_total_tokens is not None:
        pages = cache.max_total_tokens // cache.page_size
        pool = (pages + 1) * page_bytes
        if pool + needs.total > available_now:
            raise _does_not_fit(settings, needs, "", pool, available_now)
        return PoolSize(pages + 1)
    left_out = int((1 - cache.mem_fraction_static) * available_at_start)
    within_fraction = (available_now - left_out) // page_bytes - 1
    beside_engine = (available_now - needs.total) // page_bytes - 1
    all_rows = scheduler.max_running_requests * -(-scheduler.context_length // cache.page_size)
    pages = min(within_fraction, beside_engine, all_rows)
    if beside_engine < 1:
        raise _does_not_fit(settings, needs, "", 2 * page_bytes, available_now)
    if pages < 1:
        raise ConfigError(
            f"no memory is left for the KV pool: {_gib(available_now)} of {_gib(available_at_start)} are "
            f"available after loading the weights, and --mem-fraction-static is "
            f"{cache.mem_fraction_static:g}: raise it"
        )
    if pages < min(within_fraction, all_rows):
        return PoolSize(pages + 1, f"the engine keeps {needs}, more than --mem-fraction-static leaves")
    return PoolSize(pages + 1)


def _page_bytes(settings: Settings, needs: EngineNeeds) -> int:
    token = settings.model.kv_bytes_per_token(DTYPES[settings.cache.dtype].itemsize)
    return settings.cache.page_size * (token + needs.pool_token)


def _does_not_fit(
    settings: Settings, needs: EngineNeeds, weights: str, pool: int, available: int
) -> ConfigError:
    """weights: "" once they are loaded. pool: bytes of the one asked for, or of the smallest."""
    wanted, flags = settings.cache.max_total_tokens, "--max-running-requests, --context-length"
    of_pool = f"the KV pool of --max-total-tokens {wanted} {_gib(pool)}"
    if wanted is None:
        of_pool = f"the smallest KV pool {_gib(pool)}"
    else:
        flags = f"--max-total-tokens, {flags}"
    taken = ", ".join(part for part in (weights, of_pool, f"and the engine {needs}") if part)
    return ConfigError(
        f"{_gib(available)} are available{'' if weights else ' beside the weights'}, which do not hold what "
        f"{settings.source.name} takes: {taken}; lower {flags} or --chunked-prefill-size"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
