"""What `phalanx top` shows, from answers of /metrics. Reads SGLang's servers too, as far as they tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.core.histogram import quantile_s

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
LATENCIES = {
    "time to first token": "sglang:time_to_first_token_seconds",
    "between tokens": "sglang:inter_token_latency_seconds",
    "whole request": "sglang:e2e_request_latency_seconds",
    "in the queue": "sglang:queue_time_seconds",
}
PROBES = ("/health", "/health_generate", "/ready", "/ping")


class Scrape:
    """One answer.

    Args:
        text: Prometheus' text format.
        at_s: when it came, on any clock.
        is_healthy: /health said so at that time; asked only where the engine had no answer for the page.
    """

    def __init__(self, text: str, at_s: float, is_healthy: bool = False) -> None:
        self.at_s, self.is_healthy = at_s, is_healthy
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for name, labels, value in _SAMPLE.findall(text):
            found = {key: _ESCAPED.sub(_unescape, raw) for key, raw in _LABEL.findall(labels)}
            self._samples.setdefault(name, []).append((found, float(value)))

    def get(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that have these labels; None if there are none."""
        values = [v for found, v in self._samples.get(name, ()) if labels.items() <= found.items()]
        return sum(values) if values else None

    def labels(self, name: str, label: str) -> list[str]:
        """The values that a label takes, in order."""
        return list(dict.fromkeys(found[label] for found, _ in self._samples.get(name, ()) if label in found))

    def buckets(self, name: str, **labels: str) -> tuple[list[float], list[float]]:
        """(bounds without the infinite one, counts up to each bound, the infinite one included)."""
        counts: dict[float, float] = {}
        for found, value in self._samples.get(f"{name}_bucket", ()):
            if labels.items() <= found.items():
                bound = float(found["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        bounds = sorted(counts)
        return bounds[:-1], [counts[bound] for bound in bounds]


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of one histogram, in seconds; None where nothing was recorded."""

    count: float
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """One frame; None for what the server does not tell. Rates are per second, between the two answers.

    step_s, between_steps_s: means; idle_share: of the time between the answers, an estimate from above.
    latencies: by their names here. workers: (number, streams, lag). causes: aborted sequences by cause.
    errors: HTTP responses from 400 on, in all, without those to probes: they ask while the model loads.
    """

    model: str
    engine_up: bool
    in_a_step: bool  # it has no answer for the page, but lives
    paused: bool
    running: float | None
    queued: float | None
    max_running: float | None
    used_tokens: float | None
    max_tokens: float | None
    tokens_out: float | None
    tokens_in: float | None
    requests: float | None
    steps: float | None
    rows_per_step: float | None
    step_s: float | None
    step: Quantiles
    between_steps_s: float | None
    between_steps: Quantiles
    idle_share: float | None
    errors: float
    latencies: dict[str, Quantiles] = field(default_factory=dict)
    workers: list[tuple[str, float, Quantiles]] = field(default_factory=list)
    causes: dict[str, float] = field(default_factory=dict)


def figures(now: Scrape, before: Scrape, window: Scrape) -> Figures:
    """A frame.

    Args:
        now: the last answer.
        before: rates are taken since then.
        window: quantiles are taken since then.
    """
    models = now.labels("sglang:num_running_reqs", "model_name") or now.labels(
        "phalanx:engine_up", "model_name"
    )
    up = now.get("phalanx:engine_up")
    name = "phalanx:aborted_requests_total"
    causes = {cause: now.get(name, cause=cause) or 0.0 for cause in now.labels(name, "cause")}
    responses = "sglang:http_responses_total"
    codes = [code for code in now.labels(responses, "status_code") if code >= "400"]
    routes = [route for route in now.labels(responses, "endpoint") if route not in PROBES]
    return Figures(
        model=", ".join(models) or "?",
        engine_up=up != 0,
        in_a_step=up == 0 and now.is_healthy,
        paused=now.get("phalanx:paused") == 1,
        running=now.get("sglang:num_running_reqs"),
        queued=now.get("sglang:num_queue_reqs"),
        max_running=now.get("sglang:max_running_requests"),
        used_tokens=now.get("sglang:num_used_tokens"),
        max_tokens=now.get("sglang:max_total_num_tokens"),
        tokens_out=_rate(now, before, "sglang:generation_tokens_total"),
        tokens_in=_rate(now, before, "sglang:prompt_tokens_total"),
        requests=_rate(now, before, "sglang:e2e_request_latency_seconds_count"),
        steps=_rate(now, before, "phalanx:steps_total"),
        rows_per_step=_ratio(now, before, "phalanx:step_rows_total", "phalanx:steps_total"),
        step_s=_mean(now, before, "phalanx:step_time_seconds"),
        step=quantiles(now, window, "phalanx:step_time_seconds"),
        between_steps_s=_mean(now, before, "phalanx:host_time_between_steps_seconds"),
        between_steps=quantiles(now, window, "phalanx:host_time_between_steps_seconds"),
        idle_share=_rate(now, before, "phalanx:gpu_idle_seconds_total"),
        errors=sum(now.get(responses, status_code=c, endpoint=r) or 0.0 for c in codes for r in routes),
        latencies={title: quantiles(now, window, metric) for title, metric in LATENCIES.items()},
        workers=[
            _worker(now, window, number) for number in now.labels("phalanx:api_worker_streams", "worker")
        ],
        causes={cause: count for cause, count in causes.items() if count},
    )


def _worker(now: Scrape, window: Scrape, number: str) -> tuple[str, float, Quantiles]:
    streams = now.get("phalanx:api_worker_streams", worker=number) or 0.0
    return number, streams, quantiles(now, window, "phalanx:event_loop_lag_seconds", worker=number)


def quantiles(now: Scrape, before: Scrape, name: str, **labels: str) -> Quantiles:
    """Of what a histogram recorded between two answers."""
    bounds, counts = now.buckets(name, **labels)
    _, earlier = before.buckets(name, **labels)
    if len(earlier) == len(counts):
        counts = [late - early for late, early in zip(counts, earlier, strict=True)]
    if not counts or counts[-1] <= 0 or min(counts) < 0:  # nothing, or the server was started anew
        return Quantiles(0.0, None, None)
    buckets = [late - early for late, early in zip(counts, [0.0, *counts], strict=False)]
    histogram = {"count": counts[-1], "buckets": buckets}
    return Quantiles(counts[-1], *_both(bounds, histogram))


def _both(bounds: Sequence[float], histogram: dict[str, object]) -> tuple[float | None, float | None]:
    return quantile_s(bounds, histogram, 0.5), quantile_s(bounds, histogram, 0.99)


def _growth(now: Scrape, before: Scrape, name: str) -> float | None:
    late, early = now.get(name), before.get(name)
    return None if late is None or early is None or late < early else late - early


def _rate(now: Scrape, before: Scrape, name: str) -> float | None:
    growth, elapsed_s = _growth(now, before, name), now.at_s - before.at_s
    return None if growth is None or elapsed_s <= 0 else growth / elapsed_s


def _ratio(now: Scrape, before: Scrape, above: str, below: str) -> float | None:
    a, b = _growth(now, before, above), _growth(now, before, below)
    return a / b if a is not None and b else None


def _mean(now: Scrape, before: Scrape, histogram: str) -> float | None:
    return _ratio(now, before, f"{histogram}_sum", f"{histogram}_count")
