"""The numba kernels of the CPU: against fp64, any layout, any number of threads, and their place on disk."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core import caching

from phalanx.kernels import add_rms_norm, cpu_jit, decode_attention, reference, rms_norm, rope, silu_mul
from phalanx.kernels.checks import numba_problem, pick_with_numba
from phalanx.kernels.cpu_jit import to_bf16
from phalanx.kernels.cpu_parallel import ALONE, Kernel, chunks_of
from phalanx.kernels.cpu_vectors import BF16, store_row, width
from phalanx.kernels.decode_attention_numba import TILE, plan, shared_group

ROW = width(64)  # lanes of a vector in rows of 64
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
GARBAGE = 2**31 - 1  # table entries that must never be read
few = settings(max_examples=max(10, settings.default.max_examples // 3))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Case:
    """Rows on shuffled pages, q with gaps between heads and tokens, a table wider than any row."""

    def __init__(self, lens, num_q_heads, num_kv_heads, head_dim, dtype, page_size, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(shape, generator=generator)

        n, pages = len(lens), [-(-length // page_size) for length in lens]
        page_ids = torch.randperm(sum(pages), generator=generator) + 1
        wide = torch.full((n + 2, max(pages, default=0) * page_size + 7), GARBAGE, dtype=torch.int32)
        self.table = wide[:, 3:-3]
        self.rows = torch.randperm(n + 1, generator=generator)[:n] + 1
        at = 0
        for row, count in zip(self.rows.tolist(), pages, strict=True):
            firsts = page_ids[at : at + count].int() * page_size
            self.table[row, : count * page_size : page_size] = firsts  # the entries within pages stay garbage
            at += count
        shape = ((sum(pages) + 1) * page_size, num_kv_heads, head_dim)
        self.k, self.v = randn(*shape).to(dtype), randn(*shape).to(dtype)
        self.k[:page_size], self.v[:page_size] = torch.nan, torch.nan  # padding page 0
        self.q = randn(n, num_q_heads + 3, head_dim + 2).to(dtype)[:, 1:-2, 1:-1]
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.page_size = page_size

    def run(self, backend="numba", **changes):
        args = (self.q, self.k, self.v, self.table, self.rows, self.lens)
        return decode_attention(*args, page_size=self.page_size, backend=backend, **changes)

    def want(self):
        args = (self.q, self.k, self.v, self.table, self.rows, self.lens)
        return reference.decode_attention(*args, page_size=self.page_size)


def assert_near(got, want, dtype=None):
    tolerance = TOLERANCE[dtype or got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "head_dim"), [(1, 64), (3, 64), (4, 64), (8, 64), (8, 80), (3, 96), (1, 128), (4, 128)]
)
def test_attention_equals_fp64(group, head_dim, dtype):
    for page_size in (1, 16):
        lens = [1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, 2 * TILE + 3]
        case = Case(lens, 2 * group, 2, head_dim, dtype, page_size)
        assert_near(case.run(), case.want())


@pytest.mark.parametrize(("group", "head_dim"), [(2, 2), (3, 6), (11, 40), (16, 64), (12, 256)])
def test_attention_of_odd_shapes(group, head_dim):
    case = Case([5, 0, 131, 1], group, 1, head_dim, torch.float32, 3)
    got = case.run()
    assert_near(got, case.want())
    assert not got[1].any()


@pytest.mark.fuzz
@few
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=9),
    st.sampled_from([(1, 3), (3, 3), (2, 1)]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
def test_attention_of_any_rows(lens, heads, page_size, dtype, seed):
    group, num_kv_heads = heads
    case = Case(lens, group * num_kv_heads, num_kv_heads, 64, dtype, page_size, seed)
    assert_near(case.run(), case.want())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_in_any_batch_on_any_threads(dtype):
    lens = np.random.default_rng(0).integers(1, 400, 40).tolist()
    case = Case(lens, 9, 3, 64, dtype, 16)
    torch.set_num_threads(1)
    alone = case.run()
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(case.run(), alone)
        for row in (0, 17, 39):  # few rows are cut by heads
            one = slice(row, row + 1)
            args = (case.q[one], case.k, case.v, case.table, case.rows[one], case.lens[one])
            assert torch.equal(decode_attention(*args, page_size=16, backend="numba"), alone[one])


def test_attention_writes_nothing_else_and_takes_int32_rows():
    case = Case([3, 200], 6, 2, 64, torch.float32, 1)
    wide = torch.full((4, 8, 66), torch.nan)
    out = wide[1:3, 1:7, 1:65]
    case.rows, case.lens = case.rows.int(), case.lens.long()
    case.run(out=out)
    assert_near(out, case.want())
    out.fill_(torch.nan)
    assert wide.isnan().all()


def test_nan_in_a_row_stays_in_the_row():
    case = Case([70, 200, 5], 3, 1, 64, torch.bfloat16, 1)
    case.k[case.table[case.rows[1], 150]] = torch.nan
    got = case.run()
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_far_apart_scores_do_not_overflow():
    case = Case([300, 7], 3, 1, 64, torch.float32, 1)
    case.q *= 100
    assert_near(case.run(), case.want())


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 7, 100])
def test_plan_gives_every_task_once(threads, num_rows):
    torch.set_num_threads(threads)
    lens = torch.randint(0, 500, (num_rows,), generator=torch.Generator().manual_seed(1)).int()
    cut = plan(lens, 3)
    bounds = cut.bounds.tolist()
    assert bounds[0] == 0 and bounds[-1] == num_rows * cut.parts
    assert bounds == sorted(set(bounds))
    if threads > 1 and num_rows == 100:
        assert len(bounds) > threads


@pytest.mark.parametrize(("group", "shared"), [(1, 1), (3, 3), (7, 7), (8, 8), (9, 3), (11, 1), (16, 8)])
def test_shared_group(group, shared):
    assert shared_group(group) == shared


@pytest.mark.parametrize(("num_items", "size"), [(1, 1), (64, 576), (64, 3072), (4096, 3072), (3, 10**6)])
def test_chunks_cover_the_items(num_items, size):
    torch.set_num_threads(3)
    per_chunk, chunks = chunks_of(num_items, size)
    assert (chunks - 1) * per_chunk < num_items <= chunks * per_chunk
    assert chunks == 1 or num_items * size // chunks >= ALONE // 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit_of_the_other_kernels(dtype):
    generator = torch.Generator().manual_seed(0)

    def results(count):
        torch.set_num_threads(count)
        generator.manual_seed(0)
        x, y = (torch.randn(700, 576, generator=generator).to(dtype) for _ in range(2))
        weight = torch.randn(576, generator=generator).to(dtype)
        heads = torch.randn(700, 15, 64, generator=generator).to(dtype)
        cache, positions = torch.randn(800, 64, generator=generator), torch.arange(700)
        found = [rms_norm(x, weight, 1e-5, backend="numba"), silu_mul(heads.view(700, 960), backend="numba")]
        add_rms_norm(x, y, weight, 1e-5, backend="numba")
        rope(heads[:, :9], heads[:, 9:12], positions, cache, backend="numba")
        return [*found, x, y, heads]

    for one, three in zip(results(1), results(3), strict=True):
        assert torch.equal(one, three)


def test_silu_is_exact_to_a_millionth():
    gate = torch.linspace(-87, 88, 100_001).repeat(1, 1)
    got = silu_mul(torch.cat((gate, torch.ones_like(gate)), 1), backend="numba").double()
    want = gate.double() * torch.sigmoid(gate.double())
    normal = want.abs() > 2e-38
    assert ((got - want).abs() <= 1e-6 * want.abs())[normal].all()


def test_silu_of_the_largest_and_of_nan():
    gate = torch.tensor([[-3e38, -torch.inf, 3e38, torch.inf, torch.nan, 0.0]])
    got = silu_mul(torch.cat((gate, torch.ones_like(gate)), 1), backend="numba")[0]
    assert got[0] == 0 and got[2] == gate[0, 2] and got[3] == torch.inf and got[4].isnan() and got[5] == 0


def test_bf16_rounds_as_torch_does():
    """Every bf16, its neighbours in fp32 and halfway between: the kernels' rounding is torch's."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = torch.from_numpy(bits.view(np.float32).copy())
    want = values.bfloat16()
    scalar, vector = np.empty((2, len(bits)), np.uint16)
    _round_both_ways(values.numpy(), scalar, vector)
    for got in (torch.from_numpy(scalar).view(torch.bfloat16), torch.from_numpy(vector).view(torch.bfloat16)):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got[~want.isnan()], want[~want.isnan()])


@njit
def _round_both_ways(values, scalar, vector):
    for i in range(len(values)):
        scalar[i] = to_bf16(values[i])
    pair = np.empty(64, np.float32)
    for start in range(0, len(values), 64):
        for i in range(32):  # as `load_row` lays a row of bf16 out: W even elements, then W odd ones
            pair[i // ROW * 2 * ROW + i % ROW] = values[start + 2 * i]
            pair[i // ROW * 2 * ROW + ROW + i % ROW] = values[start + 2 * i + 1]
        store_row(pair.ctypes.data, vector[start:].ctypes.data, np.float32(1.0), 64, BF16)
    return pair[0]


def test_backends_that_cannot_run_are_refused():
    assert pick_with_numba("auto", CPU, torch.bfloat16) == "numba"
    assert pick_with_numba("auto", CPU, torch.float16) == "torch"
    with pytest.raises(ValueError, match="float16"):
        pick_with_numba("numba", CPU, torch.float16)
    with pytest.raises(ValueError, match="meta"):
        pick_with_numba("numba", torch.device("meta"), torch.float32)


def test_without_numba_torch_takes_over(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    numba_problem.cache_clear()
    try:
        assert "cannot be imported" in numba_problem(torch.float32)
        assert pick_with_numba("auto", CPU, torch.float32) == "torch"
    finally:
        numba_problem.cache_clear()


_RUN = """
import logging, torch
logging.basicConfig(format="%(message)s")
from phalanx.kernels import rms_norm
x = torch.ones(2, 8)
assert torch.equal(rms_norm(x, x[0], 0.0, backend="numba"), x)
"""


def _run(**environment):
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_kernels_are_kept_where_numba_is_told(tmp_path: Path):
    _run(NUMBA_CACHE_DIR=str(tmp_path))
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    assert len(first) == 1
    _run(NUMBA_CACHE_DIR=str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == first


def test_kernels_run_where_nothing_can_be_kept(monkeypatch, caplog):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    run = cpu_jit.compiled(1)(_claim)
    assert "compiled at every start" in caplog.text
    block = np.array([0, 5], np.int64)
    Kernel(run.address, 0)(5)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run.address)(block.ctypes.data)
    assert block[0] == 6  # five chunks and the claim that found none


def _claim(address):
    while cpu_jit.fetch_add(address, 1) < cpu_jit.int64s(address, 2)[1]:
        pass
