"""The figures of one API worker, in a small file of fixed slots that every worker of the server can read.

The file outlives its worker: the successor in the same slot goes on counting where it ended, so that no total
ever falls. A process writes its own file alone, through a memory map; the others read copies. An aligned
64-bit float is never seen half written.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.core.errors import ConfigError
from phalanx.core.histogram import log_bounds_s
from phalanx.server.housekeeping import LAG_BOUNDS_S, Histogram

logger = logging.getLogger(__name__)

Float64 = npt.NDArray[np.float64]

LATENCY_BOUNDS_S = log_bounds_s(-4, 3)
LATENCIES = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
GAUGES = ("streams", "http_active")
TOTALS = ("stream_events", "coalesced_tokens", "stalled_clients", "cpu_seconds")
ENDS = ("stop", "length", "abort", "error")
# Why sequences were aborted: the client left; it read nothing; --request-timeout; /abort_request;
# /pause_generation with mode "abort"; the server ended; the engine ended.
CAUSES = ("disconnect", "stalled", "timeout", "request", "pause", "shutdown", "engine_lost")

_MAX_RESPONSES = 256  # pairs of route and status
_MAX_ENDPOINT_BYTES = 48
_NUM_BUCKETS = len(LATENCY_BOUNDS_S) + 1
_ONE_RESPONSE = np.dtype([("endpoint", f"S{_MAX_ENDPOINT_BYTES}"), ("status", "<i8"), ("count", "<f8")])
_LAYOUT = np.dtype(
    [
        ("version", "<u8"),
        ("gauges", "<f8", (len(GAUGES),)),
        ("totals", "<f8", (len(TOTALS),)),
        ("ends", "<f8", (len(ENDS),)),
        ("causes", "<f8", (len(CAUSES),)),
        ("latency_buckets", "<f8", (len(LATENCIES), _NUM_BUCKETS)),
        ("latency_sums", "<f8", (len(LATENCIES),)),
        ("lag_buckets", "<f8", (len(LAG_BOUNDS_S) + 1,)),
        ("lag_sum", "<f8", (1,)),
        ("responses", _ONE_RESPONSE, (_MAX_RESPONSES,)),
    ]
)
_VERSION = zlib.crc32(repr((_LAYOUT.descr, GAUGES, TOTALS, ENDS, CAUSES, LATENCIES)).encode())


def metrics_path(run_dir: Path, slot: int) -> Path:
    """The file of the worker in this slot."""
    return run_dir / f"metrics-{slot}"


class LatencyHistogram:
    """One histogram of a worker's file; seconds, LATENCY_BOUNDS_S."""

    def __init__(self, buckets: Float64, total: Float64) -> None:
        self._buckets = buckets
        self._sum = total

    def add(self, values_s: Float64, counts: Float64 | None = None) -> None:
        """Record durations ([n] seconds), each as often as `counts` ([n]) says, else once."""
        if not len(values_s):
            return
        index = np.searchsorted(LATENCY_BOUNDS_S, values_s, side="left")
        self._buckets += np.bincount(index, counts, minlength=_NUM_BUCKETS)
        self._sum += values_s.sum() if counts is None else (values_s * counts).sum()


class WorkerMetrics:
    """What this worker counts.

    Args:
        path: its file; None counts in memory alone.

    Attributes:
        time_to_first_token, inter_token_latency, e2e_request_latency: see `latencies.Latencies`.
    """

    def __init__(self, path: Path | None = None) -> None:
        data = _open(path) if path is not None else np.zeros(1, _LAYOUT)
        data["version"] = _VERSION
        data["gauges"] = 0  # a predecessor's streams have ended with it
        self._data = data
        self._earlier = data.copy()  # of the predecessors: what is counted here is added to it
        # Plain integers: an element of an array takes ten times as long to count up.
        self._num_open = 0
        self._ends = dict.fromkeys(ENDS, 0)
        self._causes = dict.fromkeys(CAUSES, 0)
        self._responses: dict[tuple[str, int], int] = {}
        self._slots = {
            (row["endpoint"].decode(), int(row["status"])): i
            for i, row in enumerate(data["responses"][0])
            if row["endpoint"]
        }
        self.time_to_first_token, self.inter_token_latency, self.e2e_request_latency = (
            LatencyHistogram(data["latency_buckets"][0, i], data["latency_sums"][0, i : i + 1])
            for i in range(len(LATENCIES))
        )

    def ended(self, kind: str) -> None:
        """A sequence ended; kind: one of ENDS."""
        self._ends[kind] += 1

    def aborted(self, cause: str, count: int = 1) -> None:
        """Sequences were aborted; cause: one of CAUSES."""
        self._causes[cause] += count

    def opened(self) -> None:
        """An HTTP request has come."""
        self._num_open += 1

    def closed(self, endpoint: str, status: int) -> None:
        """It was answered with this status. endpoint: the route's path, not the client's."""
        self._num_open -= 1
        key = endpoint[:_MAX_ENDPOINT_BYTES], status
        self._responses[key] = self._responses.get(key, 0) + 1

    def publish(
        self, *, num_streams: int = 0, totals: tuple[float, ...] = (), lag: Histogram | None = None
    ) -> None:
        """Write all that is counted since the start of this process, here and by others.

        Args:
            num_streams: sequences that are running or queued.
            totals: in the order of TOTALS.
            lag: the event loop's.
        """
        data, earlier = self._data, self._earlier
        data["gauges"] = (num_streams, self._num_open)
        data["ends"] = earlier["ends"] + list(self._ends.values())
        data["causes"] = earlier["causes"] + list(self._causes.values())
        if totals:
            data["totals"] = earlier["totals"] + totals
        if lag is not None:
            data["lag_buckets"] = earlier["lag_buckets"] + lag.counts
            data["lag_sum"] = earlier["lag_sum"] + lag.sum
        self._publish_responses()

    def _publish_responses(self) -> None:
        rows, earlier = self._data["responses"][0], self._earlier["responses"]["count"][0]
        num_others = 0
        for key, count in self._responses.items():
            slot = self._slots.get(key)
            if slot is None and len(self._slots) < _MAX_RESPONSES - 1:
                slot = self._slots[key] = len(self._slots)
                rows["endpoint"][slot], rows["status"][slot] = key[0].encode(), key[1]
            if slot is None:
                num_others += count
            else:
                rows["count"][slot] = earlier[slot] + count
        if num_others:
            rows["endpoint"][-1] = b"other"
            rows["count"][-1] = earlier[-1] + num_others

    def snapshot(self) -> Any:
        """A copy, as `read` gives it."""
        return self._data.copy()


def _open(path: Path) -> Any:
    """[1] of _LAYOUT, mapped to the file; emptied if it holds something else.

    Raises:
        ConfigError: it cannot be made. Its space is reserved: writing to a map of a full disk ends a process.
    """
    try:
        with path.open("ab") as file:
            if file.tell() != _LAYOUT.itemsize:
                file.truncate(0)
                file.write(bytes(_LAYOUT.itemsize))
    except OSError as error:
        raise ConfigError(f"cannot write the metrics to {path}: {error.strerror or error}") from error
    data = np.asarray(np.memmap(path, np.uint8, "r+", shape=(_LAYOUT.itemsize,))).view(_LAYOUT)
    if data["version"][0] not in (0, _VERSION):
        logger.warning("%s holds the figures of another version: counting from 0", path.name)
        data[:] = np.zeros(1, _LAYOUT)
    return data


def read(path: Path) -> Any | None:
    """[1] of the file's figures, a copy; None if its worker has not begun."""
    try:
        raw = np.fromfile(path, np.uint8)
    except FileNotFoundError:
        return None
    if raw.size != _LAYOUT.itemsize:
        return None
    data = raw.view(_LAYOUT)
    return data if data["version"][0] == _VERSION else None
