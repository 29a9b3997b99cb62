"""From a StepPlan to device tensors: advances the device rows and builds the ForwardBatch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from phalanx.attention.base import DecodePart, ForwardBatch, PrefillPart
from phalanx.core.errors import EngineError
from phalanx.core.step import Int32, Int64, LogprobPlan, PrefillChunks, StepPlan
from phalanx.engine.buckets import bucket_of
from phalanx.engine.rows import DeviceRows
from phalanx.engine.upload import upload
from phalanx.kernels import StepPrepBuffers, create_kv_indices, step_prep
from phalanx.sampling.rows import SamplingRows

_HEADER = 4  # entries before the lanes, so that they lie at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Host arrays with one entry per prompt token of a step. rows: [t] int32; positions: [t] int64."""

    rows: Int32
    positions: Int64

    @classmethod
    def of(cls, prefill: PrefillChunks) -> PromptTokens:
        """Expand chunks to tokens."""
        ends = np.cumsum(prefill.lens, dtype=np.int64)
        shift = np.repeat(prefill.starts - (ends - prefill.lens), prefill.lens)
        return cls(
            rows=np.repeat(prefill.rows, prefill.lens),
            positions=np.arange(len(shift), dtype=np.int64) + shift,
        )


@dataclass(frozen=True, slots=True)
class SentPlan:
    """Device copies of a plan's arrays.

    decode: [4 + bucket] int32: the number of live lanes, three unused, the row of each lane (0: padding);
    None without decode rows. arrays: the others by name, as `BatchBuilder.send` lists them.
    """

    decode: torch.Tensor | None
    arrays: dict[str, torch.Tensor]


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

    def send(self, plan: StepPlan) -> SentPlan:
        """Copy a plan's arrays to the device and apply its changes to the device rows.

        Raises EngineError, before anything is written, for rows, pages, slots or positions out of range.
        """
        self._check(plan)
        sent = self.copy(plan)
        self._sampling.enter(plan.entering)
        if len(plan.grants.rows):
            self._rows.grant(sent.arrays)
        if plan.prefill.count:
            self._rows.store_prompt(sent.arrays)
            tokens = PromptTokens.of(plan.prefill)
            self._sampling.record_prompt(tokens.rows, tokens.positions, plan.prefill.input_ids)
        return sent

    def copy(self, plan: StepPlan) -> SentPlan:
        """Copy a plan's arrays to the device and change nothing there."""
        arrays = {
            "sample_rows": plan.sample_rows.astype(np.int64),
            "num_generated": plan.num_generated,
            "logits_index": _logits_index(plan, self._num_lanes(len(plan.decode_rows))),
        }
        if len(plan.decode_rows):
            arrays["decode"] = self._lanes(plan.decode_rows)
        if len(plan.grants.rows):
            arrays |= self._rows.grant_arrays(plan.grants)
        if plan.prefill.count:
            arrays |= _prefill_arrays(plan.prefill)
        sent = upload(arrays, self._rows.device)
        return SentPlan(sent.pop("decode", None), sent)

    def batch(self, plan: StepPlan, sent: SentPlan) -> ForwardBatch:
        """Advance the decode rows and join them with the prompt chunks.

        `logits_index` lists the tokens of `plan.sample_rows` and then, if prompt log-probabilities are
        wanted, the token before each of `plan.logprobs.prompt_targets`.
        """
        ids, positions, slots = [], [], []
        num_decode = self._num_lanes(len(plan.decode_rows))
        decode = None
        if sent.decode is not None:
            buffers = self.advance(sent.decode)
            decode = self._decode_part(buffers, num_decode)
            ids.append(self._rows.last_tokens[decode.rows].long())
            positions.append(buffers.positions[:num_decode])
            slots.append(buffers.slot_mapping[:num_decode])
        if plan.prefill.count:
            ids.append(sent.arrays["input_ids"])
            positions.append(sent.arrays["positions"])
            slots.append(sent.arrays["slots"])
        return ForwardBatch(
            input_ids=_joined(ids, self._rows.device),
            positions=_joined(positions, self._rows.device),
            slot_mapping=_joined(slots, self._rows.device),
            req_to_token=self._rows.req_to_token,
            logits_index=sent.arrays["logits_index"],
            num_decode=num_decode,
            decode=decode,
            prefill=_prefill_part(plan.prefill, sent.arrays),
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
        bucket = len(inputs) - _HEADER
        if bucket not in self._buffers:
            self._buffers[bucket] = self._allocate(bucket)
        buffers = self._buffers[bucket]
        step_prep(
            inputs[_HEADER:],
            inputs[:1],
            self._rows.seq_lens,
            self._rows.req_to_token,
            self._rows.granted_pages,
            buffers,
            page_size=self._page_size,
        )
        if self._indices not in (None, "fused"):
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
        return buffers

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

    def _lanes(self, rows: Int32) -> Int32:
        lanes = np.zeros(_HEADER + bucket_of(len(rows), self._buckets), np.int32)
        lanes[0] = len(rows)
        lanes[_HEADER : _HEADER + len(rows)] = rows
        return lanes

    def _num_lanes(self, num_rows: int) -> int:
        return bucket_of(num_rows, self._buckets) if self._pad_decode and num_rows else num_rows

    def _check(self, plan: StepPlan) -> None:
        """A wrong index would overwrite a neighbour on the CPU and kill the process on CUDA."""
        prefill, grants, step = plan.prefill, plan.grants, plan.step_id
        num_rows, num_slots = self._rows.num_rows, self._num_pages * self._page_size
        for name, rows in (
            ("decode", plan.decode_rows),
            ("sampled", plan.sample_rows),
            ("entering", plan.entering.rows),
            ("granted", grants.rows),
            ("prompt", prefill.rows),
        ):
            _check_range(f"step {step}: {name} row", rows, 1, num_rows)
        _check_range(f"step {step}: page", grants.page_ids, 1, self._num_pages)
        _check_range(f"step {step}: page number", grants.page_index, 0, self._rows.max_context)
        _check_range(f"step {step}: slot", prefill.slots, self._page_size, num_slots)
        _check_range(f"step {step}: chunk start", prefill.starts, 0, self._rows.max_context)
        ends = prefill.starts + prefill.lens
        _check_range(f"step {step}: chunk end", ends, 1, self._rows.max_context + 1)
        if not len(prefill.slots) == len(prefill.input_ids) == int(prefill.lens.sum()):
            raise EngineError(
                f"step {step}: prompt chunks of {int(prefill.lens.sum())} tokens in all carry "
                f"{len(prefill.input_ids)} ids and {len(prefill.slots)} slots"
            )
        if len(plan.sample_rows) != len(plan.decode_rows) + int(prefill.is_last.sum()):
            raise EngineError(f"step {step}: sample_rows does not list the decode rows and the last chunks")


def _check_range(what: str, values: Int32, low: int, end: int) -> None:
    if len(values) and (values.min() < low or values.max() >= end):
        bad = values[(values < low) | (values >= end)][0]
        raise EngineError(f"{what} {bad} is outside [{low}, {end})")


def _joined(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefill_arrays(prefill: PrefillChunks) -> dict[str, Int32 | Int64]:
    tokens = PromptTokens.of(prefill)
    indptr = np.zeros(prefill.count + 1, np.int32)
    np.cumsum(prefill.lens, out=indptr[1:])
    return {
        "input_ids": prefill.input_ids.astype(np.int64),
        "positions": tokens.positions,
        "slots": prefill.slots.astype(np.int64),
        "token_rows": tokens.rows.astype(np.int64),
        "chunk_rows": prefill.rows.astype(np.int64),
        "chunk_starts": prefill.starts,
        "chunk_ends": prefill.starts + prefill.lens,
        "chunk_indptr": indptr,
    }


def _prefill_part(prefill: PrefillChunks, arrays: dict[str, torch.Tensor]) -> PrefillPart | None:
    if not prefill.count:
        return None
    return PrefillPart(
        rows=arrays["chunk_rows"],
        starts=prefill.starts.tolist(),
        lens=prefill.lens.tolist(),
        device_starts=arrays["chunk_starts"],
        indptr=arrays["chunk_indptr"],
    )


def _logits_index(plan: StepPlan, num_lanes: int) -> Int64:
    """[s + prompt targets] int64: tokens of the step whose logits are wanted."""
    ends = num_lanes + np.cumsum(plan.prefill.lens, dtype=np.int64)
    parts = [np.arange(len(plan.decode_rows), dtype=np.int64), ends[plan.prefill.is_last] - 1]
    if plan.logprobs is not None:
        parts.append(_before_targets(plan.logprobs, plan.prefill, ends))
    return np.concatenate(parts)


def _before_targets(logprobs: LogprobPlan, prefill: PrefillChunks, ends: Int64) -> Int64:
    """Index in the step of the token before each prompt target."""
    chunks = logprobs.prompt_chunk
    counts = np.diff(logprobs.prompt_indptr)
    first = (ends - prefill.lens)[chunks] + logprobs.prompt_start - 1 - prefill.starts[chunks]
    offset = np.arange(len(logprobs.prompt_targets)) - np.repeat(logprobs.prompt_indptr[:-1], counts)
    return np.asarray(np.repeat(first, counts) + offset, np.int64)
