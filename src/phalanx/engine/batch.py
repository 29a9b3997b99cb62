"""From a StepPlan to device tensors: advances the device rows and builds the ForwardBatch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from phalanx.attention.base import DecodePart, ForwardBatch, PrefillPart
from phalanx.core.step import PrefillChunks, StepPlan
from phalanx.engine.buckets import MixedShape, bucket_of
from phalanx.engine.launch_times import LaunchClock
from phalanx.engine.plan_arrays import HEADER, PromptTokens, decode_inputs, padded, plan_arrays
from phalanx.engine.plan_check import check_plan
from phalanx.engine.rows import DeviceRows
from phalanx.engine.upload import upload
from phalanx.kernels import StepPrepBuffers, create_kv_indices, step_prep
from phalanx.sampling.rows import SamplingRows


@dataclass(frozen=True, slots=True)
class SentPlan:
    """Device copies of a plan's arrays.

    decode: [4 + bucket] int32: the number of live lanes, three unused, the row of each lane (0: padding);
    None without decode rows. arrays: the others by name: `plan_arrays` and `DeviceRows.grant_arrays`. whole:
    the memory that they are views of, grants last.
    """

    decode: torch.Tensor | None
    arrays: dict[str, torch.Tensor]
    whole: torch.Tensor


class BatchBuilder:
    """Turns plans into batches. Keeps one set of step-preparation buffers per bucket of decode rows.

    Buffers are reused by the next step: a batch is valid until the next one is built.

    Args:
        rows, sampling: what the plans change.
        num_pages, page_size: of the KV pool.
        buckets: sizes of decode batches, ascending; the largest holds all rows.
        pad_decode: the model runs over whole buckets; else over the live lanes alone.
        indices: who fills kv_indices for attention that reads them: "fused" (`step_prep`) or a backend of
            `create_kv_indices`, of which "naive" and "torch" read lengths on the host. None: nobody.

    Attributes:
        clock: told when a step's inputs are queued, and how long its kv_indices took.
    """

    def __init__(
        self,
        rows: DeviceRows,
        sampling: SamplingRows,
        *,
        num_pages: int,
        page_size: int,
        buckets: list[int],
        pad_decode: bool = False,
        indices: str | None = None,
    ) -> None:
        self._rows = rows
        self._sampling = sampling
        self._num_pages = num_pages
        self._page_size = page_size
        self._buckets = buckets
        self._pad_decode = pad_decode
        self._indices = indices
        # No page is in two rows, but for page 0 of the padding lanes; all buckets share the room.
        self._kv_indices = None
        if indices is not None:
            self._kv_indices = torch.zeros(num_pages + buckets[-1], dtype=torch.int32, device=rows.device)
        self._buffers: dict[int, StepPrepBuffers] = {}
        self.clock = LaunchClock()

    def send(self, plan: StepPlan, shape: MixedShape | None = None) -> SentPlan:
        """Copy a plan's arrays to the device and apply its changes to the device rows.

        shape: pad them to the sizes of this captured step.

        Raises EngineError, before anything is written, for rows, pages, slots or positions out of range.
        """
        check_plan(
            plan,
            num_rows=self._rows.num_rows,
            max_context=self._rows.max_context,
            num_pages=self._num_pages,
            page_size=self._page_size,
        )
        sent = self.copy(plan, shape)
        self._sampling.enter(plan.entering)
        if len(plan.grants.rows):
            self._rows.grant(sent.arrays)
        if plan.prefill.count:
            self._rows.store_prompt(sent.arrays)
            tokens = PromptTokens.of(plan.prefill)
            self._sampling.record_prompt(tokens.rows, tokens.positions, plan.prefill.input_ids)
        self.clock.prepared()
        return sent

    def copy(self, plan: StepPlan, shape: MixedShape | None = None) -> SentPlan:
        """Copy a plan's arrays to the device and change nothing there. See `send`."""
        num_decode = len(plan.decode_rows)
        if shape is not None:
            lanes = shape.lanes
            arrays = padded(plan_arrays(plan, lanes), shape)
        else:
            lanes = bucket_of(num_decode, self._buckets) if num_decode else 0
            arrays = plan_arrays(plan, lanes if self._pad_decode else num_decode)
        if lanes:
            arrays["decode"] = decode_inputs(plan.decode_rows, lanes)
        if len(plan.grants.rows):
            arrays |= self._rows.grant_arrays(plan.grants)
        whole, sent = upload(arrays, self._rows.device)
        return SentPlan(sent.pop("decode", None), sent, whole)

    def batch(self, sent: SentPlan, num_decode: int, prefill: PrefillPart | None) -> ForwardBatch:
        """Advance the decode rows and join them with the prompt chunks.

        `logits_index` lists the tokens of `plan.sample_rows` and then, if prompt log-probabilities are
        wanted, the token before each of `plan.logprobs.prompt_targets`.
        """
        ids, positions, slots = [], [], []
        decode, num_lanes = None, 0
        if sent.decode is not None:
            buffers = self.advance(sent.decode)
            num_lanes = buffers.bucket if self._pad_decode else num_decode
            decode = self._decode_part(buffers, num_lanes)
            ids.append(self._rows.last_tokens[decode.rows].long())
            positions.append(buffers.positions[:num_lanes])
            slots.append(buffers.slot_mapping[:num_lanes])
        if prefill is not None:
            ids.append(sent.arrays["input_ids"])
            positions.append(sent.arrays["positions"])
            slots.append(sent.arrays["slots"])
        return ForwardBatch(
            input_ids=_joined(ids, self._rows.device),
            positions=_joined(positions, self._rows.device),
            slot_mapping=_joined(slots, self._rows.device),
            req_to_token=self._rows.req_to_token,
            logits_index=sent.arrays["logits_index"],
            num_decode=num_lanes,
            decode=decode,
            prefill=prefill,
        )

    def decode_batch(self, bucket: int) -> ForwardBatch:
        """A step of nothing but decode rows, over the whole bucket that `advance` has filled."""
        buffers = self._buffers[bucket]
        return ForwardBatch(
            input_ids=self._rows.last_tokens.index_select(0, buffers.rows),
            positions=buffers.positions,
            slot_mapping=buffers.slot_mapping,
            req_to_token=self._rows.req_to_token,
            logits_index=None,
            num_decode=bucket,
            decode=self._decode_part(buffers, bucket),
            prefill=None,
        )

    def advance(self, inputs: torch.Tensor) -> StepPrepBuffers:
        """Advance the decode rows and fill the buffers of their bucket.

        inputs: [4 + bucket] int32, as `SentPlan.decode`. Reads nothing on the host, but for `indices`.
        """
        bucket = len(inputs) - HEADER
        if bucket not in self._buffers:
            self._buffers[bucket] = self._allocate(bucket)
        buffers = self._buffers[bucket]
        step_prep(
            inputs[HEADER:],
            inputs[:1],
            self._rows.seq_lens,
            self._rows.req_to_token,
            self._rows.granted_pages,
            buffers,
            page_size=self._page_size,
        )
        if self._indices not in (None, "fused"):
            self._build_indices(buffers)
        self.clock.prepared()
        return buffers

    def _build_indices(self, buffers: StepPrepBuffers) -> None:
        begin = time.perf_counter_ns()
        if self._indices in ("naive", "torch") and self._rows.device.type == "cuda":
            # They would wait inside, when they read the lengths: so the wait is told from the work.
            torch.cuda.current_stream().synchronize()
        ready = time.perf_counter_ns()
        create_kv_indices(
            self._rows.req_to_token,
            buffers.rows,
            buffers.seq_lens,
            buffers.kv_indptr,
            None,
            self._kv_indices,
            page_size=self._page_size,
            backend=self._indices,
        )
        self.clock.built_indices(ready - begin, time.perf_counter_ns() - ready)

    def _allocate(self, bucket: int) -> StepPrepBuffers:
        buffers = StepPrepBuffers.allocate(bucket, None, self._rows.device)
        return replace(buffers, kv_indices=self._kv_indices) if self._indices == "fused" else buffers

    def _decode_part(self, buffers: StepPrepBuffers, num_lanes: int) -> DecodePart:
        return DecodePart(
            rows=buffers.rows[:num_lanes],
            seq_lens=buffers.seq_lens[:num_lanes],
            kv_indptr=buffers.kv_indptr[: num_lanes + 1],
            kv_indices=self._kv_indices,
            last_page_len=buffers.last_page_len[:num_lanes],
        )


def _joined(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def prefill_part(prefill: PrefillChunks, arrays: dict[str, torch.Tensor]) -> PrefillPart | None:
    """The chunks of a plan, whose arrays were sent; None without any."""
    if not prefill.count:
        return None
    return PrefillPart(
        rows=arrays["chunk_rows"],
        starts=prefill.starts.tolist(),
        lens=prefill.lens.tolist(),
        device_starts=arrays["chunk_starts"],
        indptr=arrays["chunk_indptr"],
        longest=int(prefill.lens.max()),
    )
