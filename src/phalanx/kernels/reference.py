"""The kernels as plain loops over Python integers: slow, and meant to be seen to be right.

Tests and benchmarks compare every backend with these. `create_kv_indices_naive` is also the "naive" backend:
the per-request loop that serving engines ran before a kernel replaced it.
"""

from __future__ import annotations

import itertools

import torch

from phalanx.kernels.step_prep import StepPrepBuffers


def create_kv_indices_naive(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    page_kernel_lens: torch.Tensor,
    kv_indptr: torch.Tensor | None = None,
    kv_start_idx: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    *,
    page_size: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One slice per request and one `torch.cat`, as in SGLang before PR #1262; as `create_kv_indices`.

    kv_indptr is taken together with kv_indices, or not at all. Reads rows, lengths and starts on the host,
    so on CUDA it synchronises. Raises ValueError if kv_indices is too short.
    """
    rows, lens = req_pool_indices.tolist(), page_kernel_lens.tolist()
    starts = [0] * len(rows) if kv_start_idx is None else kv_start_idx.tolist()
    pieces = [
        req_to_token[row, start : start + length : page_size]
        for row, length, start in zip(rows, lens, starts, strict=True)
    ]
    if page_size > 1:
        pieces = [piece // page_size for piece in pieces]
    counts = [len(piece) for piece in pieces]
    if kv_indptr is not None and kv_indices is not None:
        offsets = kv_indptr.tolist()
        if offsets == [0, *itertools.accumulate(counts)]:
            _check_room(kv_indices, offsets[-1])
            if pieces:
                kv_indices[: offsets[-1]] = torch.cat(pieces)
            return kv_indptr, kv_indices
        for offset, count, piece in zip(offsets, counts, pieces, strict=False):  # with gaps
            _check_room(kv_indices, offset + count if count else 0)
            kv_indices[offset : offset + count] = piece
        return kv_indptr, kv_indices
    kv_indptr = torch.tensor([0, *counts]).cumsum(0).int().to(req_to_token.device)
    joined = torch.cat(pieces) if pieces else req_to_token.new_empty(0)
    if kv_indices is None:
        return kv_indptr, joined
    _check_room(kv_indices, len(joined))
    kv_indices[: len(joined)] = joined
    return kv_indptr, kv_indices


def _check_room(kv_indices: torch.Tensor, needed: int) -> None:
    if needed > len(kv_indices):
        raise ValueError(f"kv_indices has {len(kv_indices)} entries, {needed} are needed")


def step_prep(
    rows: torch.Tensor,
    num_live: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    granted_pages: torch.Tensor,
    out: StepPrepBuffers,
    *,
    page_size: int,
) -> None:
    """`phalanx.kernels.step_prep` lane by lane, for CPU tensors."""
    max_context, ring = req_to_token.shape[1], granted_pages.shape[1]
    total = 0
    out.kv_indptr[0] = 0
    for lane, lane_row in enumerate(rows.tolist()):
        row, position, slot = 0, 0, 0
        if lane < int(num_live) and lane_row > 0:
            row, position = lane_row, int(seq_lens[lane_row])
            if position < max_context:
                page_id = int(granted_pages[row, position // page_size % ring])
                slot = page_id * page_size + position % page_size
                req_to_token[row, position] = slot
                seq_lens[row] += 1
            else:
                position = max_context - 1
                req_to_token[0, 0] = 0
        else:
            req_to_token[0, 0] = 0
        out.rows[lane], out.positions[lane], out.slot_mapping[lane] = row, position, slot
        out.seq_lens[lane] = position + 1
        out.last_page_len[lane] = position % page_size + 1
        pages = [int(entry) // page_size for entry in req_to_token[row, : position + 1 : page_size]]
        if out.kv_indices is not None:
            for index, page_id in enumerate(pages, start=total):
                if index < len(out.kv_indices):
                    out.kv_indices[index] = page_id
        total += len(pages)
        out.kv_indptr[lane + 1] = total


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`phalanx.kernels.store_kv` token by token."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < k_pool.shape[0]:
            k_pool[slot], v_pool[slot] = k[token], v[token]


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
) -> torch.Tensor:
    """`phalanx.kernels.decode_attention` row by row in fp64. Returns [bs, num_q_heads, head_dim] fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for lane, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        if length:
            out[lane] = _attend(q[lane], k_pool, v_pool, req_to_token[row], length, page_size, sm_scale)
    return out


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    qo_indptr: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    *,
    page_size: int = 1,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """`phalanx.kernels.prefill_attention` token by token in fp64; zeros where no chunk holds the token."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bounds = qo_indptr.tolist()
    for i, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        for token in range(bounds[i], bounds[i + 1]):
            length = start + token - bounds[i] + 1
            table_row = req_to_token[row]
            out[token] = _attend(q[token], k_pool, v_pool, table_row, length, page_size, sm_scale)
    return out


def _attend(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table_row: torch.Tensor,
    length: int,
    page_size: int,
    sm_scale: float | None,
) -> torch.Tensor:
    """One query token [num_q_heads, head_dim] over the first `length` tokens of a row."""
    entries = table_row[:length].tolist()
    slots = [entries[col - col % page_size] + col % page_size for col in range(length)]
    group = query.shape[0] // k_pool.shape[1]
    k = k_pool[slots].double().repeat_interleave(group, 1)
    v = v_pool[slots].double().repeat_interleave(group, 1)
    scale = query.shape[1] ** -0.5 if sm_scale is None else sm_scale
    scores = torch.einsum("hd,lhd->hl", query.double(), k) * scale
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`phalanx.kernels.rms_norm` in fp64, not rounded; x: [..., hidden]."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`phalanx.kernels.silu_mul` in fp64, not rounded in between."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """`phalanx.kernels.rope` of one tensor [num_tokens, num_heads, head_dim], pair by pair in fp64."""
    out, half = torch.empty(x.shape, dtype=torch.float64, device=x.device), x.shape[2] // 2
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            cos, sin = cos_sin_cache[position, [pair, half + pair]].double()
            a, b = x[token, :, pair].double(), x[token, :, half + pair].double()
            out[token, :, pair] = a * cos - b * sin
            out[token, :, half + pair] = b * cos + a * sin
    return out
