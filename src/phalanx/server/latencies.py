"""Times that clients wait, taken a step at a time with arrays: nothing is called per token.

A step's tokens all count from the moment its message is taken up. Measured cost: docs/measured.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from phalanx.core.step import Bool, Int64, StepOutputs
from phalanx.server.worker_metrics import Float64, WorkerMetrics

_FIRST_CAPACITY = 1 << 14
_MAX_CAPACITY = 1 << 20  # 17 MiB; of streams further apart than this, one is not timed any more
_NOBODY = -1


class Latencies:
    """Remembers when each running stream last got a token.

    A stream's place in the arrays is its id modulo their length: ids of one worker count up by one, so places
    collide only where a stream outlives as many others as there are places; then the arrays grow.
    """

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._allocate(_FIRST_CAPACITY)
        # What happens once for each request waits here and is taken in together: alone it would cost as much.
        self._began_ids: list[int] = []
        self._began_s: list[float] = []
        self._ended_ids: list[int] = []
        self._whole_s: list[float] = []

    def _allocate(self, capacity: int) -> None:
        self._mask = capacity - 1
        self._owner: Int64 = np.full(capacity, _NOBODY, np.int64)
        self._last_s: Float64 = np.zeros(capacity, np.float64)
        self._waits_for_first: Bool = np.zeros(capacity, np.bool_)

    def began(self, stream_ids: Sequence[int], received_s: float) -> None:
        """These streams belong to a request that came at `received_s` (`time.monotonic`)."""
        self._began_ids += stream_ids
        self._began_s += [received_s] * len(stream_ids)

    def ended(self, stream_id: int, received_s: float | None) -> None:
        """A stream has ended. received_s: its request's, or None if its whole time does not count."""
        self._ended_ids.append(stream_id)
        if received_s is not None:
            self._whole_s.append(time.monotonic() - received_s)

    def note(self, steps: list[StepOutputs]) -> None:
        """Steps have come together; they have not been told yet."""
        self._place()
        now_s = time.monotonic()
        ids = steps[0].stream_ids if len(steps) == 1 else np.concatenate([s.stream_ids for s in steps])
        tokens = steps[0].tokens if len(steps) == 1 else np.concatenate([s.tokens for s in steps])
        if (tokens < 0).any():
            ids = ids[tokens >= 0]
        counts = None
        if len(steps) > 1:  # a stream stands in each once at most
            ids, counts = np.unique(ids, return_counts=True)
        places = ids & self._mask
        is_known = self._owner[places] == ids
        if not is_known.all():
            places = places[is_known]
            counts = None if counts is None else counts[is_known]
        waits_s = now_s - self._last_s[places]
        self._last_s[places] = now_s
        is_first = self._waits_for_first[places]
        if is_first.any():
            self._metrics.time_to_first_token.add(waits_s[is_first])
            self._waits_for_first[places[is_first]] = False
            if counts is None:
                waits_s = waits_s[~is_first]
        if counts is None:
            self._metrics.inter_token_latency.add(waits_s)
        else:  # tokens that came together share the wait, as in SGLang; those with a first one did not wait
            counts = counts - is_first
            waits_s = np.where(is_first, 0.0, waits_s) / np.maximum(counts, 1)
            self._metrics.inter_token_latency.add(waits_s, counts)

    def flush(self) -> None:
        """Bring the metrics up to date."""
        self._place()
        if self._whole_s:
            self._metrics.e2e_request_latency.add(np.array(self._whole_s, np.float64))
            self._whole_s.clear()

    def _place(self) -> None:
        """Give those that began their places, and free those of the ended: in this order, some did both."""
        if self._began_ids:
            ids = np.array(self._began_ids, np.int64)
            places = ids & self._mask
            while self._collide(ids, places) and self._mask + 1 < _MAX_CAPACITY:
                self._grow()
                places = ids & self._mask
            self._owner[places] = ids
            self._last_s[places] = self._began_s
            self._waits_for_first[places] = True
            self._began_ids.clear()
            self._began_s.clear()
        if self._ended_ids:
            ids = np.array(self._ended_ids, np.int64)
            places = ids & self._mask
            self._owner[places[self._owner[places] == ids]] = _NOBODY
            self._ended_ids.clear()

    def _collide(self, ids: Int64, places: Int64) -> bool:
        """Whether a place is taken or might be wanted twice."""
        return int(ids.max() - ids.min()) > self._mask or bool((self._owner[places] != _NOBODY).any())

    def _grow(self) -> None:
        owner, last_s, waits = self._owner, self._last_s, self._waits_for_first
        self._allocate(2 * len(owner))
        live = np.flatnonzero(owner != _NOBODY)
        places = owner[live] & self._mask
        self._owner[places], self._last_s[places] = owner[live], last_s[live]
        self._waits_for_first[places] = waits[live]
