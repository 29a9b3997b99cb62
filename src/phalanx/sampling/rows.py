"""Sampling parameters and token history of all rows, resident on the device."""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch

from phalanx.core.errors import EngineError
from phalanx.core.sampling_params import MAX_STOP_TOKEN_IDS
from phalanx.core.step import EnteringRows, Int32
from phalanx.sampling.tensors import int32_table, to_device


class Uses(IntFlag):
    """What a row asks for beyond temperature. Kept on the host too, so that a step never asks the device."""

    PENALTY = 1  # frequency, presence or repetition: the row keeps a token history
    BIAS = 2
    MIN_NEW = 4
    SORT = 8  # top_k or top_p
    MIN_P = 16
    TEMPERATURE = 32  # not greedy


EAGER = Uses.PENALTY | Uses.BIAS | Uses.MIN_NEW | Uses.SORT | Uses.MIN_P


class SamplingRows:
    """Columns indexed by row; row 0 is padding.

    Attributes:
        uses: [num_rows] uint8 on the host, flags of `Uses`.
        temperature, top_p, min_p, frequency_penalty, presence_penalty, repetition_penalty: [num_rows] fp32.
        top_k, min_new_tokens: [num_rows] int32; top_k of vocab_size or -1 is off.
        prompt_lens: [num_rows] int32 on the device.
        host_prompt_lens, host_top_k: [num_rows] int32, copies on the host.
        seeds: [num_rows] int64.
        stop_ids: [num_rows, MAX_STOP_TOKEN_IDS] int32, padded with -1.
        bias_ids, bias_values: [num_rows, width] int32 (-1 pads) and fp32; width grows on demand from 0.
        history: [num_rows, max_context] int32, prompt then output ids of rows that use penalties; entries at
            or beyond the row's length are stale.
    """

    def __init__(self, num_rows: int, vocab_size: int, max_context: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.device = device
        self.uses: npt.NDArray[np.uint8] = np.zeros(num_rows, np.uint8)
        self.host_prompt_lens: Int32 = np.zeros(num_rows, np.int32)
        self.host_top_k: Int32 = np.zeros(num_rows, np.int32)
        # Columns of one dtype lie in one table, so that entering rows cost one scatter per table.
        self._floats = torch.zeros(num_rows, 6, dtype=torch.float32, device=device)
        (
            self.temperature,
            self.top_p,
            self.min_p,
            self.frequency_penalty,
            self.presence_penalty,
            self.repetition_penalty,
        ) = self._floats.unbind(1)
        self._ints = torch.zeros(num_rows, 3 + MAX_STOP_TOKEN_IDS, dtype=torch.int32, device=device)
        self.top_k, self.min_new_tokens, self.prompt_lens = self._ints[:, :3].unbind(1)
        self.stop_ids = self._ints[:, 3:]
        self.stop_ids.fill_(-1)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.bias_ids = torch.full((num_rows, 0), -1, dtype=torch.int32, device=device)
        self.bias_values = torch.zeros(num_rows, 0, dtype=torch.float32, device=device)
        self.history = int32_table(num_rows, max_context, device)

    def enter(self, entering: EnteringRows) -> None:
        """Overwrite all columns of the entering rows.

        Raises EngineError, before anything is written, for a bias id outside the vocabulary or more than
        MAX_STOP_TOKEN_IDS stop ids. Stop ids outside the vocabulary are kept; they never match.
        """
        if not entering.count:
            return
        stops = _padded(entering.stop_indptr, entering.stop_ids, MAX_STOP_TOKEN_IDS, -1)
        num_biases = np.diff(entering.bias_indptr)
        if len(entering.bias_ids) and not (
            entering.bias_ids.min() >= 0 and entering.bias_ids.max() < self.vocab_size
        ):
            raise EngineError(f"a logit_bias id lies outside the vocabulary of {self.vocab_size}")
        uses = _uses(entering, num_biases, self.vocab_size)
        ints = np.column_stack([entering.top_k, entering.min_new_tokens, entering.prompt_lens, stops])
        floats = np.column_stack(
            [
                entering.temperature,
                entering.top_p,
                entering.min_p,
                entering.frequency_penalty,
                entering.presence_penalty,
                entering.repetition_penalty,
            ]
        )
        rows = self.to_device(entering.rows, torch.int64)
        self._ints[rows] = self.to_device(ints, torch.int32)
        self._floats[rows] = self.to_device(floats, torch.float32)
        self.seeds[rows] = self.to_device(entering.seed, torch.int64)
        self.uses[entering.rows] = uses
        self.host_prompt_lens[entering.rows] = entering.prompt_lens
        self.host_top_k[entering.rows] = entering.top_k
        if len(entering.bias_ids):
            self._enter_bias(rows, entering, int(num_biases.max()))

    def _enter_bias(self, rows: torch.Tensor, entering: EnteringRows, widest: int) -> None:
        width = self.bias_ids.shape[1]
        if widest > width:
            grow = max(16, 1 << (widest - 1).bit_length()) - width
            self.bias_ids = torch.nn.functional.pad(self.bias_ids, (0, grow), value=-1)
            self.bias_values = torch.nn.functional.pad(self.bias_values, (0, grow))
            width += grow
        indptr = entering.bias_indptr
        self.bias_ids[rows] = self.to_device(_padded(indptr, entering.bias_ids, width, -1), torch.int32)
        values = _padded(indptr, entering.bias_values, width, 0)
        self.bias_values[rows] = self.to_device(values, torch.float32)

    def record_prompt(self, rows: Int32, positions: Int32, input_ids: Int32) -> None:
        """Note prompt tokens of rows that keep a history. rows, positions, input_ids: [T], one per token."""
        keeps = (self.uses[rows] & Uses.PENALTY) != 0
        if keeps.any():
            index = (
                self.to_device(rows[keeps], torch.int64),
                self.to_device(positions[keeps], torch.int64),
            )
            self.history[index] = self.to_device(input_ids[keeps], torch.int32)

    def record_output(self, rows: Int32, num_generated: Int32, tokens: torch.Tensor) -> None:
        """Note sampled tokens ([n] int32, device) of rows that keep a history, after `num_generated` others.

        A token beyond max_context is not noted.
        """
        positions = self.host_prompt_lens[rows] + num_generated
        keeps = np.flatnonzero(((self.uses[rows] & Uses.PENALTY) != 0) & (positions < self.max_context))
        if len(keeps):
            index = (
                self.to_device(rows[keeps], torch.int64),
                self.to_device(positions[keeps], torch.int64),
            )
            self.history[index] = tokens[self.to_device(keeps, torch.int64)]

    def to_device(self, array: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        """A host array as a tensor of this dtype where the rows lie."""
        return to_device(array, dtype, self.device)


def _uses(entering: EnteringRows, num_biases: Int32, vocab_size: int) -> npt.NDArray[np.uint8]:
    penalty = (
        (entering.frequency_penalty != 0)
        | (entering.presence_penalty != 0)
        | (entering.repetition_penalty != 1)
    )
    warm = entering.temperature > 0
    sort = warm & (((entering.top_k > 0) & (entering.top_k < vocab_size)) | (entering.top_p < 1))
    flags = (
        (penalty, Uses.PENALTY),
        (num_biases > 0, Uses.BIAS),
        (entering.min_new_tokens > 0, Uses.MIN_NEW),
        (sort, Uses.SORT),
        (warm & (entering.min_p > 0), Uses.MIN_P),
        (warm, Uses.TEMPERATURE),
    )
    return np.bitwise_or.reduce([mask.astype(np.uint8) * np.uint8(flag) for mask, flag in flags])


def _padded(indptr: Int32, values: npt.NDArray[np.generic], width: int, fill: int) -> npt.NDArray[np.generic]:
    """CSR to [k, width], padded with `fill`. Raises EngineError if a row is longer than `width`."""
    lens = np.diff(indptr)
    if len(lens) and lens.max() > width:
        raise EngineError(f"a row has {lens.max()} entries where {width} fit")
    out = np.full((len(lens), width), fill, values.dtype)
    out[np.arange(width) < lens[:, None]] = values[indptr[0] : indptr[-1]]
    return out
