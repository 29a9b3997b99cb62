"""CUDA graphs of whole steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from phalanx.engine.sampled import Sampled


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph, the input it reads, the output it writes, and what must run before each replay."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    sampled: Sampled
    before: Callable[[], object] | None


class StepGraphs:
    """Captures steps by size and replays them.

    All graphs share one memory pool: they run one after the other, so that what one of them computes with
    needs no memory of its own. Capture the largest first: then the smaller ones find room in what it took.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Hashable, CapturedStep] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def capture(
        self,
        key: Hashable,
        inputs: torch.Tensor,
        step: Callable[[], Sampled],
        before: Callable[[], object] | None = None,
    ) -> None:
        """Capture what `step` launches; its kernels must have run once before, so that they are loaded.

        The current stream must not be the default one.

        Args:
            key: names the graph.
            inputs: what the step reads and `replay` fills; the graph keeps it.
            step: queues the step.
            before: runs before each replay, outside the graph.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            sampled = step()
        finally:
            graph.capture_end()
        self._captured[key] = CapturedStep(graph, inputs, sampled, before)

    def replay(self, key: Hashable, inputs: torch.Tensor) -> Sampled:
        """Run a step on a copy of `inputs`, of which what is longer than the captured input is left out.

        The result is overwritten by the graph's next replay.
        """
        captured = self._captured[key]
        captured.inputs.copy_(inputs[: len(captured.inputs)], non_blocking=True)
        if captured.before is not None:
            captured.before()
        captured.graph.replay()
        return captured.sampled
