"""Composes a worker from settings: model, engine, scheduler."""

from __future__ import annotations

import logging
import time
from typing import Any

from phalanx.config.groups import Settings
from phalanx.runtime.trial import run_trial
from phalanx.runtime.worker import StepEngine, Worker
from phalanx.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


def build_worker(settings: Settings, *, progress: bool) -> tuple[Worker, dict[str, Any]]:
    """A worker ready to run, and what others need to know of it.

    The info holds num_pages, max_total_num_tokens (of the pool, padding page not counted),
    max_request_tokens (the most tokens one request can hold), and start-up seconds by phase.

    Raises:
        ModelError, ConfigError: the model cannot be loaded, or the pool is too small to run anything.
    """
    page_size = settings.cache.page_size
    note = ""
    engine: StepEngine
    if settings.engine.device == "null":
        from phalanx.engine.null import NullEngine

        num_pages = _null_pages(settings)
        engine = NullEngine(settings)
        phases: dict[str, float] = {}
        launch_times = None
    else:
        from phalanx.engine.build import build_engine

        built = build_engine(settings, progress=progress)
        engine, num_pages, phases = built.engine, built.pool.num_pages, built.phases
        note = built.pool.note
        launch_times = built.launch_times
        if settings.engine.device == "cuda":
            start = time.perf_counter()
            run_trial(engine, settings, num_pages, launch_times)
            phases["trial"] = time.perf_counter() - start
    scheduler = Scheduler(settings.scheduler, num_pages=num_pages, page_size=page_size)
    pool_tokens = (num_pages - 1) * page_size
    context = settings.scheduler.context_length
    info = {
        "num_pages": num_pages,
        "max_total_num_tokens": pool_tokens,
        "max_request_tokens": min(pool_tokens, context),
        "startup_phases_s": phases,
    }
    logger.info(
        "KV pool: %d pages of %d = %d tokens, %.1f requests at the full context of %d; %sstart-up %s",
        num_pages - 1,
        page_size,
        pool_tokens,
        pool_tokens / context,
        context,
        f"{note}; " if note else "",
        ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items()) or "without a model",
    )
    worker = Worker(
        scheduler,
        engine,
        overlap=settings.engine.overlap,
        kv_indices_backend=settings.engine.kv_indices_backend,
        launch_times=launch_times,
    )
    return worker, info


def _null_pages(settings: Settings) -> int:
    """Pages of a pool that exists on paper only: what was asked, else room for every row at full context."""
    tokens = settings.cache.max_total_tokens
    if tokens is None:
        tokens = settings.scheduler.max_running_requests * settings.scheduler.context_length
    return tokens // settings.cache.page_size + 1
