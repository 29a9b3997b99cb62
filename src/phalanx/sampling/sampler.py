"""Logits to token ids, for a batch of rows with settings of their own."""

from __future__ import annotations

import numpy as np
import torch

from phalanx.core.step import Bool, Finish, Int32, Int64
from phalanx.sampling.adjust import adjust_logits
from phalanx.sampling.choose import DRAW_BLOCK, argmax_rows, draw_rows
from phalanx.sampling.filters import apply_min_p, keep_top
from phalanx.sampling.rows import EAGER, SamplingRows, Uses
from phalanx.sampling.uniform import row_keys

# fp32 logits in work at once: 4 MB, near the caches. On 2 Zen 4 cores 1024 temperature rows of 49152 cost
# about the same in chunks of 16 and of 32 lines, a fifth more in chunks of 4.
_CHUNK_ELEMENTS = 1 << 20
_CHUNK_ELEMENTS_CUDA = 1 << 24  # 64 MB, and a few times that with what a sort takes: few launches, bounded


def scratch_shape(vocab_size: int, device: str) -> tuple[int, int]:
    """Lines that `Sampler` has in work at once, and their width. device: "cuda" or "cpu"."""
    width = -(-vocab_size // DRAW_BLOCK) * DRAW_BLOCK
    elements = _CHUNK_ELEMENTS_CUDA if device == "cuda" else _CHUNK_ELEMENTS
    return max(1, elements // width), width


class Sampler:
    """Chooses tokens by the parameters in `table`.

    Every row's token is a function of its own logits, parameters, history, seed and number of generated
    tokens; rows that share the batch change nothing, bit for bit.
    """

    def __init__(self, table: SamplingRows) -> None:
        self.table = table
        # Columns beyond the vocabulary stay at -inf and so get probability 0.
        self._chunk, width = scratch_shape(table.vocab_size, table.device.type)
        self._scratch = torch.full((self._chunk, width), -torch.inf, device=table.device)

    def sample(
        self, logits: torch.Tensor, rows: Int32, num_generated: Int32, needs_eager: Bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per row.

        Args:
            logits: [s, vocab], any float dtype; not changed.
            rows: [s] int32 on the host, distinct.
            num_generated: [s] int32, output tokens each row has before this one.
            needs_eager: [s] bool; where false, penalties, bias, filters and min_new_tokens are left out.

        Returns:
            tokens: [s] int32 on the device; 0 where finish is ERROR.
            finish: [s] uint8, NONE, STOP (the token is one of the row's stop ids) or ERROR (the largest
                logit, before or after adjustment, is not finite: any NaN, any +inf, or nothing but -inf).
        """
        table = self.table
        if not len(rows):
            empty = torch.zeros(0, dtype=torch.int32, device=table.device)
            return empty, empty.to(torch.uint8)
        index = table.to_device(rows, torch.int64)
        tokens, maxima = argmax_rows(logits)
        finite = torch.isfinite(maxima)
        uses = table.uses[rows]
        eager = needs_eager & ((uses & EAGER) != 0)
        warm = (uses & Uses.TEMPERATURE) != 0
        if warm.any():
            keys = row_keys(table.seeds[index], table.to_device(num_generated, torch.int64))
        else:
            keys = torch.zeros(len(rows), dtype=torch.int64, device=table.device)
        for lines in self._chunks(np.flatnonzero(warm & ~eager)):
            line_index = table.to_device(lines, torch.int64)
            scaled = self._load(logits, lines)
            self._scale(scaled, maxima[line_index].float(), rows[lines])
            tokens[line_index] = draw_rows(torch.softmax(scaled, 1), keys[line_index])
        for lines in self._chunks(np.flatnonzero(eager)):
            line_index = table.to_device(lines, torch.int64)
            chosen, top = self._eager(
                self._load(logits, lines), rows[lines], num_generated[lines], keys[line_index]
            )
            tokens[line_index] = chosen
            finite[line_index] &= torch.isfinite(top)
        tokens = tokens.masked_fill_(~finite, 0).to(torch.int32)
        table.record_output(rows, num_generated, tokens)
        stopped = (table.stop_ids[index] == tokens[:, None]).any(1)
        finish = torch.where(stopped, int(Finish.STOP), int(Finish.NONE)).masked_fill_(~finite, Finish.ERROR)
        return tokens, finish.to(torch.uint8)

    def _load(self, logits: torch.Tensor, lines: Int64) -> torch.Tensor:
        """Lines of the logits in the fp32 scratch, [n, width]."""
        scaled = self._scratch[: len(lines)]
        if lines[-1] - lines[0] + 1 == len(lines):
            picked = logits[lines[0] : lines[0] + len(lines)]
        else:
            picked = logits.index_select(0, self.table.to_device(lines, torch.int64))
        scaled[:, : logits.shape[1]] = picked
        return scaled

    def _scale(self, scaled: torch.Tensor, maxima: torch.Tensor, rows: Int32) -> None:
        """(logits - max) / temperature, in place; the largest becomes 0. Greedy rows become NaN somewhere."""
        temperature = self.table.temperature[self.table.to_device(rows, torch.int64)]
        # -inf - -inf would put NaN into the scratch's padding columns; such rows end in ERROR anyway.
        maxima = torch.where(torch.isfinite(maxima), maxima, torch.zeros_like(maxima))
        scaled.sub_(maxima[:, None]).div_(temperature[:, None])

    def _eager(
        self, scaled: torch.Tensor, rows: Int32, num_generated: Int32, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n] int64 and largest adjusted logits [n] of rows that ask for more than temperature."""
        table = self.table
        vocab = table.vocab_size
        adjust_logits(scaled[:, :vocab], table, rows, num_generated)
        greedy_tokens, maxima = argmax_rows(scaled[:, :vocab])
        uses = table.uses[rows]
        warm = (uses & Uses.TEMPERATURE) != 0
        if not warm.any():
            return greedy_tokens, maxima
        self._scale(scaled, maxima, rows)
        probs = torch.softmax(scaled, 1)
        index = table.to_device(rows, torch.int64)
        sort = np.flatnonzero((uses & Uses.SORT) != 0)
        if len(sort):
            at = table.to_device(sort, torch.int64)
            top_k, top_p = table.top_k[index[at]], table.top_p[index[at]]
            max_top_k = int(table.host_top_k[rows[sort]].max())
            if len(sort) == len(rows):
                probs = keep_top(scaled, probs, top_k, top_p, max_top_k)
            else:
                probs[at] = keep_top(scaled[at], probs[at], top_k, top_p, max_top_k)
        if ((uses & Uses.MIN_P) != 0).any():
            apply_min_p(scaled, probs, table.min_p[index])
        drawn = draw_rows(probs, keys)
        return torch.where(table.to_device(warm, torch.bool), drawn, greedy_tokens), maxima

    def _chunks(self, lines: Int64) -> list[Int64]:
        return [lines[i : i + self._chunk] for i in range(0, len(lines), self._chunk)]
