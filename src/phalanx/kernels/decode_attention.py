"""Decode attention over many rows of any length, read straight from the request-to-token table.

One query token a row. Made for thousands of short rows, where what a row costs beside reading its K and V
decides the speed; long rows are right too, and can be split over several programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.kernels.checks import check_page_size, check_tensor, pick_with_numba
from phalanx.kernels.decode_attention_long import LONG_TOKENS, LongRows

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INT = (torch.int32, torch.int64)
SPLIT_TOKENS = 256  # a row is split only into pieces of at least this many tokens
MAX_SPLITS = 64
MAX_ROWS = 65535  # rows are the second axis of a CUDA grid
_FULL_GRID = 1024  # fewer programs than this leave a large GPU idle: then rows are split
# Up to these: measured with 8 KV heads and 128, 280, 1024 and 2048 rows, that is 1024, 2240, 8192 and 16384.
_FEW_PROGRAMS, _MANY_PROGRAMS = 1536, 8192
_FEW_BYTES = 16384  # of K that a program takes at a time where there are few of them


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the Triton kernel is cut; every choice gives the same result up to rounding.

    Attributes:
        tokens: K and V rows that a program takes at a time, a power of two of at least 16.
        num_warps: of a program. num_stages: of the loop's software pipeline; 1 turns it off.
        ahead: a tile's slots are read one tile early, so that the pipeline holds K and V alone.
    """

    tokens: int = 32
    num_warps: int = 2
    num_stages: int = 2
    ahead: bool = False


def default_config(num_programs: int, head_dim: int, itemsize: int) -> DecodeConfig:
    """The best of those measured on an H200, rows begun longest first (docs/measured.md).

    num_programs: rows times KV heads. head_dim, itemsize: of K and V.
    """
    # Many programs hide each other's waits: one warp and small tiles, as many rows in flight as there is room
    # for. Few have to keep much under way themselves.
    if num_programs <= _FEW_PROGRAMS:
        tokens = _FEW_BYTES // (itemsize * (1 << (head_dim - 1).bit_length()))
        return DecodeConfig(max(16, min(128, tokens)), num_warps=4, num_stages=2, ahead=True)
    if num_programs <= _MANY_PROGRAMS:
        return piece_config(head_dim)
    return DecodeConfig(16, _few_warps(head_dim), num_stages=2, ahead=True)


def piece_config(head_dim: int) -> DecodeConfig:
    """Of batches of middle size, and of the pieces of long rows."""
    return DecodeConfig(16, _few_warps(head_dim), num_stages=5)


def _few_warps(head_dim: int) -> int:
    return 1 if head_dim <= 128 else 2  # what holds queries and sums of 16 heads in registers


def default_splits(num_rows: int, num_programs: int, max_context: int) -> int:
    """Pieces that a row is cut into at most: 1 unless the programs of the unsplit grid would be few.

    num_rows: batch size. num_programs: programs a row. max_context: the most tokens a row can hold.
    """
    wanted = _FULL_GRID // max(1, num_rows * num_programs)
    return max(1, min(wanted, -(-max_context // SPLIT_TOKENS), MAX_SPLITS))


def default_long_tokens(num_rows: int, num_programs: int, max_context: int) -> int:
    """Rows of more tokens than this hold the others up: `find_long_rows` is for them.

    Arguments as in `default_splits`, which shares a row between several programs in small batches.
    """
    return LONG_TOKENS * default_splits(num_rows, num_programs, max_context)


def decode_workspace_size(bs: int, num_q_heads: int, head_dim: int, num_splits: int) -> int:
    """Entries of fp32 scratch that `decode_attention` needs: 0 for one split."""
    return 0 if num_splits == 1 else bs * num_q_heads * num_splits * (head_dim + 2)


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int = 1,
    sm_scale: float | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
    workspace: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    order: torch.Tensor | None = None,
    long_rows: LongRows | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """out[b, h] = softmax(q[b, h] . K[s] * sm_scale) V[s] over the slots s of row b's tokens.

    The slots are req_to_token[rows[b], 0 .. seq_lens[b]-1].

    q: [bs, num_q_heads, head_dim] fp32, bf16 or fp16; any strides with last stride 1. Query head h reads KV
        head h // (num_q_heads / num_kv_heads).
    k_pool, v_pool: [num_slots, num_kv_heads, head_dim], q's dtype, contiguous.
    req_to_token: [num_rows, max_context] int32 token slots, last stride 1. With page_size p > 1 only entries
        at multiples of p are read, and the p slots from each are taken.
    rows: [bs] int32 or int64, contiguous. seq_lens: [bs] int32 or int64, contiguous, the new token included;
        a length of 0 gives zeros. Rows and lengths must lie within the table.
    sm_scale: head_dim ** -0.5 if None.
    out: like q, any strides with last stride 1; allocated if None. Returned.
    num_splits: programs that share a long row. None: by batch size and max_context; 1: no scratch is needed.
        A row of up to SPLIT_TOKENS tokens is never split.
    workspace: at least `decode_workspace_size` fp32 entries, contiguous; allocated if None and needed.
    config: see DecodeConfig; None: `default_config`.
    order: [bs] int32, contiguous: the order in which the rows are begun, each once (`longest_first`); None:
        as they come. It changes no result.
    long_rows: of these seq_lens (`find_long_rows`): those rows are cut into pieces, for which
        `piece_config` holds.
    backend: "torch", "triton", "numba" or "auto" (Triton on CUDA, numba on a CPU in fp32 and bf16). The torch
        one reads the longest length on the host. Splits, config, order and long_rows are of the Triton one.

    Softmax and sums are fp32. The Triton backend reads nothing on the host and can be captured in a CUDA
    graph; 0 rows launch nothing. Raises TypeError or ValueError naming the argument at fault.
    """
    check_attention(q, k_pool, v_pool, req_to_token, out, page_size)
    bs = q.shape[0]
    if bs > MAX_ROWS:
        raise ValueError(f"q has {bs} rows, at most {MAX_ROWS} are possible")
    check_tensor("rows", rows, dtypes=_INT, shape=(bs,), device=q.device, contiguous=True)
    check_tensor("seq_lens", seq_lens, dtypes=_INT, shape=(bs,), device=q.device, contiguous=True)
    chosen = pick_with_numba(backend, q.device, q.dtype)
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_kv_heads = k_pool.shape[1]
    if config is None:
        config = default_config(bs * num_kv_heads, q.shape[2], q.itemsize)
    check_config(config)
    if order is not None:
        check_tensor("order", order, dtypes=(torch.int32,), shape=(bs,), device=q.device, contiguous=True)
    if num_splits is None:
        num_splits = default_splits(bs, num_kv_heads, req_to_token.shape[1])
    needed = _check_splits(q, num_splits, workspace)
    if bs == 0:
        return out
    if chosen == "torch":
        _attend_torch(q, k_pool, v_pool, req_to_token, rows, seq_lens, page_size, scale, out)
        return out
    if chosen == "numba":
        from phalanx.kernels import decode_attention_numba

        seq_lens = seq_lens.int()
        cut = decode_attention_numba.plan(seq_lens, num_kv_heads)
        decode_attention_numba.attend(
            q, k_pool, v_pool, req_to_token, rows.long(), seq_lens, page_size, scale, out, cut
        )
        return out
    from phalanx.kernels import decode_attention_triton

    if long_rows is not None:
        if long_rows.short_lens.shape != seq_lens.shape:
            raise ValueError(f"long_rows are those of {len(long_rows.short_lens)} rows, seq_lens has {bs}")
    if needed and workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    decode_attention_triton.attend(
        q,
        k_pool,
        v_pool,
        req_to_token,
        rows,
        seq_lens if long_rows is None else long_rows.short_lens,
        order,
        out,
        workspace,
        page_size=page_size,
        scale=scale,
        num_splits=num_splits,
        config=config,
    )
    if long_rows is not None:
        from phalanx.kernels.decode_attention_long_triton import attend_long

        args = (q, k_pool, v_pool, req_to_token, rows, seq_lens, out, long_rows)
        attend_long(*args, page_size=page_size, scale=scale)
    return out


def check_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    out: torch.Tensor | None,
    page_size: int,
) -> None:
    """Raise TypeError or ValueError unless what decode and prefill attention share fits together."""
    check_page_size(page_size)
    check_tensor("q", q, dtypes=FLOATS, shape=(None, None, None))
    (_, num_q_heads, head_dim), device = q.shape, q.device
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        check_tensor(
            name, pool, dtypes=(q.dtype,), shape=(None, None, head_dim), device=device, contiguous=True
        )
    check_tensor("v_pool", v_pool, dtypes=(q.dtype,), shape=k_pool.shape)
    num_kv_heads = k_pool.shape[1]
    if num_kv_heads == 0 or num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"q has {num_q_heads} heads, not a multiple of the pool's {num_kv_heads} KV heads")
    if k_pool.shape[0] % page_size:
        raise ValueError(f"k_pool has {k_pool.shape[0]} slots, not a multiple of page_size {page_size}")
    check_tensor("req_to_token", req_to_token, dtypes=(torch.int32,), shape=(None, None), device=device)
    if req_to_token.numel() and req_to_token.stride(1) != 1:
        raise ValueError(f"req_to_token must have a last stride of 1, got strides {req_to_token.stride()}")
    if out is not None:
        check_tensor("out", out, dtypes=(q.dtype,), shape=q.shape, device=device)
    for name, tensor in (("q", q), ("out", out)):
        if tensor is not None and tensor.numel() and tensor.stride(2) != 1:
            raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")


def check_config(config: DecodeConfig) -> None:
    """Raise ValueError for a configuration that the kernel cannot run."""
    for name, value, low in (("tokens", config.tokens, 16), ("num_warps", config.num_warps, 1)):
        if value < low or value & (value - 1):
            raise ValueError(f"config.{name} must be a power of two of at least {low}, got {value}")
    if config.num_stages < 1:
        raise ValueError(f"config.num_stages must be at least 1, got {config.num_stages}")


def _check_splits(q: torch.Tensor, num_splits: int, workspace: torch.Tensor | None) -> int:
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits must be an int or None, got {type(num_splits).__name__}")
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be in [1, {MAX_SPLITS}], got {num_splits}")
    needed = decode_workspace_size(*q.shape, num_splits)
    if workspace is not None:
        check_tensor(
            "workspace",
            workspace,
            dtypes=(torch.float32,),
            shape=(None,),
            device=q.device,
            contiguous=True,
        )
        if workspace.shape[0] < needed:
            raise ValueError(f"workspace has {workspace.shape[0]} entries, {needed} are needed")
    return needed


def _attend_torch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """All rows padded to the longest, in fp32."""
    bs, num_q_heads, head_dim = q.shape
    longest = int(seq_lens.max())
    col = torch.arange(longest, device=q.device)
    dead = col >= seq_lens[:, None]
    slots = table[rows.long()[:, None], (col // page_size * page_size)[None, :]].long()
    slots = (slots + col % page_size).masked_fill_(dead, 0)
    queries = q.float().view(bs, k_pool.shape[1], -1, head_dim)
    scores = torch.einsum("bkgd,blkd->bkgl", queries, k_pool[slots].float()) * scale
    hidden = dead[:, None, None, :]
    probs = torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1).masked_fill_(hidden, 0.0)
    # Weight 0 times what a dead lane's slot happens to hold must be 0, also for NaN.
    values = v_pool[slots].float().masked_fill_(dead[:, :, None, None], 0.0)
    out.copy_(torch.einsum("bkgl,blkd->bkgd", probs, values).reshape(bs, num_q_heads, head_dim))
