"""Requests that run before the first one of a user's, on a device that loads its kernels as they are met."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from phalanx.config.groups import Settings
from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish
from phalanx.engine.launch_times import LaunchTimes
from phalanx.runtime.worker import StepEngine, Worker
from phalanx.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_PROMPT = np.zeros(2, np.int32)
_OUTPUT = 2  # tokens: one after the prompt, one of a decode step


def run_trial(
    engine: StepEngine,
    settings: Settings,
    num_pages: int,
    launch_times: Callable[[], LaunchTimes] | None = None,
) -> None:
    """Run short requests that ask for filters, penalties and log-probabilities, by a scheduler of their own.

    What samples such rows is loaded when it is first used, and loading waits for the device: with thousands
    of rows running, the first user who asks for top-p would hold up all of them. No counter shows these
    requests, and rows and pages are overwritten like those of any request that has ended. Where context or
    pool hold nothing so short, nothing is run.
    """
    page_size = settings.cache.page_size
    length = len(_PROMPT) + _OUTPUT
    if min((num_pages - 1) * page_size, settings.scheduler.context_length) < length:
        return
    config = msgspec.structs.replace(settings.scheduler, max_queued_requests=None)
    scheduler = Scheduler(config, num_pages=num_pages, page_size=page_size)
    worker = Worker(scheduler, engine, overlap=settings.engine.overlap, launch_times=launch_times)
    for request in _requests():
        worker.add(request)
    while worker.busy:
        for outputs in worker.step():
            if (outputs.finish == Finish.ERROR).any():
                logger.warning("a request that was tried before the start failed; go on and see")


def _requests() -> list[EngineRequest]:
    """Without a logit_bias, for which the engine keeps columns from the first one on."""
    wishes: list[dict[str, Any]] = [
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "min_new_tokens": 1},
        {"top_p": 0.9},
        {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "temperature": 0.0},
    ]
    logprobs = LogprobParams(prompt_start=0, top_k=1)
    return [
        EngineRequest(
            i, _PROMPT, SamplingParams(**wish, max_new_tokens=_OUTPUT, sampling_seed=0), logprobs=logprobs
        )
        for i, wish in enumerate(wishes)
    ]
