"""From a StepPlan to device tensors: advances the device rows and builds the ForwardBatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from phalanx.attention.base import DecodePart, ForwardBatch, PrefillPart
from phalanx.core.errors import EngineError
from phalanx.core.step import Int32, Int64, LogprobPlan, PrefillChunks, StepPlan
from phalanx.engine.rows import DeviceRows
from phalanx.kernels import StepPrepBuffers, step_prep
from phalanx.sampling.rows import SamplingRows
from phalanx.sampling.tensors import to_device

_SMALLEST_BUCKET = 8


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


class BatchBuilder:
    """Turns plans into batches. Keeps one set of step-preparation buffers per bucket of decode rows.

    Buffers are reused by the next step: a batch is valid until the next `build`.
    """

    def __init__(self, rows: DeviceRows, sampling: SamplingRows, *, num_pages: int, page_size: int) -> None:
        self._rows = rows
        self._sampling = sampling
        self._num_pages = num_pages
        self._page_size = page_size
        self._buffers: dict[int, StepPrepBuffers] = {}

    def build(self, plan: StepPlan) -> ForwardBatch:
        """Apply a plan to the device rows and return the batch that runs it.

        `logits_index` lists the tokens of `plan.sample_rows` and then, if prompt log-probabilities are
        wanted, the token before each of `plan.logprobs.prompt_targets`.

        Raises EngineError, before anything is written, for rows, pages, slots or positions out of range.
        """
        self._check(plan)
        tokens = PromptTokens.of(plan.prefill)
        self._sampling.enter(plan.entering)
        self._rows.grant(plan.grants)
        if plan.prefill.count:
            self._rows.store_prompt(plan.prefill, tokens.rows, tokens.positions)
            self._sampling.record_prompt(tokens.rows, tokens.positions, plan.prefill.input_ids)
        ids, positions, slots = [], [], []
        num_decode = len(plan.decode_rows)
        decode = None
        if num_decode:
            decode, buffers = self._decode(plan.decode_rows)
            ids.append(self._rows.last_tokens[decode.rows].long())
            positions.append(buffers.positions[:num_decode])
            slots.append(buffers.slot_mapping[:num_decode])
        if plan.prefill.count:
            ids.append(self._long(plan.prefill.input_ids))
            positions.append(self._long(tokens.positions))
            slots.append(self._long(plan.prefill.slots))
        return ForwardBatch(
            input_ids=_joined(ids, self._rows.device),
            positions=_joined(positions, self._rows.device),
            slot_mapping=_joined(slots, self._rows.device),
            req_to_token=self._rows.req_to_token,
            logits_index=self._long(_logits_index(plan)),
            num_decode=num_decode,
            decode=decode,
            prefill=self._prefill(plan.prefill),
        )

    def _decode(self, rows: Int32) -> tuple[DecodePart, StepPrepBuffers]:
        n = len(rows)
        bucket = max(_SMALLEST_BUCKET, 1 << (n - 1).bit_length())
        if bucket not in self._buffers:
            self._buffers[bucket] = StepPrepBuffers.allocate(bucket, None, self._rows.device)
        buffers = self._buffers[bucket]
        lanes = np.zeros(bucket, np.int32)
        lanes[:n] = rows
        step_prep(
            to_device(lanes, torch.int32, self._rows.device),
            torch.tensor([n], dtype=torch.int32, device=self._rows.device),
            self._rows.seq_lens,
            self._rows.req_to_token,
            self._rows.granted_pages,
            buffers,
            page_size=self._page_size,
        )
        return DecodePart(rows=buffers.rows[:n], seq_lens=buffers.seq_lens[:n]), buffers

    def _prefill(self, prefill: PrefillChunks) -> PrefillPart | None:
        if not prefill.count:
            return None
        return PrefillPart(
            rows=self._long(prefill.rows), starts=prefill.starts.tolist(), lens=prefill.lens.tolist()
        )

    def _long(self, array: Int32 | Int64) -> torch.Tensor:
        return to_device(array, torch.int64, self._rows.device)

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


def _logits_index(plan: StepPlan) -> Int64:
    """[s + prompt targets] int64: tokens of the step whose logits are wanted."""
    num_decode = len(plan.decode_rows)
    ends = num_decode + np.cumsum(plan.prefill.lens, dtype=np.int64)
    parts = [np.arange(num_decode, dtype=np.int64), ends[plan.prefill.is_last] - 1]
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
