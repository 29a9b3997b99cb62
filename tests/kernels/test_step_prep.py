from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.kernels import StepPrepBuffers, reference, step_prep

BACKENDS = ["torch", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # compiled there, interpreted here
CANARY = -12345


class State:
    """Device columns of a small table with room for every row to grow."""

    def __init__(self, num_rows, max_context, page_size, bucket, capacity, seed, pad_columns=0):
        gen = torch.Generator().manual_seed(seed)
        ring = -(-max_context // page_size) + 1
        self.page_size, self.bucket = page_size, bucket
        wide = torch.randint(1, 10**6, (num_rows, max_context + pad_columns), generator=gen).int()
        self.table = wide[:, :max_context]
        self.wide = wide
        self.seq_lens = torch.randint(0, max_context + 1, (num_rows,), generator=gen).int()
        self.granted = torch.randint(1, 10**6 // page_size, (num_rows, ring), generator=gen).int()
        order = torch.randperm(num_rows - 1, generator=gen).int() + 1
        self.rows = torch.full((bucket,), 1, dtype=torch.int32)
        self.rows[: len(order)] = order[:bucket]
        self.num_live = torch.zeros(1, dtype=torch.int32)
        self.out = StepPrepBuffers.allocate(bucket, capacity, "cpu")
        for field in fields(self.out):
            tensor = getattr(self.out, field.name)
            if tensor is not None:
                tensor.fill_(CANARY)

    def copy_to(self, device):
        twin = object.__new__(State)
        twin.page_size, twin.bucket = self.page_size, self.bucket
        twin.wide = self.wide.to(device, copy=True)
        twin.table = twin.wide[:, : self.table.shape[1]]
        for name in ("seq_lens", "granted", "rows", "num_live"):
            setattr(twin, name, getattr(self, name).to(device, copy=True))
        parts = {f.name: getattr(self.out, f.name) for f in fields(self.out)}
        twin.out = StepPrepBuffers(
            **{name: None if part is None else part.to(device, copy=True) for name, part in parts.items()}
        )
        return twin

    def args(self):
        return self.rows, self.num_live, self.seq_lens, self.table, self.granted, self.out

    def assert_same(self, other):
        assert torch.equal(self.wide.cpu(), other.wide), "req_to_token"
        assert torch.equal(self.seq_lens.cpu(), other.seq_lens), "seq_lens"
        for field in fields(self.out):
            if field.name == "scratch":
                continue
            mine, theirs = getattr(self.out, field.name), getattr(other.out, field.name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert torch.equal(mine.cpu(), theirs), field.name


def run_steps(state, live_counts, backend):
    want = state.copy_to("cpu")
    state = state.copy_to(DEVICE)
    for count in live_counts:
        for one in (state, want):
            one.num_live.fill_(count)
        step_prep(*state.args(), page_size=state.page_size, backend=backend)
        reference.step_prep(*want.args(), page_size=want.page_size)
        state.assert_same(want)
    return want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.fuzz
@given(
    num_rows=st.integers(2, 10),
    max_context=st.sampled_from([1, 2, 15, 16, 17, 40, 130]),
    page_size=st.sampled_from([1, 2, 3, 8, 16, 64]),
    extra_lanes=st.integers(0, 4),
    pad_columns=st.integers(0, 3),
    capacity=st.sampled_from(["none", "short", "full"]),
    data=st.data(),
)
def test_equals_reference(
    backend, num_rows, max_context, page_size, extra_lanes, pad_columns, capacity, data
):
    bucket = num_rows - 1 + extra_lanes
    size = {"none": None, "short": bucket, "full": bucket * max_context + 5}[capacity]
    state = State(num_rows, max_context, page_size, bucket, size, data.draw(st.integers(0, 999)), pad_columns)
    counts = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=2))
    run_steps(state, counts, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_in_numbers(backend):
    table = torch.zeros(3, 8, dtype=torch.int32, device=DEVICE)
    table[2, :5] = torch.tensor([12, 13, 14, 15, 40])
    seq_lens = torch.tensor([0, 0, 5], dtype=torch.int32, device=DEVICE)
    granted = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    granted[2, 1], granted[1, 0] = 10, 7
    out = StepPrepBuffers.allocate(4, 16, DEVICE)
    out.kv_indices.fill_(CANARY)
    rows = torch.tensor([2, 1, 0, 2], dtype=torch.int32, device=DEVICE)
    num_live = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    step_prep(rows, num_live, seq_lens, table, granted, out, page_size=4, backend=backend)
    assert out.rows.tolist() == [2, 1, 0, 0]
    assert out.positions.tolist() == [5, 0, 0, 0]
    assert out.slot_mapping.tolist() == [41, 28, 0, 0]
    assert out.seq_lens.tolist() == [6, 1, 1, 1]
    assert out.last_page_len.tolist() == [2, 1, 1, 1]
    assert out.kv_indptr.tolist() == [0, 2, 3, 4, 5]
    assert out.kv_indices.tolist() == [3, 10, 7, 0, 0] + [CANARY] * 11
    assert seq_lens.tolist() == [0, 1, 6]
    assert table[2].tolist() == [12, 13, 14, 15, 40, 41, 0, 0] and table[1, 0] == 28


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_full_row_stays_in_its_row(backend, page_size):
    """B10: a context that is a multiple of nothing, run past its last position."""
    state = State(4, 61, page_size, 3, 200, seed=1, pad_columns=3)
    state.seq_lens[:] = torch.tensor([0, 60, 61, 3])
    state.wide[:, 61:] = CANARY
    state = run_steps(state, [3, 3, 3], backend)
    assert state.seq_lens.tolist() == [0, 61, 61, 6]
    assert (state.wide[:, 61:] == CANARY).all()
    assert state.out.slot_mapping[state.rows == 2].item() == 0
    assert state.out.positions[state.rows == 2].item() == 60


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_lanes_leave_real_rows_alone(backend):
    """B05: 3 live requests in a graph of 8."""
    state = State(9, 32, 1, 8, 300, seed=3)
    before = state.seq_lens.clone()
    state = run_steps(state, [3], backend)
    idle = state.rows[3:].long()
    assert torch.equal(state.seq_lens[idle], before[idle])
    assert state.out.slot_mapping[3:].tolist() == [0] * 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_lanes_than_one_block(backend):
    state = State(271, 20, 4, 270, 270 * 5, seed=5)
    run_steps(state, [270, 129], backend)


def test_bad_arguments_are_named():
    state = State(5, 16, 1, 4, 64, seed=0)
    rows, num_live, seq_lens, table, granted, out = state.args()

    def fails(error, match, **changes):
        args = {
            "rows": rows,
            "num_live": num_live,
            "seq_lens": seq_lens,
            "req_to_token": table,
            "granted_pages": granted,
            "out": out,
            "page_size": 1,
        }
        with pytest.raises(error, match=match):
            step_prep(**{**args, **changes})

    fails(TypeError, "rows must be int32", rows=rows.long())
    fails(ValueError, "rows must have shape", rows=rows[:3])
    fails(ValueError, "num_live must have shape", num_live=torch.zeros(2, dtype=torch.int32))
    fails(ValueError, "seq_lens must be contiguous", seq_lens=torch.zeros(10, dtype=torch.int32)[::2])
    fails(ValueError, "req_to_token must have columns of stride 1", req_to_token=table[:, ::2])
    fails(ValueError, "granted_pages must have shape", granted_pages=granted[:4])
    fails(ValueError, "granted_pages must have at least one column", granted_pages=granted[:, :0])
    fails(ValueError, "page_size must be at least 1", page_size=0)
    fails(TypeError, "page_size must be an int", page_size=1.0)
    fails(ValueError, "backend must be one of", backend="naive")
    with pytest.raises(ValueError, match="capacity must be at least"):
        StepPrepBuffers.allocate(4, 3, "cpu")
    with pytest.raises(ValueError, match="bucket must be at least 1"):
        StepPrepBuffers.allocate(0, 3, "cpu")
