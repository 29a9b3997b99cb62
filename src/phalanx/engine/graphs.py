"""CUDA graphs of whole decode steps, one per bucket of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.engine.sampled import Sampled


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph, the input it reads ([4 + bucket] int32) and the output it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    sampled: Sampled


class DecodeGraphs:
    """Captures decode steps per bucket and replays them.

    All graphs share one memory pool: they run one after the other, so that what one of them computes with
    needs no memory of its own. Capture the largest first: then the smaller ones find room in what it took.

    Args:
        prepare: fills a bucket's buffers from its inputs.
        compute: runs the model over the buffers of a bucket of this size and samples.
        prepare_inside: `prepare` is captured too. Else it runs before each replay, for what reads lengths on
            the host.
    """

    def __init__(
        self,
        prepare: Callable[[torch.Tensor], object],
        compute: Callable[[int], Sampled],
        *,
        prepare_inside: bool,
    ) -> None:
        self._prepare = prepare
        self._compute = compute
        self._prepare_inside = prepare_inside
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, CapturedStep] = {}

    def __contains__(self, num_inputs: object) -> bool:
        return num_inputs in self._captured

    def capture(self, inputs: torch.Tensor, bucket: int) -> None:
        """Capture the step over these inputs; it must have run once before, so that kernels are loaded.

        inputs: [4 + bucket] int32; the graph keeps reading this memory. Not on the default stream.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            if self._prepare_inside:
                self._prepare(inputs)
            sampled = self._compute(bucket)
        finally:
            graph.capture_end()
        self._captured[len(inputs)] = CapturedStep(graph, inputs, sampled)

    def replay(self, inputs: torch.Tensor) -> Sampled:
        """Run the step on a copy of `inputs`. The result is overwritten by the bucket's next replay."""
        captured = self._captured[len(inputs)]
        captured.inputs.copy_(inputs, non_blocking=True)
        if not self._prepare_inside:
            self._prepare(captured.inputs)
        captured.graph.replay()
        return captured.sampled
