"""Choose one token a row from the logits: argmax or a draw at a temperature, in one pass over the logits.

Greedy and temperature rows share the launches; nothing is kept of the logits but a maximum a chunk and a sum
of exponentials a block. A draw is the Gumbel-max trick in two heats: blocks race with their sums, then the
tokens of the winning block with their own weights. So it costs one exponential a logit, and a random number
only for each block and for the tokens of one block. The random numbers are a pure function of seed, number of
generated tokens and block or token; they are those of `sampling.choose.draw_rows`, and so are the tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.core.step import Finish
from phalanx.kernels.checks import check_tensor, pick_backend
from phalanx.kernels.decode_attention import FLOATS

_INT = (torch.int32, torch.int64)
DRAW_BLOCK = 256  # tokens that race together: fixed by what a draw means, as in `sampling.choose`
CHUNK = 4096  # tokens that one program reduces, a multiple of DRAW_BLOCK

# The constants of splitmix64 (Steele, Lea, Flood 2014) and the salt of the seeds, as in `sampling.uniform`.
GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
SEED_SALT = 0x6A09E667F3BCC909


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    rows: torch.Tensor,
    stop_ids: torch.Tensor,
    *,
    num_generated: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    prompt_lens: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    finish: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per lane; lane b has the parameters of row rows[b].

    logits: [bs, vocab] fp32, bf16 or fp16; any row stride, last stride 1; read, never copied to fp32.
    temperature: [num_rows] fp32, any stride; 0 or less is argmax (the lowest index among equals).
    seeds: [num_rows] int64, any stride. rows: [bs] int32 or int64, contiguous.
    stop_ids: [num_rows, n] int32, any row stride, last stride 1; -1 pads.
    num_generated: [bs] int32 or int64, contiguous: output tokens of the lane before this one. Or instead
        seq_lens: [bs] int32 or int64, contiguous, tokens of the lane, prompt included, and prompt_lens:
        [num_rows] int32 or int64, any stride: num_generated is their difference.
    tokens: [bs] int32 and finish: [bs] uint8, contiguous; written; allocated if None. Returned.
    workspace: at least `sample_workspace_size` fp32 entries, contiguous; allocated if None (Triton only).
    backend: "torch", "triton" or "auto" (Triton on CUDA). The torch one makes fp32 copies: a reference.

    finish is Finish.ERROR (and the token 0) where the largest logit is not finite: any NaN, any +inf, or
    nothing but -inf; Finish.STOP where the token is one of the row's stop ids; else Finish.NONE.
    A lane's result depends on its own logits and parameters alone, bit for bit. Capturable in a CUDA graph;
    0 lanes launch nothing. Raises TypeError or ValueError naming the argument at fault.
    """
    _check(logits, temperature, seeds, rows, stop_ids)
    counts, offsets = _check_counts(logits, temperature, num_generated, seq_lens, prompt_lens)
    bs, device = logits.shape[0], logits.device
    if tokens is None:
        tokens = torch.empty(bs, dtype=torch.int32, device=device)
    if finish is None:
        finish = torch.empty(bs, dtype=torch.uint8, device=device)
    check_tensor("tokens", tokens, dtypes=(torch.int32,), shape=(bs,), device=device, contiguous=True)
    check_tensor("finish", finish, dtypes=(torch.uint8,), shape=(bs,), device=device, contiguous=True)
    chosen = pick_backend(backend, device)
    needed = sample_workspace_size(*logits.shape)
    if workspace is not None:
        dtypes = (torch.float32,)
        check_tensor("workspace", workspace, dtypes=dtypes, shape=(None,), device=device, contiguous=True)
        if workspace.shape[0] < needed:
            raise ValueError(f"workspace has {workspace.shape[0]} entries, {needed} are needed")
    if bs == 0:
        return tokens, finish
    if chosen == "torch":
        _sample_torch(logits, temperature, seeds, rows, stop_ids, counts, offsets, tokens, finish)
        return tokens, finish
    from phalanx.kernels import sample_triton

    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    sample_triton.sample(
        logits, temperature, seeds, rows, stop_ids, counts, offsets, tokens, finish, workspace
    )
    return tokens, finish


def sample_workspace_size(bs: int, vocab_size: int) -> int:
    """Entries of fp32 scratch that `sample` needs: a maximum for each chunk and a sum for each block."""
    return sums_start(bs, vocab_size) + bs * -(-vocab_size // DRAW_BLOCK)


def sums_start(bs: int, vocab_size: int) -> int:
    """Where the sums begin: 16-byte aligned for any bs, since Triton compiles for alignment."""
    return -(-bs * -(-vocab_size // CHUNK) // 4) * 4


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function; int64 arithmetic wraps, and `>>` is masked to be logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(MIX1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(MIX2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _times(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Exponentially distributed fp64 numbers, a pure function of (key, counter)."""
    bits = (_mix(keys[:, None] + (counters + 1) * _signed(GOLDEN)) >> 11) & ((1 << 53) - 1)
    return -torch.log((bits.double() + 0.5) * 2.0**-53)


def _draw(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """weights: [bs, vocab] fp32; keys: [bs] int64. Returns [bs] int64."""
    vocab_size = weights.shape[1]
    blocks = F.pad(weights, (0, -vocab_size % DRAW_BLOCK)).unflatten(1, (-1, DRAW_BLOCK))
    num_blocks = blocks.shape[1]
    speeds = blocks.sum(2).double() / _times(keys, torch.arange(num_blocks, device=keys.device))
    picked = speeds.argmax(1, keepdim=True)
    token = picked * DRAW_BLOCK + torch.arange(DRAW_BLOCK, device=keys.device)
    runners = blocks.gather(1, picked[:, :, None].expand(-1, -1, DRAW_BLOCK)).squeeze(1)
    winner = (runners.double() / _times(keys, num_blocks + token)).argmax(1, keepdim=True)
    return token.gather(1, winner).squeeze(1)


def _sample_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    rows: torch.Tensor,
    stop_ids: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    tokens: torch.Tensor,
    finish: torch.Tensor,
) -> None:
    index = rows.long()
    generated = counts.long() if offsets is None else counts.long() - offsets[index]
    keys = _mix(_mix(seeds[index] ^ _signed(SEED_SALT)) + (generated + 1) * _signed(GOLDEN))
    peak = logits.amax(1)
    bad = ~torch.isfinite(peak)
    argmax = (logits == peak[:, None]).to(torch.uint8).argmax(1)  # the first of equals
    warm = temperature[index]
    heat = torch.where(warm > 0, warm.clamp(min=1e-30), 1.0)
    weights = torch.exp((logits.float() - peak.float()[:, None]) / heat[:, None]).nan_to_num_(0.0)
    token = torch.where(warm > 0, _draw(weights, keys), argmax).masked_fill_(bad, 0).int()
    tokens.copy_(token)
    stopped = (stop_ids[index] == token[:, None]).any(1)
    finish.copy_(torch.where(stopped, int(Finish.STOP), int(Finish.NONE)).masked_fill_(bad, Finish.ERROR))


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    rows: torch.Tensor,
    stop_ids: torch.Tensor,
) -> None:
    check_tensor("logits", logits, dtypes=FLOATS, shape=(None, None))
    (bs, vocab_size), device = logits.shape, logits.device
    if vocab_size < 1 or vocab_size > 2**28:
        raise ValueError(f"logits must have 1 to 2**28 columns, got {vocab_size}")
    check_tensor("temperature", temperature, dtypes=(torch.float32,), shape=(None,), device=device)
    num_rows = temperature.shape[0]
    check_tensor("seeds", seeds, dtypes=(torch.int64,), shape=(num_rows,), device=device)
    check_tensor("rows", rows, dtypes=_INT, shape=(bs,), device=device, contiguous=True)
    check_tensor("stop_ids", stop_ids, dtypes=(torch.int32,), shape=(num_rows, None), device=device)
    for name, tensor in (("logits", logits), ("stop_ids", stop_ids)):
        if tensor.numel() and tensor.stride(1) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")


def _check_counts(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    num_generated: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    prompt_lens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(per-lane counts, per-row numbers to subtract from them or None)."""
    bs, device = logits.shape[0], logits.device
    if num_generated is not None:
        if seq_lens is not None or prompt_lens is not None:
            raise ValueError("num_generated and seq_lens with prompt_lens exclude each other")
        check_tensor("num_generated", num_generated, dtypes=_INT, shape=(bs,), device=device, contiguous=True)
        return num_generated, None
    if seq_lens is None or prompt_lens is None:
        raise ValueError("either num_generated or both seq_lens and prompt_lens must be given")
    check_tensor("seq_lens", seq_lens, dtypes=_INT, shape=(bs,), device=device, contiguous=True)
    check_tensor("prompt_lens", prompt_lens, dtypes=_INT, shape=temperature.shape, device=device)
    return seq_lens, prompt_lens
