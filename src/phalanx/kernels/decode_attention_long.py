"""Rows that are far longer than the rest of a decode batch: found on the device, cut into pieces.

One program reads a whole row, so that a row of 100,000 tokens among thousands of short ones would keep a GPU
waiting long after the others are done. Rows above a threshold are therefore left out of the main launch;
their pieces go to a second one, in which any program takes any piece, and a third joins what belongs to one
row. Nothing is read on the host, so a captured step serves long rows as they come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.kernels.checks import check_tensor, pick_backend

LONG_TOKENS = 2048  # what one program can read unnoticed; measured on an H200 (docs/measured.md)
TIMES_MEAN = 4  # and than this many times the mean: a batch that is long all over is better left whole
PIECE_TOKENS = 512
MAX_PIECES = 2048
MAX_LONG = 256
_INT = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class LongRows:
    """The long rows of one batch of bs rows, for `decode_attention`; all tensors on the device.

    short_lens: [bs], the lengths with 0 in place of rows that are cut. counts: [2] int32, pieces and rows
    that are cut. lanes, first_piece: [MAX_LONG] int32, position in the batch and number of the first piece of
    each row that is cut; entries past their number are undefined. max_pieces: room for so many pieces; a row
    that finds none left is not cut. piece_tokens: tokens of a piece, but for the last one of a row.
    """

    short_lens: torch.Tensor
    counts: torch.Tensor
    lanes: torch.Tensor
    first_piece: torch.Tensor
    max_pieces: int
    piece_tokens: int

    def workspace_size(self, num_q_heads: int, head_dim: int) -> int:
        """Entries of fp32 scratch that attention to the pieces needs."""
        return self.max_pieces * num_q_heads * (head_dim + 2)


def find_long_rows(
    seq_lens: torch.Tensor,
    max_context: int,
    *,
    long_tokens: int = LONG_TOKENS,
    times_mean: int = TIMES_MEAN,
    piece_tokens: int = PIECE_TOKENS,
    backend: str = "auto",
) -> LongRows | None:
    """Choose the rows to cut: one launch. None where no row can be that long.

    seq_lens: [bs] int32 or int64, contiguous, bs up to 65535. max_context: no length is above it.
    long_tokens, times_mean: rows of more tokens than the one, and than the other times the mean length, are
    cut into pieces of piece_tokens (a power of two, at least 16); at most MAX_LONG rows and MAX_PIECES pieces
    of them, the first ones.
    backend: "torch", "triton" or "auto" (Triton on CUDA).

    Raises TypeError or ValueError naming the argument at fault.
    """
    bs = seq_lens.shape[0]
    check_tensor("seq_lens", seq_lens, dtypes=_INT, shape=(bs,), contiguous=True)
    if piece_tokens < 16 or piece_tokens & (piece_tokens - 1):
        raise ValueError(f"piece_tokens must be a power of two of at least 16, got {piece_tokens}")
    if long_tokens < piece_tokens:
        raise ValueError(f"long_tokens must be at least piece_tokens {piece_tokens}, got {long_tokens}")
    chosen = pick_backend(backend, seq_lens.device)
    if max_context <= long_tokens or bs == 0:
        return None
    max_pieces = min(MAX_PIECES, bs * -(-max_context // piece_tokens))
    if chosen == "torch":
        return _find_torch(seq_lens, long_tokens, times_mean, piece_tokens, max_pieces)
    from phalanx.kernels import decode_attention_long_triton

    counts = torch.empty(2 + 2 * MAX_LONG, dtype=torch.int32, device=seq_lens.device)
    found = LongRows(
        short_lens=torch.empty_like(seq_lens),
        counts=counts[:2],
        lanes=counts[2 : 2 + MAX_LONG],
        first_piece=counts[2 + MAX_LONG :],
        max_pieces=max_pieces,
        piece_tokens=piece_tokens,
    )
    decode_attention_long_triton.find(seq_lens, found, long_tokens, times_mean)
    return found


def _find_torch(
    seq_lens: torch.Tensor, long_tokens: int, times_mean: int, piece_tokens: int, max_pieces: int
) -> LongRows:
    lens = seq_lens.long()
    is_long = (lens > long_tokens) & (lens * len(lens) > times_mean * lens.sum())
    pieces = torch.where(is_long, (lens + piece_tokens - 1) // piece_tokens, 0)
    ends = pieces.cumsum(0)
    cut = is_long & (ends <= max_pieces) & (is_long.cumsum(0) <= MAX_LONG)
    lanes, first_piece = (torch.zeros(MAX_LONG, dtype=torch.int32, device=seq_lens.device) for _ in range(2))
    found = cut.nonzero()[:, 0]
    lanes[: len(found)] = found.int()
    first_piece[: len(found)] = (ends - pieces)[found].int()
    return LongRows(
        short_lens=torch.where(cut, 0, seq_lens).to(seq_lens.dtype),
        counts=torch.stack(((pieces * cut).sum(), cut.sum())).int(),
        lanes=lanes,
        first_piece=first_piece,
        max_pieces=max_pieces,
        piece_tokens=piece_tokens,
    )
