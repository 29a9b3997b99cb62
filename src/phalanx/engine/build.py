"""From settings to a running engine: weights, pool, attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.attention.registry import create_attention
from phalanx.config.groups import Settings
from phalanx.core.errors import ConfigError
from phalanx.engine.cuda import CudaEngine
from phalanx.engine.engine import Engine
from phalanx.engine.launch_times import LaunchTimes
from phalanx.engine.memory import DTYPES, PoolSize, available_bytes, check_memory, size_pool
from phalanx.engine.needs import engine_needs
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder
from phalanx.models.weights import iter_dummy_weights, iter_weights


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A ready engine.

    pool: pages of its pool, and what bounded them. phases: seconds that each part of the start took.
    launch_times: what the engine says of its last launch; None from one that says nothing.
    """

    engine: Engine | CudaEngine
    pool: PoolSize
    phases: dict[str, float]
    launch_times: Callable[[], LaunchTimes] | None


def build_engine(settings: Settings, progress: bool = True) -> BuiltEngine:
    """Load the model, size and allocate the pool, start the engine's thread.

    Args:
        settings: everything settled.
        progress: draw a bar on standard error while weights load.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigError: unknown device or attention backend, or no memory for weights, pool or graphs.
    """
    try:
        return _build(settings, progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU's memory does not hold this model with its KV pool and the buffers of a step: lower "
            f"--mem-fraction-static or --max-running-requests ({str(error).splitlines()[0]})"
        ) from error


def _build(settings: Settings, progress: bool) -> BuiltEngine:
    name = settings.engine.device
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device {name!r} cannot run a model here: torch finds no such device")
    device = torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")
    dtypes = {kind: DTYPES[kind] for kind in (settings.engine.dtype, settings.cache.dtype)}
    if settings.engine.num_threads is not None:
        torch.set_num_threads(settings.engine.num_threads)
    phases: dict[str, float] = {}
    before = available_bytes(device)
    needs = engine_needs(settings)
    check_memory(settings, needs, before)
    with torch.inference_mode():
        start = time.perf_counter()
        model = _load(settings, dtypes[settings.engine.dtype], device, progress)
        phases["load_weights"] = time.perf_counter() - start
        start = time.perf_counter()
        now = available_bytes(device)
        size = size_pool(settings, needs, available_at_start=before, available_now=now)
        pool = KVPool(
            settings.model,
            num_pages=size.num_pages,
            page_size=settings.cache.page_size,
            dtype=dtypes[settings.cache.dtype],
            device=device,
        )
        attn = create_attention(settings.engine.attention_backend, settings.model, device)
        engine: Engine | CudaEngine
        launch_times = None
        if device.type == "cpu":
            engine = Engine(settings, model, pool, attn, device)
            phases["kv_pool"] = time.perf_counter() - start
        else:
            engine = CudaEngine(settings, model, pool, attn, device)
            launch_times = engine.launch_times
            phases["kv_pool"] = time.perf_counter() - start
            start = time.perf_counter()
            engine.warm_up(progress=progress)
            phases["capture" if settings.engine.cuda_graph else "warm_up"] = time.perf_counter() - start
    return BuiltEngine(engine, size, phases, launch_times)


def _load(settings: Settings, dtype: torch.dtype, device: torch.device, progress: bool) -> Decoder:
    model = Decoder(settings.model, dtype=dtype, device=device)
    if settings.source.load_format == "dummy":
        seed = settings.engine.random_seed
        model.load_weights(iter_dummy_weights(settings.model, seed=seed, dtype=dtype, device=device))
    else:
        model.load_weights(iter_weights(settings.source, settings.model, progress=progress))
    return model
