from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import ConfigError
from phalanx.kernels import create_kv_indices
from phalanx.kernels.kv_indices import check_bounds
from phalanx.kernels.ragged import BLOCK_BYTES, MAX_COPY, copy_rows
from phalanx.microbench import kv_indices as kv_indices_bench
from phalanx.microbench import kv_problems

BACKENDS = ["naive", "torch", "triton"]
CANARY = -777
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # compiled there, interpreted here


def expected(table, rows, lens, starts, page_size):
    """The definition, entry by entry."""
    pieces = []
    for row, length, start in zip(rows.tolist(), lens.tolist(), starts.tolist(), strict=True):
        columns = range(start, start + length, page_size)
        pieces.append([int(table[row, column]) // page_size for column in columns])
    indptr = [0]
    for piece in pieces:
        indptr.append(indptr[-1] + len(piece))
    return indptr, [entry for piece in pieces for entry in piece], pieces


def make_table(num_rows, width, pad_columns=0, seed=0):
    gen = torch.Generator().manual_seed(seed)
    wide = torch.randint(0, 2**31 - 1, (num_rows, width + pad_columns), generator=gen, dtype=torch.int32)
    return wide[:, :width]


def strided(values, dtype, every):
    """A vector that holds `values` at every so-many-th place, with junk between."""
    buffer = torch.full((len(values) * every,), 10**6, dtype=dtype)
    buffer[::every] = torch.tensor(values, dtype=dtype)
    return buffer[::every]


@st.composite
def problems(draw):
    page_size = draw(st.sampled_from([1, 1, 2, 3, 7, 16, 64]))
    block = draw(
        st.sampled_from([512, 1024, 1536])
    )  # the Triton kernel takes 512 columns at a time, by threes
    widths = [1, 200, block - 1, block, block + 1, 2 * block + 1]
    width = (
        draw(st.sampled_from(widths))
        if page_size == 1
        else draw(st.integers(1, 700) | st.just(block * page_size + 1))
    )
    num_rows = draw(st.integers(1, 5))
    bs = draw(st.integers(0, 6))
    starts, lens = [], []
    for _ in range(bs):
        start = draw(st.integers(0, width // page_size)) * page_size if draw(st.booleans()) else 0
        room = width - start
        edges = [
            n for n in (0, 1, block - 1, block, block + 1, (block - 1) * page_size + 1, room) if n <= room
        ]
        starts.append(start)
        lens.append(draw(st.sampled_from(edges) | st.integers(0, room)))
    return {
        "table": make_table(num_rows, width, draw(st.integers(0, 3)), draw(st.integers(0, 99))),
        "rows": [draw(st.integers(0, num_rows - 1)) for _ in range(bs)],
        "lens": lens,
        "starts": starts,
        "page_size": page_size,
    }


INTS = st.sampled_from([torch.int32, torch.int64])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.fuzz
@given(
    problem=problems(),
    dtypes=st.tuples(INTS, INTS, INTS),
    every=st.tuples(*[st.integers(1, 3)] * 3),
    out_dtype=st.sampled_from([None, torch.int32, torch.int64]),
    pass_indptr=st.booleans(),
    gap=st.integers(0, 2),
    check=st.booleans(),
)
def test_equals_the_definition(backend, problem, dtypes, every, out_dtype, pass_indptr, gap, check):
    table, page_size, bs = problem["table"], problem["page_size"], len(problem["rows"])
    rows, lens, starts = (
        strided(problem[name], dtype, step)
        for name, dtype, step in zip(("rows", "lens", "starts"), dtypes, every, strict=True)
    )
    dense, flat, pieces = expected(table, rows, lens, starts, page_size)
    offsets = [offset + gap * b for b, offset in enumerate(dense)] if pass_indptr else dense
    indptr_in = torch.tensor(offsets, dtype=torch.int32) if pass_indptr else None
    before, after = 3, 5
    buffer = torch.full((before + offsets[-1] + after,), CANARY, dtype=out_dtype or torch.int32)
    table_before = table.clone()
    indptr, out = create_kv_indices(
        table.to(DEVICE) if DEVICE == "cuda" else table,
        rows.to(DEVICE),
        lens.to(DEVICE),
        None if indptr_in is None else indptr_in.to(DEVICE),
        starts.to(DEVICE) if any(problem["starts"]) or check else None,
        None if out_dtype is None else (buffer := buffer.to(DEVICE))[before : before + offsets[-1] + 2],
        page_size=page_size,
        backend=backend,
        check=check,
    )
    assert indptr.dtype == torch.int32 and indptr.tolist() == offsets
    if out_dtype is None:
        assert out.dtype == torch.int32 and len(out) == offsets[-1]
        for offset, piece in zip(offsets, pieces, strict=False):
            assert out[offset : offset + len(piece)].tolist() == piece
    else:
        want = torch.full_like(buffer, CANARY, device="cpu")
        for offset, piece in zip(offsets, pieces, strict=False):
            want[before + offset : before + offset + len(piece)] = torch.tensor(piece, dtype=out_dtype)
        assert torch.equal(buffer.cpu(), want)
    assert torch.equal(table, table_before) and bs + 1 == len(indptr)
    if not pass_indptr:
        assert torch.equal(out[: len(flat)].cpu(), torch.tensor(flat, dtype=out.dtype))


def vectors(*columns, dtype=torch.int32):
    return [torch.tensor(column, dtype=dtype, device=DEVICE) for column in columns]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 5, 128])
def test_sliding_window_is_exactly_the_last_positions(backend, window):
    """B07: lengths around the window; position i is visible from the last one if i > last - window."""
    table = make_table(8, 140).to(DEVICE)
    seq_lens = [n for n in (window - 1, window, window + 1, window + 2) if 0 < n <= 140]
    rows = list(range(len(seq_lens)))
    lens = [min(n, window) for n in seq_lens]
    starts = [n - kept for n, kept in zip(seq_lens, lens, strict=True)]
    indptr, out = create_kv_indices(
        table, *vectors(rows, lens), None, *vectors(starts), backend=backend, total=sum(lens)
    )
    for b, n in enumerate(seq_lens):
        positions = torch.arange(n)
        visible = positions[(n - 1) - positions < window].to(DEVICE)
        assert torch.equal(out[indptr[b] : indptr[b + 1]], table[b, visible])


@pytest.mark.parametrize("backend", BACKENDS)
def test_encoder_and_decoder_share_a_row(backend):
    """A row is [encoder tokens | decoder tokens]: the decoder's own part starts at the encoder's length."""
    table = make_table(3, 50).to(DEVICE)
    rows, encoder, decoder = vectors([2, 0], [7, 31], [5, 19])
    _, own = create_kv_indices(table, rows, decoder, None, encoder, backend=backend)
    _, cross = create_kv_indices(table, rows, encoder, backend=backend)
    assert torch.equal(own, torch.cat([table[2, 7:12], table[0, 31:50]]))
    assert torch.equal(cross, torch.cat([table[2, :7], table[0, :31]]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_table_of_more_than_2_to_the_31_entries(backend):
    """B01: row * stride passes 2^31. On a CPU the 8.6 GB are address space; few pages are touched."""
    table = torch.empty(16386, 131072, dtype=torch.int32, device=DEVICE)
    values = make_table(2, 600).to(DEVICE)
    table[16384, :600], table[16385, -600:] = values[0], values[1]
    rows, lens, starts = vectors([16384, 16385], [600, 600], [0, 131072 - 600])
    _, out = create_kv_indices(table, rows, lens, None, starts, backend=backend, check=True)
    assert torch.equal(out, values.flatten())


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_shorter_than_needed_is_never_overrun(backend):
    """B03: a buffer sized in pages but filled per token."""
    table = make_table(2, 300).to(DEVICE)
    buffer = torch.full((600,), CANARY, dtype=torch.int32, device=DEVICE)
    short = buffer[: 600 // 16]
    args = (table, *vectors([0, 1], [300, 300]), None, None, short)
    if backend == "triton":
        create_kv_indices(*args, backend=backend)
        assert torch.equal(short, table[0, :37])
    else:
        with pytest.raises(ValueError, match="kv_indices has 37 entries, 600 are needed"):
            create_kv_indices(*args, backend=backend)
    assert (buffer[37:] == CANARY).all()
    with pytest.raises(ValueError, match="leaves the 37 entries"):
        create_kv_indices(*args, backend=backend, check=True)
    with pytest.raises(ValueError, match="kv_indices has 37 entries, total asks for 600"):
        create_kv_indices(*args, backend=backend, total=600)


@pytest.mark.parametrize("backend", BACKENDS)
def test_size_follows_the_lengths_of_this_call(backend):
    """B04: lengths change after the batch was made; nothing is remembered."""
    table = make_table(4, 64).to(DEVICE)
    rows, lens = vectors([3, 1], [5, 6])
    assert len(create_kv_indices(table, rows, lens, backend=backend)[1]) == 11
    lens += 20
    indptr, out = create_kv_indices(table, rows, lens, backend=backend)
    assert indptr.tolist() == [0, 25, 51] and len(out) == 51
    assert torch.equal(out, torch.cat([table[3, :25], table[1, :26]]))
    assert len(create_kv_indices(table, rows, lens, indptr, backend=backend)[1]) == 51


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_are_honoured_or_refused(backend):
    """B09."""
    base = make_table(12, 520).to(DEVICE)
    rows = torch.tensor([7, 99, 3, 99, 5, 99], dtype=torch.int64, device=DEVICE)[::2]
    lens = torch.tensor([511, -1, 512, -1, 513, -1], device=DEVICE)[::2]
    _, out = create_kv_indices(base, rows, lens, backend=backend)
    assert torch.equal(out, torch.cat([base[7, :511], base[3, :512], base[5, :513]]))
    _, out = create_kv_indices(base[1::2], rows[1:] // 3, lens[1:], backend=backend)
    assert torch.equal(out, torch.cat([base[3, :512], base[3, :513]]))
    with pytest.raises(ValueError, match="req_to_token must have a last stride of 1"):
        create_kv_indices(base[:, ::2], rows, lens, backend=backend)
    with pytest.raises(ValueError, match="req_to_token must have a last stride of 1"):
        create_kv_indices(base.T, rows, lens, backend=backend)
    indptr = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="kv_indptr must be contiguous"):
        create_kv_indices(base, rows, lens, indptr[::2], backend=backend)
    with pytest.raises(ValueError, match="kv_indices must be contiguous"):
        create_kv_indices(base, rows, lens, None, None, base[0, ::2], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch(backend):
    table = make_table(2, 5).to(DEVICE)
    indptr, out = create_kv_indices(table, *vectors([], []), backend=backend)
    assert indptr.tolist() == [0] and indptr.dtype == torch.int32 and len(out) == 0
    kept = torch.full((4,), CANARY, device=DEVICE)
    given_indptr = torch.tensor([0], dtype=torch.int32, device=DEVICE)
    indptr, out = create_kv_indices(
        table, *vectors([], []), given_indptr, None, kept, backend=backend, check=True
    )
    assert indptr is given_indptr and out is kept and (kept == CANARY).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_requests_with_empty_ones_between(backend):
    """More requests than two scan blocks, so that offsets cross block borders."""
    table = make_table(30, 9).to(DEVICE)
    gen = torch.Generator().manual_seed(4)
    lens = torch.randint(0, 10, (300,), generator=gen).int()
    lens[::3] = 0
    rows = torch.randint(0, 30, (300,), generator=gen)
    want_indptr, want, _ = expected(table.cpu(), rows, lens, torch.zeros(300).int(), 1)
    indptr, out = create_kv_indices(table, rows.to(DEVICE), lens.to(DEVICE), backend=backend)
    assert indptr.tolist() == want_indptr and out.tolist() == want


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU path")
@pytest.mark.fuzz
@given(
    lens=st.lists(st.integers(0, 9) | st.integers(0, 700), max_size=40),
    gap=st.integers(0, 2),
    dtype=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 99),
)
def test_whole_rows_are_copied(lens, gap, dtype, seed):
    """The CPU path for large batches, at any size; rows at both ends of table and output."""
    random = np.random.default_rng(seed)
    flat = random.integers(0, 2**31, 700, dtype=np.int32)
    counts = np.array(lens, dtype=np.int64)
    first = np.array([random.choice([0, 700 - n, random.integers(0, 701 - n)]) for n in lens], dtype=np.int64)
    offsets = np.cumsum(counts + gap) - counts
    size = sum(lens) + gap * len(lens)
    buffer = np.full(size + 2, CANARY, dtype=dtype)
    want = buffer.copy()
    for a, n, offset in zip(first, lens, offsets, strict=True):
        want[1 + offset : 1 + offset + n] = flat[a : a + n]
    copy_rows(flat, first, counts, offsets, buffer[1 : 1 + size])
    assert (buffer == want).all()


@pytest.mark.parametrize("out_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gap", [0, 3])
def test_rows_longer_than_one_copy(out_dtype, gap):
    """The CPU's torch backend copies rows in classes of lengths, in parts, and through blocks."""
    width = 3 * MAX_COPY + 1
    table = make_table(3, width, pad_columns=1).to(DEVICE)
    lens = [MAX_COPY + d for d in (-1, 0, 1)] + [2 * MAX_COPY, 2 * MAX_COPY + 1, width, 1, 0, 2, 3]
    lens += [BLOCK_BYTES // 4 // 16] * 20  # more than a block of one class
    rows, starts = [b % 3 for b in range(len(lens))], [width - n if b % 2 else 0 for b, n in enumerate(lens)]
    offsets = [1 + gap * b + sum(lens[:b]) for b in range(len(lens) + 1)]
    out = torch.full((offsets[-1] + 2,), CANARY, dtype=out_dtype, device=DEVICE)
    want = out.clone()
    for row, n, start, offset in zip(rows, lens, starts, offsets, strict=False):
        want[offset : offset + n] = table[row, start : start + n]
    create_kv_indices(table, *vectors(rows, lens, offsets), *vectors(starts), out, backend="torch")
    assert torch.equal(out, want)


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU path")
@pytest.mark.parametrize(
    "row,length,start,offset,message",
    [
        (4, 1, 0, 0, "req_pool_indices, .* leaves req_to_token"),
        (-1, 1, 0, 0, "req_pool_indices, .* leaves req_to_token"),
        (3, 8, 2**14 - 7, 0, "leaves req_to_token"),
        (0, 2, -1, 0, "leaves req_to_token"),
        (0, -3, 0, 0, "page_kernel_lens has a negative length"),
        (0, 2, 0, 2**16 - 1, "kv_indices has 65536 entries, kv_indptr asks for more"),
        (0, 2, 0, -1, "kv_indptr has a negative offset"),
    ],
)
def test_copying_whole_rows_writes_nothing_if_one_is_out_of_bounds(row, length, start, offset, message):
    table = make_table(4, 2**14)
    out = torch.full((2**16,), CANARY, dtype=torch.int32)
    rows, lens, starts = vectors([1, 1, 1, row], [2**14] * 3 + [length], [0, 0, 0, start])
    indptr = torch.tensor([0, 2**14, 2**15, offset, 0], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        create_kv_indices(table, rows, lens, indptr, starts, out, backend="torch")
    assert (out == CANARY).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="an index out of range poisons a CUDA context")
@pytest.mark.parametrize("row,start,offset", [(4, 0, 0), (-1, 0, 0), (0, -1, 0), (3, 16, 0), (1, 0, 19)])
def test_torch_on_a_cpu_refuses_a_short_row_out_of_bounds(row, start, offset):
    out = torch.full((22,), CANARY, dtype=torch.int32)
    args = vectors([row], [2], [offset, 0])
    with pytest.raises((ValueError, IndexError), match=r"out of range|asks for more"):
        create_kv_indices(make_table(4, 16), *args, *vectors([start]), out[1:-1], backend="torch")
    assert out[0] == out[-1] == CANARY


def test_total_allocates_without_reading_and_keeps_its_size():
    table = make_table(2, 9).to(DEVICE)
    for backend in BACKENDS:
        indptr, out = create_kv_indices(table, *vectors([1, 0], [3, 4]), total=10, backend=backend)
        assert len(out) == 10 and indptr.tolist() == [0, 3, 7]
        assert torch.equal(out[:7], torch.cat([table[1, :3], table[0, :4]]))


@pytest.mark.parametrize(
    "rows,lens,starts,indptr,message",
    [
        ([0, 4], [1, 1], [0, 0], None, r"req_pool_indices\[1\] = 4 .* outside the table's 4 rows"),
        ([0, -1], [1, 1], [0, 0], None, r"\[1\] = -1 .* outside the table's 4 rows"),
        ([2, 0, 1], [4, 8, 99], [4, 12, 0], None, r"\[1\] = 0 with start 12 and length 8: it ends past"),
        ([1, 2], [0, -3], [0, 0], None, r"\[1\] = 2 .* its length is negative"),
        ([1, 2], [4, 4], [-4, 0], None, r"\[0\] = 1 .* its start is negative"),
        ([1, 2], [4, 4], [0, 6], None, r"\[1\] = 2 .* not a multiple of page_size 4"),
        ([1, 2], [4, 4], [0, 0], [0, 9, 10], r"\[1\] = 2 .* kv_indptr leaves the 8 entries"),
        ([1, 2], [4, 4], [0, 0], [-1, 0, 1], r"\[0\] = 1 .* kv_indptr leaves the 8 entries"),
    ],
)
def test_check_names_the_first_bad_request(rows, lens, starts, indptr, message):
    table = make_table(4, 16).to(DEVICE)
    rows, lens, starts = vectors(rows, lens, starts)
    if indptr is not None:
        (indptr,) = vectors(indptr)
    with pytest.raises(ValueError, match=message):
        create_kv_indices(
            table, rows, lens, indptr, starts, torch.zeros(8, dtype=torch.int32, device=DEVICE),
            page_size=4, check=True,
        )  # fmt: skip


def test_check_accepts_what_just_fits():
    table = make_table(4, 16).to(DEVICE)
    check_bounds(table, *vectors([3, 0], [16, 8]), None, *vectors([0, 8]), page_size=8, room=3)


def test_bad_arguments_are_named():
    table = make_table(4, 16).to(DEVICE)
    rows, lens, indptr = vectors([0, 1], [2, 3], [0, 2, 5])

    def fails(error, match, *args, **kwargs):
        with pytest.raises(error, match=match):
            create_kv_indices(*args, **kwargs)

    fails(TypeError, "req_to_token must be int32, got int64", table.long(), rows, lens)
    fails(TypeError, "req_to_token must be a torch.Tensor, got list", [[1]], rows, lens)
    fails(ValueError, r"req_to_token must have shape \[\*, \*\]", table[0], rows, lens)
    fails(ValueError, "req_to_token is empty", table[:0], rows, lens)
    fails(TypeError, "req_pool_indices must be int32 or int64, got float32", table, rows.float(), lens)
    fails(ValueError, r"req_pool_indices must have shape \[\*\]", table, rows[None], lens)
    fails(TypeError, "page_kernel_lens must be int32 or int64", table, rows, lens.bool())
    fails(ValueError, r"page_kernel_lens must have shape \[2\], got \[1\]", table, rows, lens[:1])
    fails(TypeError, "kv_indptr must be int32, got int64", table, rows, lens, indptr.long())
    fails(ValueError, r"kv_indptr must have shape \[3\]", table, rows, lens, indptr[:2])
    fails(TypeError, "kv_start_idx must be int32 or int64", table, rows, lens, indptr, rows.float())
    fails(ValueError, r"kv_start_idx must have shape \[2\]", table, rows, lens, indptr, rows[:1])
    fails(TypeError, "kv_indices must be int32 or int64", table, rows, lens, None, None, rows.short())
    fails(ValueError, r"kv_indices must have shape \[\*\]", table, rows, lens, None, None, table)
    fails(ValueError, "page_size must be at least 1, got 0", table, rows, lens, page_size=0)
    fails(TypeError, "page_size must be an int", table, rows, lens, page_size=2.0)
    fails(TypeError, "total must be an int or None", table, rows, lens, total=5.0)
    fails(ValueError, r"total must be in \[0, 2147483647\]", table, rows, lens, total=-1)
    fails(ValueError, "backend must be one of auto, naive, torch, triton, got 'cuda'", table, rows, lens,
          backend="cuda")  # fmt: skip
    fails(ValueError, "page_kernel_lens is on meta", table, rows, lens.to("meta"))


def test_the_examples_of_the_guide_run():
    """docs/kv-indices.md: its code, on the tables of its picture."""
    guide = (Path(__file__).parents[2] / "docs" / "kv-indices.md").read_text()
    call, prepare, loop = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    table = torch.full((5, 6), 99, dtype=torch.int32, device=DEVICE)
    for row, slots in {1: [40, 41, 7, 8, 9], 2: [12, 13, 90], 4: [55, 21]}.items():
        table[row, : len(slots)] = torch.tensor(slots)
    rows, lens = vectors([2, 1, 3, 4], [3, 5, 0, 2])
    names = {"req_to_token": table, "req_pool_indices": rows, "page_kernel_lens": lens}
    exec(call, names)
    assert names["kv_indptr"].tolist() == [0, 3, 8, 8, 10]
    assert names["kv_indices"].tolist() == [12, 13, 90, 40, 41, 7, 8, 9, 55, 21]

    names |= {"torch": torch, "rows": rows, "lens": lens}
    exec(loop, names)
    swap = re.search(r"`(create_kv_indices\(req_to_token, rows, lens, total=sum_of_lens\))`", guide)[1]
    _, kv_indices = eval(swap, names | {"sum_of_lens": 10})
    assert torch.equal(kv_indices, names["kv_indices"])

    granted = torch.arange(5, dtype=torch.int32, device=DEVICE)[:, None] + torch.tensor(
        [10, 20, 30], device=DEVICE
    )
    (rows, num_live, seq_lens) = vectors([2, 1, 0, 4], [4], [0, 5, 3, 0, 2])
    names |= {"rows": rows, "num_live": num_live, "seq_lens": seq_lens, "granted_pages": granted.int()}
    exec(prepare, names | {"bucket": 4, "capacity": 24, "device": DEVICE, "page_size": 2})
    assert seq_lens.tolist() == [0, 6, 4, 0, 3]
    assert table[2, 3] == (20 + 2) * 2 + 1 and table[1, 5] == (30 + 1) * 2 + 1 and table[4, 2] == (20 + 4) * 2


def test_triton_on_cpu_tensors_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows = torch.tensor([0])
    with pytest.raises(ValueError, match="backend 'triton' needs CUDA tensors, got cpu"):
        create_kv_indices(make_table(2, 3), rows, rows + 1, backend="triton")


def bench(*argv):
    parser = argparse.ArgumentParser()
    kv_indices_bench.add_arguments(parser)
    return kv_indices_bench.run(parser.parse_args(argv))


def test_the_benchmark_prints_a_table_and_one_json_line(capsys, tmp_path):
    plot = tmp_path / "times.png"
    argv = ["--device", "cpu", "--batch", "3", "40", "--context", "21", "--page-size", "2", "--repeats", "3"]
    assert bench(*argv, "--lens", "full", "short", "--plot", str(plot)) == 0
    *table, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)["results"]
    assert [(r["batch"], r["lens"]) for r in results] == [
        (b, lens) for b in (3, 40) for lens in ("full", "short")
    ]
    assert results[0]["entries"] == 3 * 11  # 21 columns are 11 pages of 2
    for result in results:
        assert set(result["backends"]) == {"memcpy", "naive", "torch", "step_prep"}
        assert all(entry["host_us"] > 0 for entry in result["backends"].values())
    assert sum("step_prep" in line for line in table) == 4
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--context", "5", "-3"], "--context must be at least 1, got -3"),
        (["--page-size", "0"], "--page-size must be at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--plot", "/nonexistent/x.png"], "--plot: /nonexistent is not a folder"),
    ],
)
def test_the_benchmark_refuses_bad_flags(argv, message):
    with pytest.raises(ConfigError, match=message):
        bench("--device", "cpu", *argv)


def test_the_benchmark_notices_a_wrong_result():
    problem = kv_problems.make_problem(4, 30, "uniform", 1, torch.device("cpu"), seed=0)

    def off_by_one(p):
        indptr, out = create_kv_indices(p.table, p.rows, p.lens, None, None, p.out)
        out[-1] += 1
        return indptr, out

    with pytest.raises(RuntimeError, match="broken differs from the per-request loop"):
        kv_problems.verify("broken", off_by_one, problem)


def test_the_kernels_import_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from phalanx.kernels import create_kv_indices\n"
        "t = torch.arange(6, dtype=torch.int32).view(2, 3); one = torch.tensor([1])\n"
        "print(create_kv_indices(t, one, one + 1)[1].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[3, 4]", done.stderr
