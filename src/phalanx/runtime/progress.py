"""One log line now and then while the engine works, so that people see what it does."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


class ProgressLog:
    """Logs running and queued requests, tokens per second and KV use, at most every ten seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._tokens = 0

    @property
    def due(self) -> bool:
        """Whether `log` has something to do; costs a clock read."""
        return time.monotonic() - self._last >= _EVERY_S

    def log(self, stats: dict[str, int]) -> None:
        """Write the line. stats: of `Worker.stats`."""
        now = time.monotonic()
        rate = (stats["generated_tokens_total"] - self._tokens) / (now - self._last)
        self._last, self._tokens = now, stats["generated_tokens_total"]
        logger.info(
            "running %d, queued %d, %.0f tok/s, KV pages %d of %d",
            stats["running"],
            stats["queued"],
            rate,
            stats["pages_held"],
            stats["pages_total"],
        )
