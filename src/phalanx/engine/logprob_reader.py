"""Log-probabilities of steps on CUDA: off the way of the steps after them."""

from __future__ import annotations

import functools

import torch

from phalanx.core.step import Int32, LogprobPlan, StepPlan, TokenLogprobs
from phalanx.engine.engine import Model
from phalanx.engine.sampled import ReadLogprobs, Sampled
from phalanx.sampling.logprobs import position_logprobs, prompt_logprobs
from phalanx.sampling.tensors import to_device


class LogprobReader:
    """Keeps what a step's log-probabilities need, and computes them on a stream of its own.

    Args:
        model: whose head turns hidden states into logits.
        device: where it lies.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._side = torch.cuda.Stream(device, priority=-1)

    def of_step(self, plan: StepPlan, sampled: Sampled) -> ReadLogprobs | None:
        """Keep what the step's log-probabilities need; they are computed when the step is read.

        That runs on the side stream, beside the next step, whose result nobody has to wait for then.
        """
        wanted = plan.logprobs
        if wanted is None:
            return None
        index = to_device(wanted.sample_index, torch.int64, self._device)
        lines = sampled.logits.index_select(0, index)
        hidden = None
        if len(wanted.prompt_targets):
            assert sampled.hidden is not None
            hidden = sampled.hidden[len(plan.sample_rows) :]
        kept = torch.cuda.Event()
        kept.record()
        return functools.partial(self._read, wanted, lines, hidden, kept)

    def _read(
        self,
        wanted: LogprobPlan,
        lines: torch.Tensor,
        hidden: torch.Tensor | None,
        kept: torch.cuda.Event,
        tokens: Int32,
    ) -> tuple[TokenLogprobs, TokenLogprobs | None]:
        with torch.inference_mode(), torch.cuda.stream(self._side):
            self._side.wait_event(kept)
            lines.record_stream(self._side)
            output = position_logprobs(
                lambda start, stop: lines[start:stop],
                wanted.sample_index,
                tokens[wanted.sample_index],
                wanted.top_k,
                wanted.ids_indptr,
                wanted.ids,
            )
            if hidden is None:
                return output, None
            hidden.record_stream(self._side)
            return output, prompt_logprobs(hidden, self._model.logits, wanted)
