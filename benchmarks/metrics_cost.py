"""What the metrics of an API worker cost in CPU time, beside prometheus_client's histograms.

    python benchmarks/metrics_cost.py [--streams 4096] [--rounds 15]

Interleaved rounds in one process, CPU time of the thread, medians. Times are for one token of one
stream, or for one request; at 60,000 events a second, 1 us is 6 % of a core. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from phalanx.core.step import StepOutputs
from phalanx.server.latencies import Latencies
from phalanx.server.worker_metrics import LATENCY_BOUNDS_S, WorkerMetrics, metrics_path

_STEPS = 20  # in a round: long enough for the clock, short enough to interleave


def by_step(num_streams: int, folder: Path) -> Callable[[], None]:
    """One round of the worker's own way."""
    metrics = WorkerMetrics(metrics_path(folder, 0))
    latencies = Latencies(metrics)
    ids = np.arange(num_streams, dtype=np.int64)
    latencies.began(ids.tolist(), time.monotonic())
    steps = StepOutputs(1, ids, np.ones(num_streams, np.int32), np.zeros(num_streams, np.uint8))

    def round_() -> None:
        for _ in range(_STEPS):
            latencies.note([steps])

    return round_


def by_event(num_streams: int, observe: Callable[[float], None]) -> Callable[[], None]:
    """One round with a call for each token and a dict of last times, as a server without arrays would."""
    last = dict.fromkeys(range(num_streams), time.monotonic())

    def round_() -> None:
        for _ in range(_STEPS):
            for stream in last:
                now = time.monotonic()
                observe(now - last[stream])
                last[stream] = now

    return round_


def per_request(folder: Path, count: int = 4096) -> Callable[[], None]:
    """Everything that is done once for each request: its begin, end, whole time and HTTP response."""
    metrics = WorkerMetrics(metrics_path(folder, 1))
    latencies = Latencies(metrics)
    first = [0]

    def round_() -> None:
        ids = range(first[0], first[0] + count)
        first[0] += count
        for stream_id in ids:
            metrics.opened()
            latencies.began([stream_id], 0.0)
        for stream_id in ids:
            metrics.ended("stop")
            latencies.ended(stream_id, 0.0)
            metrics.closed("/generate", 200)
        latencies.flush()

    return round_


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = name  # must be set before its first import
        from prometheus_client import Histogram, values

        kinds = {"multiprocess": values.MultiProcessValue(), "one process": values.MutexValue}
        from prometheus_client import metrics as client_metrics

        subjects = {"by step (this server)": by_step(args.streams, folder)}
        for kind, value_class in kinds.items():
            client_metrics.values.ValueClass = value_class
            bounds = LATENCY_BOUNDS_S.tolist()
            histogram = Histogram(f"x_{len(subjects)}", "x", ["model_name"], buckets=bounds, registry=None)
            subjects[f"prometheus_client, {kind}"] = by_event(args.streams, histogram.labels("m").observe)
        requests = per_request(folder)
        times: dict[str, list[float]] = {subject: [] for subject in [*subjects, "request"]}
        for _ in range(args.rounds):
            for subject, round_ in subjects.items():
                began = time.thread_time()
                round_()
                times[subject].append((time.thread_time() - began) / (_STEPS * args.streams))
            began = time.thread_time()
            requests()
            times["request"].append((time.thread_time() - began) / 4096)
    result = {subject: round(statistics.median(values_s) * 1e6, 4) for subject, values_s in times.items()}
    for subject, us in result.items():
        share = "" if subject == "request" else f"   {us * 6:6.2f} % of a core at 60,000 events/s"
        print(f"{subject:<36} {us:9.4f} us{share}")
    print(json.dumps({"streams": args.streams, "us": result}))


if __name__ == "__main__":
    main()
