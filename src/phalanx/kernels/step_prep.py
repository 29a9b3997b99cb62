"""What a decode step needs before the model runs: lengths, slots, positions and KV indices of all rows.

The fused form of `create_kv_indices`. A CUDA graph captures it once for a batch bucket; everything that
changes from step to step, the number of live rows included, is read from device memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.kernels.checks import check_page_size, check_tensor, pick_backend
from phalanx.kernels.ragged import gather_rows

LANES_PER_BLOCK = 128  # lanes that one program of the first launch prepares and scans


@dataclass(frozen=True, slots=True)
class StepPrepBuffers:
    """Outputs of `step_prep` for one bucket of lanes; fixed addresses, so that a graph can hold them.

    Attributes:
        rows: [bucket] int64, the row of each lane; 0 for padding lanes.
        positions: [bucket] int64, position of the token that the lane computes.
        slot_mapping: [bucket] int64, KV slot of that token; 0 for padding lanes.
        seq_lens: [bucket] int32, tokens to attend to, the new one included; 1 for padding lanes.
        last_page_len: [bucket] int32, tokens in the lane's last page, 1..page_size.
        kv_indptr: [bucket+1] int32, CSR offsets in pages, padding lanes included.
        kv_indices: [capacity] int32 page ids, or None where attention reads the table itself. Entries past
            kv_indptr[bucket] keep their bytes; entries past the capacity are dropped, never written.
        scratch: int32, partial sums between the two launches.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    last_page_len: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None
    scratch: torch.Tensor

    @classmethod
    def allocate(cls, bucket: int, capacity: int | None, device: torch.device | str) -> StepPrepBuffers:
        """Zeroed buffers for `bucket` lanes and `capacity` KV indices (None: no kv_indices).

        Every lane takes up to ceil(max_context / page_size) indices; a padding lane takes one.
        """
        if bucket < 1:
            raise ValueError(f"bucket must be at least 1, got {bucket}")
        if capacity is not None and capacity < bucket:
            raise ValueError(f"capacity must be at least the bucket of {bucket} lanes, got {capacity}")

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            rows=zeros(bucket, torch.int64),
            positions=zeros(bucket, torch.int64),
            slot_mapping=zeros(bucket, torch.int64),
            seq_lens=zeros(bucket, torch.int32),
            last_page_len=zeros(bucket, torch.int32),
            kv_indptr=zeros(bucket + 1, torch.int32),
            kv_indices=None if capacity is None else zeros(capacity, torch.int32),
            scratch=zeros(bucket + -(-bucket // LANES_PER_BLOCK), torch.int32),
        )

    @property
    def bucket(self) -> int:
        """Number of lanes."""
        return self.positions.shape[0]


def step_prep(
    rows: torch.Tensor,
    num_live: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    granted_pages: torch.Tensor,
    out: StepPrepBuffers,
    *,
    page_size: int,
    backend: str = "auto",
) -> None:
    """Advance the live rows by one token and fill `out`.

    rows: [bucket] int32; the first num_live are live and distinct. A row <= 0 is a padding lane anywhere.
    num_live: [1] int32 on the device, read there.
    seq_lens: [num_rows] int32 in/out, tokens that each row holds; >= 0.
    req_to_token: [num_rows, max_context] int32 in/out, last stride 1: KV slot of each token.
    granted_pages: [num_rows, ring] int32, contiguous: page number n of a row is granted_pages[row, n % ring].
    out: see StepPrepBuffers.
    backend: "torch", "triton" or "auto" (Triton on CUDA).

    A live lane with row r: position = seq_lens[r]; slot = granted_pages[r, position // page_size % ring] *
    page_size + position % page_size; req_to_token[r, position] = slot; seq_lens[r] += 1; its KV indices are
    the pages of its position + 1 tokens. A row that is full (seq_lens[r] >= max_context) stays as it is: its
    last position is used again, its token goes to slot 0, nothing in its table row changes.
    A padding lane: row 0, position 0, slot 0, length 1, KV index 0.
    Full and padding lanes write their slot 0 to req_to_token[0, 0], the padding row's only entry in use.

    The Triton backend takes two launches on the current stream and can be captured in a CUDA graph. The torch
    backend reads the number of indices on the host, so on CUDA it serves as a reference.
    Raises TypeError or ValueError naming the argument at fault.
    """
    _check(rows, num_live, seq_lens, req_to_token, granted_pages, out, page_size)
    chosen = pick_backend(backend, rows.device)
    if chosen == "triton":
        from phalanx.kernels import step_prep_triton

        step_prep_triton.step_prep(
            rows, num_live, seq_lens, req_to_token, granted_pages, out, page_size=page_size
        )
    else:
        _step_prep_torch(rows, num_live, seq_lens, req_to_token, granted_pages, out, page_size)


def _step_prep_torch(
    rows: torch.Tensor,
    num_live: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    granted_pages: torch.Tensor,
    out: StepPrepBuffers,
    page_size: int,
) -> None:
    max_context, ring = req_to_token.shape[1], granted_pages.shape[1]
    live = torch.arange(out.bucket, dtype=torch.int32, device=rows.device) < num_live
    live &= rows > 0
    row = torch.mul(rows, live, out=out.rows)
    length = seq_lens[row]
    grows = live & (length < max_context)
    # Lanes that do not grow write slot 0 into the padding row's first entry, so that no mask is needed.
    position = torch.mul(length.clamp_(max=max_context - 1), live, out=out.positions)
    page = position if page_size == 1 else position // page_size
    slot = granted_pages[row, page % ring].long()
    if page_size > 1:
        offset = position - page * page_size
        slot = slot * page_size + offset
        torch.add(offset, 1, out=out.last_page_len)
    else:
        out.last_page_len.fill_(1)
    torch.mul(slot, grows, out=out.slot_mapping)
    req_to_token.index_put_((row * grows, position * grows), out.slot_mapping.int())
    seq_lens.index_add_(0, row, grows.int())
    torch.add(position, 1, out=out.seq_lens)
    out.kv_indptr[:1].zero_()
    torch.cumsum(page + 1, 0, dtype=torch.int32, out=out.kv_indptr[1:])
    if out.kv_indices is not None:
        _fill_indices(row, req_to_token, out.kv_indptr, out.kv_indices, page_size)


def _fill_indices(
    row: torch.Tensor, table: torch.Tensor, indptr: torch.Tensor, kv_indices: torch.Tensor, page_size: int
) -> None:
    indptr = indptr.long().clamp_(max=kv_indices.shape[0])  # drops what does not fit
    gather_rows(table, row * table.stride(0), indptr.diff(), indptr, kv_indices, page_size=page_size)


def _check(
    rows: torch.Tensor,
    num_live: torch.Tensor,
    seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    granted_pages: torch.Tensor,
    out: StepPrepBuffers,
    page_size: int,
) -> None:
    check_page_size(page_size)
    device, int32 = rows.device, (torch.int32,)
    bucket, num_rows = out.bucket, seq_lens.shape[0]
    check_tensor("out.positions", out.positions, dtypes=(torch.int64,), shape=(None,), device=device)
    check_tensor("rows", rows, dtypes=int32, shape=(bucket,), contiguous=True)
    check_tensor("num_live", num_live, dtypes=int32, shape=(1,), device=device)
    check_tensor("seq_lens", seq_lens, dtypes=int32, shape=(None,), device=device, contiguous=True)
    check_tensor("req_to_token", req_to_token, dtypes=int32, shape=(num_rows, None), device=device)
    if req_to_token.stride(1) != 1 or req_to_token.shape[1] < 1:
        raise ValueError(
            f"req_to_token must have columns of stride 1, got shape {list(req_to_token.shape)} "
            f"with strides {req_to_token.stride()}"
        )
    check_tensor(
        "granted_pages", granted_pages, dtypes=int32, shape=(num_rows, None), device=device, contiguous=True
    )
    if granted_pages.shape[1] < 1:
        raise ValueError("granted_pages must have at least one column")
