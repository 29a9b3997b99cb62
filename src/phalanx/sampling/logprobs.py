"""Log-probabilities of the model's raw logits: before penalties, bias, temperature and filters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from phalanx.core.step import Float32, Int32, Int64, LogprobPlan, TokenLogprobs
from phalanx.sampling.tensors import to_device

# Positions whose fp32 logits are in work at once: 64 x 49152 fp32 are 12 MB. A prompt of 8192 positions would
# take 1.6 GB in one piece.
_SLICE = 64


def output_logprobs(logits: torch.Tensor, tokens: Int32, plan: LogprobPlan) -> TokenLogprobs:
    """Log-probabilities at the sampled positions that asked.

    Args:
        logits: [s, vocab] raw logits in the order of sample_rows.
        tokens: [s] int32, the sampled tokens, on the host.
        plan: its output part says which positions, how many alternatives and which ids.
    """
    index = plan.sample_index

    def lines(start: int, stop: int) -> torch.Tensor:
        return logits.index_select(0, to_device(index[start:stop], torch.int64, logits.device))

    asked = _repeat_csr(plan.ids_indptr, plan.ids, np.ones(len(index), np.int32))
    return position_logprobs(lines, index, tokens[index], plan.top_k, *asked)


def prompt_logprobs(
    hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], plan: LogprobPlan
) -> TokenLogprobs:
    """Log-probabilities of prompt tokens. Runs the head slice by slice, so that memory stays bounded.

    Args:
        hidden: [t, hidden_size] final hidden states, one per entry of plan.prompt_targets, each of the
            position before its target.
        head: hidden states to logits, [k, hidden_size] -> [k, vocab].
        plan: its prompt part.
    """
    per_chunk = np.diff(plan.prompt_indptr)
    asked = _repeat_csr(plan.prompt_ids_indptr, plan.prompt_ids, per_chunk)
    return position_logprobs(
        lambda start, stop: head(hidden[start:stop]),
        np.repeat(plan.prompt_chunk, per_chunk).astype(np.int32),
        plan.prompt_targets,
        np.repeat(plan.prompt_top_k, per_chunk),
        *asked,
    )


def position_logprobs(
    lines: Callable[[int, int], torch.Tensor],
    index: Int32,
    targets: Int32,
    top_k: Int32,
    ids_indptr: Int32,
    ids: Int32,
) -> TokenLogprobs:
    """Log-probabilities at q positions, slice by slice.

    Args:
        lines: (start, stop) -> raw logits [stop - start, vocab] of these positions.
        index: [q] int32, passed through.
        targets: [q] int32, the chosen or prompt tokens.
        top_k: [q] int32, alternatives wanted; at most vocab are given. Equal ones come in order of token id.
        ids_indptr, ids: [q+1], [..] int32 CSR, the asked-for ids of each position, all in the vocabulary.
    """
    q = len(targets)
    parts = [
        _slice(
            lines(start, min(start + _SLICE, q)).float(),
            targets[start : start + _SLICE],
            top_k[start : start + _SLICE],
            np.diff(ids_indptr[start : start + _SLICE + 1]),
            ids[ids_indptr[start] : ids_indptr[min(start + _SLICE, q)]],
        )
        for start in range(0, q, _SLICE)
    ]
    chosen, top_counts, top_ids, top_values, ids_values = (
        np.concatenate([part[i] for part in parts]) if parts else np.zeros(0, np.float32) for i in range(5)
    )
    top_indptr = np.zeros(q + 1, np.int32)
    np.cumsum(top_counts, out=top_indptr[1:])
    return TokenLogprobs(
        index=index.astype(np.int32),
        token_ids=targets.astype(np.int32),
        logprobs=chosen,
        top_indptr=top_indptr,
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top_values,
        ids_indptr=ids_indptr.astype(np.int32),
        ids=ids.astype(np.int32),
        ids_logprobs=ids_values,
    )


def _slice(
    logits: torch.Tensor, targets: Int32, top_k: Int32, num_ids: Int64, ids: Int32
) -> tuple[Float32, Int64, Int64, Float32, Float32]:
    """One slice: chosen [k], top counts [k], then flat: top ids, top values, values of the asked-for ids."""
    device = logits.device
    norm = torch.logsumexp(logits, 1, keepdim=True)
    chosen = logits.gather(1, to_device(targets, torch.int64, device)[:, None]) - norm
    counts = np.minimum(top_k, logits.shape[1]).astype(np.int64)
    widest = int(counts.max(initial=0))
    columns = _largest(logits, widest)
    values = logits.gather(1, columns) - norm
    wanted = np.arange(widest) < counts[:, None]
    line = to_device(np.repeat(np.arange(len(targets)), num_ids), torch.int64, device)
    asked = logits[line, to_device(ids, torch.int64, device)] - norm[line, 0]
    return (
        chosen.squeeze(1).cpu().numpy(),
        counts,
        columns.cpu().numpy()[wanted],
        values.cpu().numpy()[wanted],
        asked.cpu().numpy(),
    )


def _largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k largest fp32 logits per row, [n, k] int64; of equal ones the lower column first.

    `topk` promises no order among equals, so it runs on unique int64 keys: the float's bits made monotone
    above, the negated column below.
    """
    if not k:
        return torch.zeros(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0 a 0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    columns = torch.arange(logits.shape[1], device=logits.device)
    return (ordered * 2**32 + (2**32 - 1 - columns)).topk(k, dim=1).indices


def _repeat_csr(indptr: Int32, values: Int32, times: Int32) -> tuple[Int32, Int32]:
    """CSR where row i comes times[i] times in a row."""
    rows = np.repeat(np.arange(len(times)), times)
    lens = np.diff(indptr)[rows]
    out = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lens, out=out[1:])
    at = np.repeat(indptr[:-1][rows] - out[:-1], lens) + np.arange(out[-1])
    return out, values[at].astype(np.int32)
