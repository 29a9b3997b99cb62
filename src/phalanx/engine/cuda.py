"""Executes StepPlans on CUDA without waiting for the device.

`launch` runs in the caller's thread: it only queues work, and the device runs it while the caller plans the
next step. Nothing between a plan and its handle asks the device for a value.
"""

from __future__ import annotations

import functools
import logging

import numpy as np
import torch
import torch.nn.functional as F

from phalanx.attention.base import AttentionBackend, ForwardBatch, PrefillPart
from phalanx.config.groups import Settings
from phalanx.core.step import StepPlan
from phalanx.engine.batch import BatchBuilder, SentPlan, prefill_part
from phalanx.engine.buckets import MixedShape, bucket_of, decode_buckets
from phalanx.engine.captures import captured_steps
from phalanx.engine.engine import Model
from phalanx.engine.graphs import StepGraphs
from phalanx.engine.launch_times import LaunchTimes
from phalanx.engine.logprob_reader import LogprobReader
from phalanx.engine.plan_arrays import HEADER
from phalanx.engine.rows import DeviceRows, grant_ring
from phalanx.engine.sampled import CudaHandle, FailedHandle, Sampled
from phalanx.engine.warm_up import (
    LONGEST_TRIED,
    most_prompt_tokens,
    padding_prompts,
    pin_buffers,
    prompt_sizes,
    with_bar,
)
from phalanx.kernels import sample
from phalanx.kvcache.pool import KVPool
from phalanx.sampling.rows import EAGER, SamplingRows
from phalanx.sampling.sampler import Sampler
from phalanx.sampling.tensors import to_device

logger = logging.getLogger(__name__)

_EAGER_LINES = 512  # logits that the eager sampler copies at a time


class CudaEngine:
    """Owns the device state of all rows and runs steps in the order launched, on one stream.

    Decode rows always fill a whole bucket, padded with row 0. A step of decode rows alone replays the CUDA
    graph of its bucket where there is one; a step with prompt chunks one that holds both. Where none does,
    steps run eagerly: those keep the device busy for about as long as the host takes to queue them.

    Args:
        settings: everything settled.
        model: on `device`, with its weights.
        pool, attn, device: where K and V lie, and who attends to them.
    """

    def __init__(
        self, settings: Settings, model: Model, pool: KVPool, attn: AttentionBackend, device: torch.device
    ) -> None:
        scheduler, vocab_size = settings.scheduler, settings.model.vocab_size
        num_rows = scheduler.max_running_requests + 1
        self._device = device
        self._model = model
        self._pool = pool
        self._attn = attn
        self._buckets = decode_buckets(scheduler.max_running_requests)
        num_slots = pool.num_slots - pool.page_size
        self._captured, self._mixed_shapes = captured_steps(settings, num_slots)
        self._most_prompt_tokens = most_prompt_tokens(scheduler, num_slots)
        self._rows = DeviceRows(
            num_rows, scheduler.context_length, grant_ring(scheduler, pool.page_size), device
        )
        self._sampling = SamplingRows(num_rows, vocab_size, scheduler.context_length, device)
        self._eager_sampler = Sampler(self._sampling)
        self._batches = BatchBuilder(
            self._rows,
            self._sampling,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            buckets=self._buckets,
            pad_decode=True,
            indices=settings.engine.kv_indices_backend,
        )
        self._prepare_inside = settings.engine.prepares_inside
        self._wanted_shapes = self._mixed_shapes.all()
        # One for all steps and graphs: at 4096 rows of 150,000 logits it takes over a gigabyte.
        lines = self._buckets[-1] + max((shape.chunks for shape in self._wanted_shapes), default=0)
        self._logits = torch.empty(lines, vocab_size, dtype=pool.k[0].dtype, device=device)
        self._stream = torch.cuda.Stream(device)
        self._logprobs = LogprobReader(model, device)
        self._graphs = StepGraphs()
        torch.cuda.synchronize(device)  # what was made on other streams is complete

    def warm_up(self, *, progress: bool) -> None:
        """Run every kind of step once on padding rows, so that kernels are compiled, and capture the graphs.

        Prompts of many sizes follow: what a step meets for the first time (a product's kernel that has to be
        loaded, memory that has to be asked for) can wait for the device, and would hold up a launch.

        progress: draw a bar on standard error.
        """
        title = "capturing steps" if self._captured else "warming up"
        steps = [functools.partial(self._capture_decode, bucket) for bucket in self._buckets[::-1]]
        steps += [functools.partial(self._capture_mixed, shape) for shape in self._wanted_shapes]
        sizes = prompt_sizes(self._most_prompt_tokens)
        steps += [functools.partial(self._try_prompts, size) for size in sizes[::-1]]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for step in with_bar(steps, title, progress):
                step()
        pin_buffers(self._most_prompt_tokens)
        torch.cuda.synchronize(self._device)
        self._batches.clock.take()  # of no step

    def _try_prompts(self, num_tokens: int) -> None:
        plan = padding_prompts(num_tokens, min(LONGEST_TRIED, self._rows.max_context))
        try:
            self._mixed(plan, self._batches.copy(plan))
        except torch.OutOfMemoryError:
            logger.warning(
                "a step of %d prompt tokens does not fit into the memory that is left: one of that size will "
                "fail; lower --mem-fraction-static or --chunked-prefill-size",
                num_tokens,
            )

    def _capture_decode(self, bucket: int) -> None:
        inputs = torch.zeros(HEADER + bucket, dtype=torch.int32, device=self._device)
        self._decode(inputs)
        if bucket not in self._captured:
            return
        if self._prepare_inside:
            self._graphs.capture(bucket, inputs, lambda: self._decode(inputs))
        else:
            before = functools.partial(self._batches.advance, inputs)
            self._graphs.capture(bucket, inputs, lambda: self._compute(bucket), before)

    def _capture_mixed(self, shape: MixedShape) -> None:
        sent = self._batches.copy(padding_prompts(1, 1), shape)

        def step() -> Sampled:
            arrays = sent.arrays
            part = PrefillPart(
                rows=arrays["chunk_rows"],
                starts=[],
                lens=[],
                device_starts=arrays["chunk_starts"],
                indptr=arrays["chunk_indptr"],
                longest=shape.tokens,
            )
            return self._run_mixed(sent, self._batches.batch(sent, shape.lanes, part), captured=True)

        step()
        self._graphs.capture(shape, sent.whole, step)

    def launch(self, plan: StepPlan) -> CudaHandle | FailedHandle:
        """Queue a step and return. The plan's arrays belong to the engine from here on.

        A step that cannot be queued says so when its handle is read; the rows it does not hold are as they
        were. Errors of the device itself are raised: nothing can run after one.
        """
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                return self._launch(plan)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            return FailedHandle(plan.step_id, error)

    def launch_times(self) -> LaunchTimes:
        """Where the host's time in the last launch went. Ask once after each."""
        return self._batches.clock.take()

    def close(self) -> None:
        """Wait for launched steps."""
        torch.cuda.synchronize(self._device)

    def _launch(self, plan: StepPlan) -> CudaHandle:
        shape = self._mixed_shape(plan)
        sent = self._batches.send(plan, shape)
        if shape is not None:
            sampled = self._graphs.replay(shape, sent.whole)
        elif plan.prefill.count or sent.decode is None:
            sampled = self._mixed(plan, sent)
        elif len(sent.decode) - HEADER in self._graphs:
            sampled = self._graphs.replay(len(sent.decode) - HEADER, sent.decode)
        else:
            sampled = self._decode(sent.decode)
        self._sample_eagerly(plan, sent, sampled)
        return CudaHandle(plan, sampled, self._logprobs.of_step(plan, sampled))

    def _decode(self, inputs: torch.Tensor) -> Sampled:
        """A step of one bucket of decode rows. inputs: see `SentPlan.decode`."""
        return self._compute(self._batches.advance(inputs).bucket)

    def _compute(self, bucket: int) -> Sampled:
        """Run the model over the decode rows that were advanced last, in device work alone."""
        batch = self._batches.decode_batch(bucket)
        assert batch.decode is not None
        hidden = self._model.forward(batch, self._pool, self._attn)
        sampled = Sampled.empty(self._model.logits(hidden, self._logits[: batch.num_decode]))
        table = self._sampling
        sample(
            sampled.logits,
            table.temperature,
            table.seeds,
            batch.decode.rows,
            table.stop_ids,
            seq_lens=batch.decode.seq_lens,
            prompt_lens=table.prompt_lens,
            tokens=sampled.tokens,
            finish=sampled.finish,
        )
        self._rows.store_sampled(batch.decode.rows, sampled.tokens)
        return sampled

    def _mixed_shape(self, plan: StepPlan) -> MixedShape | None:
        """The captured step that this one fits into, if it has prompt chunks and there is one."""
        prefill = plan.prefill
        if not prefill.count or not self._wanted_shapes:
            return None
        if plan.logprobs is not None and len(plan.logprobs.prompt_targets):
            return None
        shape = self._mixed_shapes.fit(
            num_decode=len(plan.decode_rows),
            num_tokens=len(prefill.input_ids),
            num_chunks=prefill.count,
        )
        return shape if shape in self._graphs else None

    def _mixed(self, plan: StepPlan, sent: SentPlan) -> Sampled:
        """A step with prompt chunks, eagerly."""
        part = prefill_part(plan.prefill, sent.arrays)
        batch = self._batches.batch(sent, len(plan.decode_rows), part)
        return self._run_mixed(sent, batch, captured=False)

    def _run_mixed(self, sent: SentPlan, batch: ForwardBatch, *, captured: bool) -> Sampled:
        rows, table = sent.arrays["sample_rows"], self._sampling
        hidden = self._model.forward(batch, self._pool, self._attn)
        lines = len(rows)
        if lines:
            # In another size the product may need a kernel that waits for the device when it is loaded.
            padded = lines if captured else bucket_of(lines, self._buckets)
            self._model.logits(_lengthened(hidden, padded)[:padded], self._logits[:padded])
        logits = self._logits[:lines]
        sampled = Sampled.empty(logits, None if captured else hidden)
        sample(
            logits,
            table.temperature,
            table.seeds,
            rows,
            table.stop_ids,
            num_generated=sent.arrays["num_generated"],
            tokens=sampled.tokens,
            finish=sampled.finish,
        )
        self._rows.store_sampled(rows, sampled.tokens)
        return sampled

    def _sample_eagerly(self, plan: StepPlan, sent: SentPlan, sampled: Sampled) -> None:
        """Sample again, with everything they ask for, the rows that want more than a temperature."""
        wants = plan.needs_eager & ((self._sampling.uses[plan.sample_rows] & EAGER) != 0)
        lines = np.flatnonzero(wants)
        for first in range(0, len(lines), _EAGER_LINES):
            part = lines[first : first + _EAGER_LINES]
            index = to_device(part, torch.int64, self._device)
            tokens, finish = self._eager_sampler.sample(
                sampled.logits.index_select(0, index),
                plan.sample_rows[part],
                plan.num_generated[part],
                plan.needs_eager[part],
            )
            sampled.tokens.index_copy_(0, index, tokens)
            sampled.finish.index_copy_(0, index, finish)
            self._rows.store_sampled(sent.arrays["sample_rows"].index_select(0, index), tokens)


def _lengthened(lines: torch.Tensor, count: int) -> torch.Tensor:
    """The lines, and zeros up to `count` of them. lines: [S, width]."""
    return lines if len(lines) >= count else F.pad(lines, (0, 0, 0, count - len(lines)))
