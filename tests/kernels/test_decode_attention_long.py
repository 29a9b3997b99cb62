"""Rows far longer than the rest: which are cut, and attention to their pieces against fp64 loops."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.attention import triton as attention
from phalanx.kernels import decode_attention, find_long_rows, longest_first, reference
from phalanx.kernels import decode_attention_long as module
from phalanx.kernels.decode_attention import default_long_tokens
from tests.kernels.test_decode_attention import DEVICE, Case, assert_near, one_thread

__all__ = ["one_thread"]
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # compiled there, interpreted here


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """So that programs take several pieces, and the interpreter runs no thousand idle ones."""
    from phalanx.kernels import decode_attention_long_triton as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_PROGRAMS", 6)
        patch.setattr(kernels, "_MERGE_ROWS", 2)
        yield


few = settings(max_examples=max(8, settings.default.max_examples // 5))  # the interpreter is slow


def plain(lens, long_tokens, times_mean, piece_tokens, max_pieces):
    """The rows to cut, by a loop: (lane, first piece) and the pieces in all."""
    cut, num_pieces = [], 0
    for lane, length in enumerate(lens):
        if length <= long_tokens or length <= times_mean * sum(lens) / len(lens):
            continue
        pieces = -(-length // piece_tokens)
        if num_pieces + pieces > max_pieces or len(cut) == module.MAX_LONG:
            break
        cut.append((lane, num_pieces))
        num_pieces += pieces
    return cut, num_pieces


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.fuzz
@few
@given(data=st.data())
def test_the_first_long_rows_that_find_room_are_cut(backend, data):
    long_tokens = data.draw(st.sampled_from([16, 40, 100]))
    times_mean = data.draw(st.sampled_from([0, 1, 4]))
    lens = data.draw(st.lists(st.integers(0, 300) | st.integers(0, 9), min_size=1, max_size=40))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_PIECES", data.draw(st.sampled_from([1, 20, 2048])))
        found = find_long_rows(
            torch.tensor(lens, dtype=dtype, device=DEVICE),
            300,
            long_tokens=long_tokens,
            times_mean=times_mean,
            piece_tokens=16,
            backend=backend,
        )
        cut, num_pieces = plain(lens, long_tokens, times_mean, 16, min(module.MAX_PIECES, len(lens) * 19))
    assert found is not None
    assert found.counts.tolist() == [num_pieces, len(cut)]
    assert list(zip(found.lanes.tolist(), found.first_piece.tolist(), strict=True))[: len(cut)] == cut
    lanes = {lane for lane, _ in cut}
    assert found.short_lens.tolist() == [0 if i in lanes else n for i, n in enumerate(lens)]
    assert found.short_lens.dtype == dtype


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_more_rows_are_cut_than_there_is_room_for(backend):
    lens = torch.full((module.MAX_LONG + 9,), 17, dtype=torch.int32, device=DEVICE)
    found = find_long_rows(lens, 64, long_tokens=16, times_mean=0, piece_tokens=16, backend=backend)
    assert found is not None
    assert found.counts.tolist() == [2 * module.MAX_LONG, module.MAX_LONG]
    assert found.lanes.tolist() == list(range(module.MAX_LONG))
    assert found.short_lens.tolist() == [0] * module.MAX_LONG + [17] * 9


@pytest.mark.fuzz
@few
@given(
    lens=st.lists(st.sampled_from([0, 1, 15, 16, 31, 32, 33, 34, 48, 70, 150]), min_size=1, max_size=5),
    shape=st.sampled_from([(2, 2, 8), (6, 2, 16), (8, 2, 24), (14, 2, 40)]),
    page_size=st.sampled_from([1, 3, 16, 64]),
    max_pieces=st.sampled_from([4, 2048]),
    seed=st.integers(0, 999),
)
def test_cut_rows_equal_the_loop(lens, shape, page_size, max_pieces, seed):
    case = Case(lens, *shape, page_size, seed=seed)
    q = case.queries(len(lens))
    args = (q, *case.pool(), case.rows, case.lens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_PIECES", max_pieces)
        long_rows = find_long_rows(
            case.lens, 150, long_tokens=32, times_mean=0, piece_tokens=16, backend="triton"
        )
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    got = decode_attention(*args, page_size=page_size, long_rows=long_rows, out=out, backend="triton")
    assert got is out
    assert_near(got, reference.decode_attention(*args, page_size=page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads,head_dim", [((8, 2), 80), ((32, 2), 128)])
def test_model_shapes(dtype, heads, head_dim):
    """More pieces than are joined at a time, and more than one program takes in a turn."""
    case = Case([3, 700, 40], *heads, head_dim, dtype=dtype)
    args = (case.queries(3), *case.pool(), case.rows, case.lens)
    long_rows = find_long_rows(
        case.lens, 700, long_tokens=64, times_mean=2, piece_tokens=16, backend="triton"
    )
    assert long_rows is not None and long_rows.counts.tolist() == [44, 1]
    got = decode_attention(*args, long_rows=long_rows, backend="triton")
    assert_near(got, reference.decode_attention(*args))


def test_the_engine_begins_longest_first_what_is_not_cut(monkeypatch):
    """A step's state; without a device `begin` is told that there is one."""
    cut = partial(find_long_rows, times_mean=2, piece_tokens=16, backend="triton")
    monkeypatch.setattr(attention, "find_long_rows", cut)
    monkeypatch.setattr(attention, "longest_first", partial(longest_first, backend="triton"))
    monkeypatch.setattr(attention, "default_long_tokens", lambda *args: 64)
    case = Case([3, 300, 40, 0, 41, 40], 4, 2, 16)
    table = SimpleNamespace(is_cuda=True, shape=case.table.shape)
    decode = SimpleNamespace(seq_lens=case.lens)
    batch = SimpleNamespace(decode=decode, req_to_token=table, num_decode=len(case.lens), prefill=None)
    backend, pool = (
        attention.TritonAttention(SimpleNamespace(head_dim=16, num_q_heads=4, num_kv_heads=2)),
        SimpleNamespace(k=[case.k]),
    )
    state = backend.begin(batch, pool)
    assert state.long_rows is not None and state.long_rows.counts.tolist() == [19, 1]
    assert state.order is not None and state.order.tolist() == [4, 2, 5, 0, 1, 3]
    args = (case.queries(len(case.lens)), *case.pool(), case.rows, case.lens)
    for num_splits in (1, 2):
        out = torch.full(args[0].shape, torch.nan, device=DEVICE)
        more = {"order": state.order, "long_rows": state.long_rows, "num_splits": num_splits, "out": out}
        got = decode_attention(*args, backend="triton", **more)
        assert_near(got, reference.decode_attention(*args))
    monkeypatch.setattr(attention, "MAX_ORDERED", len(case.lens) - 1)
    assert backend.begin(batch, pool).order is None


def test_nothing_is_launched_where_no_row_can_be_long():
    lens = torch.tensor([5, 64], dtype=torch.int32, device=DEVICE)
    assert find_long_rows(lens, 64, long_tokens=64, piece_tokens=16, backend="triton") is None
    assert find_long_rows(lens[:0], 65, long_tokens=64, piece_tokens=16, backend="triton") is None
    assert find_long_rows(lens, module.LONG_TOKENS) is None


def test_small_batches_share_rows_without_being_cut():
    assert default_long_tokens(4096, 8, 131072) == module.LONG_TOKENS
    assert default_long_tokens(8, 8, 131072) == 16 * module.LONG_TOKENS
    assert default_long_tokens(1, 8, 512) == 2 * module.LONG_TOKENS  # of two splits


def test_wrong_arguments_are_refused():
    lens = torch.tensor([5, 640], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="piece_tokens must be a power of two"):
        find_long_rows(lens, 640, piece_tokens=48)
    with pytest.raises(ValueError, match="long_tokens must be at least piece_tokens 512"):
        find_long_rows(lens, 640, long_tokens=100)
    with pytest.raises(TypeError, match="seq_lens"):
        find_long_rows(lens.float(), 640)
    case = Case([3, 70], 4, 2, 16)
    other = find_long_rows(lens[:1], 640, long_tokens=64, piece_tokens=16, backend="triton")
    args = (case.queries(2), *case.pool(), case.rows, case.lens)
    with pytest.raises(ValueError, match="long_rows are those of 1 rows"):
        decode_attention(*args, long_rows=other, backend="triton")
