"""The CUDA engine on CPU tensors: streams and events that do nothing, graphs that run their step again.

So that what the engine itself decides (which graph a step takes, how plans are padded, what is read when) is
tested where there is no GPU. What only a device can show is not: races, waiting, kernels inside a capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch

from phalanx.engine.sampled import Sampled


class Nothing:
    """Stands in for streams and events: all work is done when it is asked for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        return True


class RerunSteps:
    """`StepGraphs` without graphs. As there, a replay writes into memory that the next one overwrites."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, tuple[torch.Tensor, Callable[[], Sampled], Callable[[], object] | None]]
        self._steps, self._results = {}, {}
        self.replayed: list[Hashable] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._steps

    def capture(
        self,
        key: Hashable,
        inputs: torch.Tensor,
        step: Callable[[], Sampled],
        before: Callable[[], object] | None = None,
    ) -> None:
        self._steps[key] = inputs, step, before

    def replay(self, key: Hashable, inputs: torch.Tensor) -> Sampled:
        kept, step, before = self._steps[key]
        kept.copy_(inputs[: len(kept)])
        if before is not None:
            before()
        sampled = step()
        result = self._results.setdefault(key, sampled)
        result.packed.copy_(sampled.packed)
        self.replayed.append(key)
        return result


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """Let `CudaEngine` be built and run on the CPU, with plain weights as on a GPU."""
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return (
            made.fill_(torch.nan) if made.is_floating_point() else made
        )  # whoever reads it unwritten sees it

    with pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "Event"):
            patch.setattr(torch.cuda, name, Nothing)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Nothing())
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(torch, "empty", unpinned)
        patch.setattr("phalanx.engine.cuda.StepGraphs", RerunSteps)
        patch.setattr("phalanx.layers.linear._can_pack", lambda dtype, device: False)
        yield
