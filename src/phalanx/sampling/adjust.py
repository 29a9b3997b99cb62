"""Changes to logits before temperature, in place: penalties, logit bias, end tokens held back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from phalanx.core.step import Bool, Int32
from phalanx.sampling.rows import SamplingRows, Uses


def adjust_logits(logits: torch.Tensor, table: SamplingRows, rows: Int32, num_generated: Int32) -> None:
    """Apply what each row asks for, in the order penalties, bias, min_new_tokens.

    Args:
        logits: [n, vocab] fp32, changed in place.
        table: parameters and history.
        rows: [n] int32, the row of each line.
        num_generated: [n] int32, output tokens each row has so far.
    """
    uses = table.uses[rows]
    _for_lines(_penalise, logits, table, rows, num_generated, (uses & Uses.PENALTY) != 0)
    _for_lines(_add_bias, logits, table, rows, num_generated, (uses & Uses.BIAS) != 0)
    _for_lines(_hold_back_stops, logits, table, rows, num_generated, (uses & Uses.MIN_NEW) != 0)


def _for_lines(
    change: Callable[[torch.Tensor, SamplingRows, Int32, Int32], None],
    logits: torch.Tensor,
    table: SamplingRows,
    rows: Int32,
    num_generated: Int32,
    wanted: Bool,
) -> None:
    """Run `change` on the wanted lines alone, without a copy where that is all of them."""
    if wanted.all():
        change(logits, table, rows, num_generated)
    elif wanted.any():
        lines = np.flatnonzero(wanted)
        index = table.to_device(lines, torch.int64)
        part = logits[index]
        change(part, table, rows[lines], num_generated[lines])
        logits[index] = part


def _penalise(logits: torch.Tensor, table: SamplingRows, rows: Int32, num_generated: Int32) -> None:
    """Repetition first, then frequency and presence, as vLLM does. Work grows with the history alone."""
    vocab = logits.shape[1]
    lens = table.host_prompt_lens[rows] + num_generated
    longest = min(int(lens.max()), table.max_context)
    index = table.to_device(rows, torch.int64)
    tokens = table.history[index, :longest].long()
    at = torch.arange(longest, device=logits.device)
    known = at < table.to_device(lens, torch.int64)[:, None]
    produced = known & (at >= table.prompt_lens[index][:, None])
    # Places beyond the row's length repeat its first token: writing the same value twice is harmless.
    tokens = torch.where(known, tokens, tokens[:, :1])
    counts = torch.zeros(len(rows), vocab, dtype=torch.float32, device=logits.device)
    counts = counts.scatter_add_(1, tokens, produced.float()).gather(1, tokens)
    values = logits.gather(1, tokens)
    repetition = table.repetition_penalty[index][:, None]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * table.frequency_penalty[index][:, None]
    values -= (counts > 0) * table.presence_penalty[index][:, None]
    logits.scatter_(1, tokens, values)


def _add_bias(logits: torch.Tensor, table: SamplingRows, rows: Int32, num_generated: Int32) -> None:
    index = table.to_device(rows, torch.int64)
    # Padding (-1, value 0) adds nothing to column 0.
    logits.scatter_add_(1, table.bias_ids[index].long().clamp_(min=0), table.bias_values[index])


def _hold_back_stops(logits: torch.Tensor, table: SamplingRows, rows: Int32, num_generated: Int32) -> None:
    """-inf at the stop ids of rows that have not reached min_new_tokens."""
    index = table.to_device(rows, torch.int64)
    early = table.to_device(num_generated, torch.int32) < table.min_new_tokens[index]
    stops = table.stop_ids[index].long()
    held = early[:, None] & (stops >= 0) & (stops < logits.shape[1])
    amounts = torch.zeros(stops.shape, dtype=torch.float32, device=logits.device)
    amounts.masked_fill_(held, -torch.inf)
    logits.scatter_add_(1, stops.masked_fill(~held, 0), amounts)
