"""A small run of every kernel, to be started under compute-sanitizer (memcheck, initcheck).

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, so that a byte past its end is
seen. Exits with an error if a result is wrong.
"""

from __future__ import annotations

import torch

from phalanx.kernels import StepPrepBuffers, create_kv_indices, step_prep, store_kv

DEVICE = "cuda"


def random(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32).to(DEVICE)


def check_create(bs: int, width: int, page_size: int) -> None:
    table = random(0, 2**31 - 1, bs + 1, width)
    rows, lens = random(0, bs + 1, bs), random(0, width + 1, bs)
    indptr, want = create_kv_indices(table, rows, lens, page_size=page_size, backend="naive")
    for given in (None, indptr):
        out = torch.full((len(want),), -1, dtype=torch.int32).to(DEVICE)
        create_kv_indices(table, rows, lens, given, None, out, page_size=page_size, backend="triton")
        assert torch.equal(out.cpu(), want.cpu()), (bs, width, page_size)


def check_step_prep(bucket: int, context: int, page_size: int) -> None:
    results = []
    for backend in ("torch", "triton"):
        torch.manual_seed(bucket)
        table, seq_lens = random(0, 2**20, bucket + 1, context), random(0, context + 1, bucket + 1)
        granted, rows = random(1, 1000, bucket + 1, 4), random(1, bucket + 1, bucket).unique()
        lanes = torch.zeros(bucket, dtype=torch.int32)
        lanes[: len(rows)] = rows.cpu()
        out = StepPrepBuffers.allocate(bucket, bucket * context, DEVICE)
        live = torch.tensor([len(rows) - 1], dtype=torch.int32).to(DEVICE)
        step_prep(lanes.to(DEVICE), live, seq_lens, table, granted, out, page_size=page_size, backend=backend)
        parts = (out.rows, out.positions, out.slot_mapping, out.seq_lens, out.kv_indptr, out.kv_indices)
        results.append([part.cpu() for part in (table, seq_lens, *parts) if part is not None])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True)), (bucket, context, page_size)


def check_store(num_tokens: int, heads: int, dim: int) -> None:
    k, v = (torch.randn(num_tokens, heads, dim).to(DEVICE, torch.bfloat16) for _ in range(2))
    pools = [torch.zeros(64, heads, dim, dtype=torch.bfloat16).to(DEVICE) for _ in range(2)]
    slots = torch.randperm(64)[:num_tokens] - 2
    store_kv(k, v, *pools, slots.to(DEVICE), backend="triton")
    live = slots >= 0
    assert torch.equal(pools[0].cpu()[slots[live]], k.cpu()[live])
    assert torch.equal(pools[1].cpu()[slots[live]], v.cpu()[live])


def main() -> None:
    torch.manual_seed(0)
    for bs, width in [(1, 1), (3, 1023), (130, 1025), (5, 2500)]:
        for page_size in (1, 3, 16):
            check_create(bs, width, page_size)
    for page_size in (1, 16):
        check_step_prep(131, 40, page_size)
        check_step_prep(1, 1, page_size)
    check_store(37, 3, 80)
    check_store(1, 8, 128)
    torch.cuda.synchronize()
    print("results right")


if __name__ == "__main__":
    main()
