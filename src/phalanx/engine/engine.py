"""Executes StepPlans on the CPU: device rows, model, sampling, result."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from phalanx.attention.base import AttentionBackend, ForwardBatch
from phalanx.config.groups import Settings
from phalanx.core.errors import EngineError
from phalanx.core.step import StepPlan, StepResult
from phalanx.engine.batch import BatchBuilder, prefill_part
from phalanx.engine.buckets import power_of_two_buckets
from phalanx.engine.rows import DeviceRows, grant_ring
from phalanx.kvcache.pool import KVPool
from phalanx.sampling.logprobs import output_logprobs, prompt_logprobs
from phalanx.sampling.rows import SamplingRows
from phalanx.sampling.sampler import Sampler


class Model(Protocol):
    """What the engine needs of a model (`models.decoder.Decoder`)."""

    def forward(self, batch: ForwardBatch, pool: KVPool, attn: AttentionBackend) -> torch.Tensor:
        """Final hidden states [S, hidden_size] of the tokens in `batch.logits_index`."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size], written to `out` where that is given (on CUDA alone)."""
        ...


class StepHandle:
    """A launched step."""

    def __init__(self, step_id: int, future: Future[StepResult]) -> None:
        self.step_id = step_id
        self._future = future

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._future.done()

    def result(self) -> StepResult:
        """Wait for the step. Raises EngineError, with the cause, if it failed."""
        try:
            return self._future.result()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError.of_step(self.step_id, error) from error


class Engine:
    """Owns the device state of all rows and runs steps in the order launched.

    Steps run on one thread of its own, so that the caller plans the next step meanwhile; torch releases the
    interpreter lock while it computes. A step that fails leaves the rows it did not touch as they were; later
    steps run.
    """

    def __init__(
        self, settings: Settings, model: Model, pool: KVPool, attn: AttentionBackend, device: torch.device
    ) -> None:
        scheduler = settings.scheduler
        num_rows = scheduler.max_running_requests + 1
        ring = grant_ring(scheduler, pool.page_size)
        self._model = model
        self._pool = pool
        self._attn = attn
        self._rows = DeviceRows(num_rows, scheduler.context_length, ring, device)
        sampling = SamplingRows(num_rows, settings.model.vocab_size, scheduler.context_length, device)
        self._sampler = Sampler(sampling)
        self._batches = BatchBuilder(
            self._rows,
            sampling,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            buckets=power_of_two_buckets(scheduler.max_running_requests),
        )
        threads = settings.engine.num_threads
        self._executor = ThreadPoolExecutor(
            1,
            thread_name_prefix="engine",
            # The number of compute threads is a property of the thread that starts them.
            initializer=(lambda: torch.set_num_threads(threads)) if threads is not None else None,
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once. The plan's arrays belong to the engine from here on."""
        return StepHandle(plan.step_id, self._executor.submit(self._run, plan))

    def close(self) -> None:
        """Wait for launched steps and end the thread."""
        self._executor.shutdown(wait=True)

    def _run(self, plan: StepPlan) -> StepResult:
        with torch.inference_mode():
            sent = self._batches.send(plan)
            prefill = prefill_part(plan.prefill, sent.arrays)
            batch = self._batches.batch(sent, len(plan.decode_rows), prefill)
            hidden = self._model.forward(batch, self._pool, self._attn)
            num_sampled = len(plan.sample_rows)
            logits = self._model.logits(hidden[:num_sampled])
            tokens, finish = self._sampler.sample(
                logits, plan.sample_rows, plan.num_generated, plan.needs_eager
            )
            self._rows.store_sampled(sent.arrays["sample_rows"], tokens)
            host_tokens = tokens.cpu().numpy()
            wanted, prompt_wanted = plan.logprobs, None
            if wanted is not None and len(wanted.prompt_targets):
                prompt_wanted = prompt_logprobs(hidden[num_sampled:], self._model.logits, wanted)
            return StepResult(
                step_id=plan.step_id,
                tokens=host_tokens,
                finish=finish.cpu().numpy(),
                logprobs=None if wanted is None else output_logprobs(logits, host_tokens, wanted),
                prompt_logprobs=prompt_wanted,
            )
