"""Running and queued requests as the server's /metrics tells them, sampled while the load runs."""

from __future__ import annotations

import math
import re
import threading
import time
from types import TracebackType

from phalanx.bench.errors import BenchError
from phalanx.bench.target import Target, control

_PERIOD_S = 1.0
# Prometheus names of the two gauges: SGLang's (and Phalanx's), then vLLM's.
_RUNNING = ("sglang:num_running_reqs", "vllm:num_requests_running")
_QUEUED = ("sglang:num_queue_reqs", "vllm:num_requests_waiting")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def read_gauges(text: str) -> tuple[float, float] | None:
    """Return (running, queued) of a Prometheus page, summed over its labels; None where one is no number."""
    totals: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name in _RUNNING or name in _QUEUED:
            try:
                totals[name] = totals.get(name, 0.0) + float(value)
            except ValueError:
                return None
    running = [totals[name] for name in _RUNNING if name in totals]
    queued = [totals[name] for name in _QUEUED if name in totals]
    found = (running[0], queued[0]) if running and queued else None
    return found if found is not None and all(map(math.isfinite, found)) else None


class MetricsSampler:
    """Asks /metrics once a second in a thread, from entering the block until leaving it."""

    def __init__(self, target: Target) -> None:
        """Ask once.

        Raises:
            BenchError: the server has no /metrics with these gauges.
        """
        if self._ask(target) is None:
            raise BenchError(
                f"--server-metrics: {target.url}/metrics does not tell running and queued requests "
                "(SGLang needs --enable-metrics)"
            )
        self._target = target
        self._samples: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MetricsSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def series(self, began: float) -> dict[str, list[float]]:
        """Return the samples as lists: seconds after `began` (`time.perf_counter`), running, queued."""
        return {
            "t_s": [round(at - began, 4) for at, _, _ in self._samples],
            "running": [running for _, running, _ in self._samples],
            "queued": [queued for _, _, queued in self._samples],
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            asked = time.perf_counter()
            # A sample that fails leaves a gap: the run itself must not fail for it.
            if (gauges := self._ask(self._target)) is not None:
                self._samples.append((asked, *gauges))
            self._stop.wait(max(0.0, _PERIOD_S - (time.perf_counter() - asked)))

    @staticmethod
    def _ask(target: Target) -> tuple[float, float] | None:
        status, body = control(target, "GET", "/metrics", timeout_s=5.0)
        return read_gauges(body) if status == 200 and isinstance(body, str) else None
