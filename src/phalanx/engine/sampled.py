"""What a step on CUDA leaves for the host, and the handle that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.core.errors import EngineError
from phalanx.core.step import Int32, StepPlan, StepResult, TokenLogprobs

_ALIGNMENT = 16  # bytes; Triton compiles another kernel for a pointer that is not aligned to so many

ReadLogprobs = Callable[[Int32], tuple[TokenLogprobs | None, TokenLogprobs | None]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens and finish flags of some lanes in one piece of memory, for one copy.

    packed: uint8. tokens: [lanes] int32 and finish: [lanes] uint8, views of its beginning and its end.
    logits: [lanes, vocab], valid until the next step. hidden: [S, hidden_size] or None where nobody asks for
    it.
    """

    packed: torch.Tensor
    tokens: torch.Tensor
    finish: torch.Tensor
    logits: torch.Tensor
    hidden: torch.Tensor | None = None

    @classmethod
    def empty(cls, logits: torch.Tensor, hidden: torch.Tensor | None = None) -> Sampled:
        """Room for the tokens of these logits ([lanes, vocab])."""
        lanes = logits.shape[0]
        start = -(-4 * lanes // _ALIGNMENT) * _ALIGNMENT
        packed = torch.empty(start + lanes, dtype=torch.uint8, device=logits.device)
        return cls(packed, packed[: 4 * lanes].view(torch.int32), packed[start:], logits, hidden)


class CudaHandle:
    """A launched step. Its tokens are on their way to pinned memory of its own."""

    def __init__(self, plan: StepPlan, sampled: Sampled, read_logprobs: ReadLogprobs | None) -> None:
        self.step_id = plan.step_id
        self._num_sampled, self._lanes = len(plan.sample_rows), len(sampled.tokens)
        self._read_logprobs = read_logprobs
        # On the compute stream: 20 KB take a few microseconds there, and the next step cannot overwrite them.
        self._host = torch.empty(sampled.packed.shape, dtype=torch.uint8, pin_memory=True)
        self._host.copy_(sampled.packed, non_blocking=True)
        self._ready = torch.cuda.Event()
        self._ready.record()

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._ready.query()

    def result(self) -> StepResult:
        """Wait for this step, not for those launched after it.

        Raises EngineError if its log-probabilities cannot be computed. Errors of the device are raised as
        they are: nothing can run after one.
        """
        self._ready.synchronize()
        packed, s = self._host.numpy(), self._num_sampled
        tokens, finish = packed[: 4 * s].view(np.int32).copy(), packed[len(packed) - self._lanes :][:s].copy()
        logprobs, prompt = None, None
        if self._read_logprobs is not None:
            try:
                logprobs, prompt = self._read_logprobs(tokens)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                raise EngineError.of_step(self.step_id, error) from error
        return StepResult(
            step_id=self.step_id,
            tokens=tokens,
            finish=finish,
            logprobs=logprobs,
            prompt_logprobs=prompt,
        )


class FailedHandle:
    """A step that could not be launched."""

    done = True

    def __init__(self, step_id: int, error: Exception) -> None:
        self.step_id = step_id
        self._error = error

    def result(self) -> StepResult:
        """Raise EngineError with the cause."""
        if isinstance(self._error, EngineError):
            raise self._error
        raise EngineError.of_step(self.step_id, self._error) from self._error
