"""What only a CUDA device can show: graphs, memory past 2^31 entries, wide batches, other streams."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from phalanx.kernels import StepPrepBuffers, create_kv_indices, gather_kv, reference, step_prep, store_kv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"


def random_batch(bs, context, low, high, seed=0):
    gen = torch.Generator(device=DEVICE).manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=gen, dtype=torch.int32, device=DEVICE)

    table = draw(0, 2**31 - 1, bs + 1, context)
    rows = torch.randperm(bs, generator=gen, device=DEVICE) + 1
    return table, rows, draw(low, high + 1, bs)


@pytest.mark.parametrize("bs", [1, 127, 128, 129, 4096, 8192, 20000])
@pytest.mark.parametrize("low,high", [(0, 3), (16, 150), (0, 4096), (4096, 4096)])
def test_wide_batches_equal_the_loop(bs, low, high):
    table, rows, lens = random_batch(bs, 4096, low, high)
    want_indptr, want = create_kv_indices(table, rows, lens, backend="naive")
    indptr, out = create_kv_indices(table, rows, lens)
    assert torch.equal(indptr, want_indptr) and torch.equal(out, want)
    again = torch.full((len(want) + 64,), -1, dtype=torch.int64, device=DEVICE)
    create_kv_indices(table, rows.int(), lens.long(), indptr, None, again)
    assert torch.equal(again[: len(want)], want.long()) and (again[len(want) :] == -1).all()


@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64])
def test_full_rows_of_a_table_past_2_to_the_31(rows_dtype):
    """B01 at full length: 4097 rows of stride 524288, the last one starting at entry 2^31."""
    table = torch.empty(4097, 524288, dtype=torch.int32, device=DEVICE).random_()
    rows = torch.tensor([4096, 0, 4095], dtype=rows_dtype, device=DEVICE)
    lens = torch.tensor([524288, 5, 300000], dtype=torch.int32, device=DEVICE)
    _, out = create_kv_indices(table, rows, lens, check=True)
    assert torch.equal(out, torch.cat([table[4096], table[0, :5], table[4095, :300000]]))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_size_is_read_once_and_total_reads_nothing():
    table, rows, lens = random_batch(300, 256, 0, 256)
    want_indptr, want = create_kv_indices(table, rows, lens, backend="naive")
    try:
        torch.cuda.set_sync_debug_mode("error")
        indptr, out = create_kv_indices(table, rows, lens, total=len(want))
        with pytest.raises(RuntimeError, match="synchronizing"):
            create_kv_indices(table, rows, lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(indptr, want_indptr) and torch.equal(out, want)


def test_runs_on_the_current_stream_and_in_a_graph():
    table, rows, lens = random_batch(500, 600, 0, 600)
    out = torch.full((500 * 600,), -1, dtype=torch.int32, device=DEVICE)
    create_kv_indices(table, rows, lens, None, None, out)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indptr, _ = create_kv_indices(table, rows, lens, None, None, out)
    for seed in range(5):
        new = random_batch(500, 600, 0, 600, seed)
        for buffer, value in zip((table, rows, lens), new, strict=True):
            buffer.copy_(value)
        out.fill_(-1)
        graph.replay()
        want_indptr, want = create_kv_indices(*new, backend="naive")
        assert torch.equal(indptr, want_indptr)
        assert torch.equal(out[: len(want)], want) and (out[len(want) :] == -1).all()


def test_no_new_kernel_for_another_batch_stride_or_page_size():
    from phalanx.kernels.kv_indices_triton import copy_rows

    def compiled():
        return sum(len(cache[0]) for cache in copy_rows.device_caches.values())

    wide, rows, lens = random_batch(70, 1024, 1, 900)
    for width in (1024, 1023):  # a row stride that is a multiple of 16, and one that is not
        for page_size in (1, 2):
            table = torch.zeros(80, width, dtype=torch.int32, device=DEVICE)
            create_kv_indices(table, rows, lens, page_size=page_size)
    before = compiled()
    assert before > 0
    for bs, width, page_size in [(1, 1001, 1), (16, 992, 3), (33, 1010, 16), (64, 901, 1), (17, 960, 5)]:
        create_kv_indices(wide[:, :width], rows[:bs], lens[:bs], page_size=page_size)
        other = torch.zeros(80, width, dtype=torch.int32, device=DEVICE)
        create_kv_indices(other, rows[:bs], lens[:bs], page_size=page_size)
    assert compiled() == before


class Columns:
    """Everything that `step_prep` reads and writes."""

    def __init__(self, bucket, context, page_size, seed):
        gen = torch.Generator().manual_seed(seed)
        num_rows, ring = bucket + 1, 8
        self.page_size = page_size
        self.rows = (torch.randperm(bucket, generator=gen) + 1).int()
        self.num_live = torch.tensor([bucket], dtype=torch.int32)
        self.seq_lens = torch.randint(0, context // 2, (num_rows,), generator=gen).int()
        self.table = torch.randint(0, 2**20, (num_rows, context), generator=gen).int()
        self.granted = torch.randint(1, 2**16, (num_rows, ring), generator=gen).int()
        self.out = StepPrepBuffers.allocate(bucket, bucket * -(-context // page_size), "cpu")

    def to(self, device):
        twin = object.__new__(Columns)
        twin.page_size = self.page_size
        for name in ("rows", "num_live", "seq_lens", "table", "granted"):
            setattr(twin, name, getattr(self, name).to(device, copy=True))
        parts = {f.name: getattr(self.out, f.name).to(device, copy=True) for f in fields(self.out)}
        twin.out = StepPrepBuffers(**parts)
        return twin

    def run(self, function, **kwargs):
        args = (self.rows, self.num_live, self.seq_lens, self.table, self.granted, self.out)
        function(*args, page_size=self.page_size, **kwargs)

    def differences(self, other):
        """Names of the tensors that differ; kv_indices is compared over its whole length, tail included."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in ("seq_lens", "table")]
        pairs += [
            (f.name, getattr(self.out, f.name), getattr(other.out, f.name))
            for f in fields(self.out)
            if f.name != "scratch"
        ]
        return [name for name, mine, theirs in pairs if not torch.equal(mine.to(theirs.device), theirs)]


def captured(columns):
    spare = columns.to(DEVICE)
    spare.run(step_prep)  # compile outside the capture, on other buffers
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        columns.run(step_prep)
    return graph


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_thousand_replays_equal_the_reference(page_size):
    """Bucket 4096; rows, live counts and grants change between replays, and rows run into their end."""
    gen = torch.Generator(device=DEVICE).manual_seed(7)
    mine = Columns(4096, 700, page_size, seed=1).to(DEVICE)
    want = mine.to(DEVICE)
    graph = captured(mine)
    for step in range(1000):
        live = int(torch.randint(0, 4097, (1,), generator=gen, device=DEVICE))
        order = (torch.randperm(4096, generator=gen, device=DEVICE) + 1).int()
        grants = torch.randint(1, 2**16, mine.granted.shape, generator=gen, device=DEVICE).int()
        for columns in (mine, want):
            columns.num_live.fill_(live)
            columns.rows.copy_(order)
            columns.granted.copy_(grants)
        graph.replay()
        want.run(step_prep, backend="torch")
        assert mine.differences(want) == [], f"step {step}, {live} live rows"
    assert int(mine.seq_lens[1:].min()) > 300 and int(mine.seq_lens.max()) == 700


def test_replays_equal_the_lane_by_lane_reference():
    want = Columns(200, 60, 4, seed=2)
    mine = want.to(DEVICE)
    graph = captured(mine)
    for live in (200, 199, 3, 0, 128, 129):
        mine.num_live.fill_(live)
        want.num_live.fill_(live)
        graph.replay()
        want.run(reference.step_prep)
        assert mine.differences(want) == [], live


def test_store_kv_in_a_graph_with_padding():
    k, v = (torch.randn(300, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    pools = [torch.zeros(5000, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.arange(300, device=DEVICE) + 1
    store_kv(k, v, *pools, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kv(k, v, *pools, slots)
    for seed in range(3):
        gen = torch.Generator(device=DEVICE).manual_seed(seed)
        slots.copy_(torch.randperm(5000, generator=gen, device=DEVICE)[:300])
        slots[250:] = -1
        k.normal_(generator=gen)
        want = [pool.cpu() for pool in pools]
        reference.store_kv(k.cpu(), v.cpu(), *want, slots.cpu())
        graph.replay()
        assert all(torch.equal(pool.cpu(), right) for pool, right in zip(pools, want, strict=True))
        got_k, got_v = gather_kv(*pools, slots[:250])
        assert torch.equal(got_k, k[:250]) and torch.equal(got_v, v[:250])
