"""Which request names are taken, over all API workers: the engine process alone sees them all."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from phalanx.core.request import EngineRequest
from phalanx.core.step import Finish, StepOutputs


class RidRegistry:
    """The names that clients chose, of sequences that have not ended.

    Names that a worker drew itself are unique anyhow and are not kept, so that requests without a name cost
    nothing here.
    """

    def __init__(self) -> None:
        self._owner: dict[str, int] = {}
        self._name: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._owner)

    def claim(self, request: EngineRequest) -> bool:
        """Take the request's name; False if a running sequence has it."""
        if request.rid is None:
            return True
        if request.rid in self._owner:
            return False
        self._owner[request.rid] = request.stream_id
        self._name[request.stream_id] = request.rid
        return True

    def release(self, stream_ids: Iterable[int]) -> None:
        """These sequences have ended; those without a name are ignored."""
        for stream_id in stream_ids:
            name = self._name.pop(stream_id, None)
            if name is not None:
                del self._owner[name]

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Release the names of sequences that end in this step."""
        if self._name:
            self.release(outputs.stream_ids[np.flatnonzero(outputs.finish != Finish.NONE)].tolist())
