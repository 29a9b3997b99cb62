"""One log line now and then while the engine works, so that people see what it does."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


class ProgressLog:
    """Logs running and queued requests, tokens per second, step time and KV use, at most every ten seconds.

    The figures are of the time since the line before.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._tokens = 0
        self._steps = 0
        self._step_s = 0.0

    @property
    def due(self) -> bool:
        """Whether `log` has something to do; costs a clock read."""
        return time.monotonic() - self._last >= _EVERY_S

    def log(self, stats: Mapping[str, Any]) -> None:
        """Write the line. stats: of `Worker.stats`."""
        now = time.monotonic()
        tokens = stats["generated_tokens_total"]
        steps, step_s = stats["step_time"]["count"], stats["step_time"]["sum_s"]
        rate = (tokens - self._tokens) / (now - self._last)
        mean_ms = (step_s - self._step_s) / max(steps - self._steps, 1) * 1e3
        self._last, self._tokens, self._steps, self._step_s = (
            now,
            stats["generated_tokens_total"],
            steps,
            step_s,
        )
        logger.info(
            "running %d, queued %d, %.0f tok/s, %.1f ms a step, KV pages %d of %d",
            stats["running"],
            stats["queued"],
            rate,
            mean_ms,
            stats["pages_held"],
            stats["pages_total"],
        )
