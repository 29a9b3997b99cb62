"""Decode and prefill attention from the request-to-token table against fp64 loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.kernels import (
    DecodeConfig,
    decode_attention,
    decode_workspace_size,
    longest_first,
    prefill_attention,
    prefill_tiles,
    reference,
)
from phalanx.kernels.decode_attention import (
    MAX_SPLITS,
    SPLIT_TOKENS,
    check_config,
    default_config,
    default_splits,
    piece_config,
)
from phalanx.kernels.decode_attention_long import PIECE_TOKENS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # compiled there, interpreted here
cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
few = settings(max_examples=max(8, settings.default.max_examples // 5))  # the interpreter is slow

VARIANTS = {
    "torch": {"backend": "torch"},
    "tiles of 16": {"backend": "triton", "config": DecodeConfig(tokens=16, num_warps=1, num_stages=5)},
    "ahead": {"backend": "triton", "config": DecodeConfig(tokens=16, num_warps=1, ahead=True)},
    "tiles of 32": {"backend": "triton", "config": DecodeConfig(tokens=32, num_warps=4, num_stages=3)},
    "tiles of 64": {"backend": "triton", "config": DecodeConfig(tokens=64, num_warps=4, ahead=True)},
}
# bf16 is truncated, not rounded, by Triton's interpreter.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are tiny: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    """Rows of the given lengths over a pool whose unused slots hold NaN.

    Table entries that must not be read point to a page of NaN: past a row's length, and between multiples of
    the page size.
    """

    def __init__(self, lens, num_q_heads, num_kv_heads, head_dim, page_size=1, dtype=torch.float32, seed=0):
        gen = torch.Generator().manual_seed(seed)
        pages = [-(-length // page_size) for length in lens]
        num_slots = (sum(pages) + 2) * page_size
        shape = (2, num_slots, num_kv_heads, head_dim)
        pool = torch.full(shape, torch.nan, dtype=dtype)
        order = torch.randperm(sum(pages), generator=gen) + 1
        table = torch.full((len(lens) + 2, max(lens, default=0) + 5), num_slots - page_size).int()
        rows = torch.randperm(len(lens), generator=gen) + 1
        pool[:, :page_size] = torch.randn(2, page_size, num_kv_heads, head_dim, generator=gen).to(dtype)
        table[0, 0] = 0
        first = 0
        for row, length, count in zip(rows.tolist(), lens, pages, strict=True):
            slots = order[first : first + count] * page_size
            table[row, :length:page_size] = slots.int()
            used = (slots[:, None] + torch.arange(page_size)).flatten()[:length]
            pool[:, used] = torch.randn(2, length, num_kv_heads, head_dim, generator=gen).to(dtype)
            first += count
        self.page_size, self.gen, self.dtype = page_size, gen, dtype
        self.heads, self.head_dim = num_q_heads, head_dim
        self.k, self.v = pool.to(DEVICE)
        self.table, self.rows = table.to(DEVICE), rows.to(DEVICE)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)

    def queries(self, num_tokens):
        """A view into wider memory, as q is in a merged qkv."""
        wide = torch.randn(num_tokens, self.heads + 3, self.head_dim, generator=self.gen)
        return wide.to(DEVICE, self.dtype)[:, 1 : self.heads + 1]

    def pool(self):
        return self.k, self.v, self.table


def assert_near(got, want):
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def run(case, q, variant, **more):
    args = (q, *case.pool(), case.rows, case.lens)
    got = decode_attention(*args, page_size=case.page_size, **VARIANTS[variant], **more)
    return got, reference.decode_attention(*args, page_size=case.page_size)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.fuzz
@few
@given(
    lens=st.lists(st.integers(0, 50), min_size=0, max_size=3),
    shape=st.sampled_from([(2, 2, 8), (6, 2, 16), (8, 2, 24), (14, 2, 40)]),
    page_size=st.sampled_from([1, 1, 3, 16]),
    seed=st.integers(0, 999),
)
def test_any_rows_equal_the_loop(variant, lens, shape, page_size, seed):
    case = Case(lens, *shape, page_size, seed=seed)
    assert_near(*run(case, case.queries(len(lens)), variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads,head_dim", [((4, 2), 64), ((8, 2), 80), ((2, 2), 96), ((32, 2), 128)])
def test_model_shapes(variant, dtype, heads, head_dim):
    case = Case([1, 33], *heads, head_dim, page_size=16 if head_dim == 96 else 1, dtype=dtype)
    assert_near(*run(case, case.queries(2), variant))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "page_size"), [(16, 64), (64, 64), (64, 256), (128, 128), (128, 64), (128, 3), (128, 1)]
)
def test_wide_tiles_and_pages(tokens, page_size, num_splits):
    """Of a tile within one page only the first slot is read. Rows end at tiles, pages, pieces, and beside."""
    ends = (tokens, page_size, SPLIT_TOKENS, SPLIT_TOKENS + tokens)
    case = Case([0, *(end + more for end in ends for more in (-1, 0, 1))], 4, 2, 16, page_size)
    args = (case.queries(len(case.lens)), *case.pool(), case.rows, case.lens)
    config = DecodeConfig(tokens=tokens, num_warps=4, ahead=True)
    more = {"page_size": page_size, "order": longest_first(case.lens), "num_splits": num_splits}
    got = decode_attention(*args, config=config, backend="triton", **more)
    assert_near(got, reference.decode_attention(*args, page_size=page_size))


@pytest.mark.parametrize("head_dim", [1, 16, 32, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_default_configurations_are_possible(head_dim, itemsize):
    found = {default_config(programs, head_dim, itemsize) for programs in (8, 1536, 1537, 8192, 8193, 10**6)}
    assert len(found) == 3 and piece_config(head_dim) in found
    for config in found:
        check_config(config)
        assert SPLIT_TOKENS % config.tokens == 0  # else pieces of split rows would be rounded up
        assert config.tokens == 16 or config.tokens * head_dim * itemsize <= 16384
    assert PIECE_TOKENS % piece_config(head_dim).tokens == 0


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "torch"])
def test_long_rows_are_split_and_merged(variant):
    """Short rows beside them are finished by their first program; scratch of theirs is never read."""
    lens = [2 * SPLIT_TOKENS + 40, 5, SPLIT_TOKENS, SPLIT_TOKENS + 1, 0, 2 * SPLIT_TOKENS]
    case = Case(lens, 4, 2, 16)
    q = case.queries(len(lens))
    for num_splits in (2, 5):
        size = decode_workspace_size(*q.shape, num_splits)
        scratch = torch.full((size,), torch.nan, device=DEVICE)
        got, want = run(case, q, variant, num_splits=num_splits, workspace=scratch)
        assert_near(got, want)
        assert (got[4] == 0).all()
        # 2 splits: rows of at most SPLIT_TOKENS write nothing to scratch, the longer ones all of theirs.
        touched = ~scratch.view(len(lens), -1).isnan()
        assert touched[0].any() and not touched[[1, 2, 4]].any()
        if num_splits == 2:
            assert touched[[0, 3, 5]].all()


def test_automatic_splits():
    assert default_splits(4096, 8, 131072) == 1
    assert default_splits(1, 8, 131072) == MAX_SPLITS
    assert default_splits(1, 8, SPLIT_TOKENS) == 1
    assert default_splits(16, 8, 2 * SPLIT_TOKENS + 1) == 3
    case = Case([600], 4, 2, 16)
    assert_near(*run(case, case.queries(1), "tiles of 32"))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.fuzz
@few
@given(
    lens=st.lists(st.integers(0, 9) | st.integers(0, 200_000), min_size=0, max_size=300),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_longest_first_is_a_stable_order(backend, lens, dtype):
    order = longest_first(torch.tensor(lens, dtype=dtype, device=DEVICE), backend=backend)
    assert order.dtype == torch.int32
    assert order.tolist() == sorted(range(len(lens)), key=lambda row: -lens[row])


@pytest.mark.parametrize("num_splits", [1, 2])
def test_the_order_of_rows_changes_no_bit(num_splits):
    case = Case([3, 2 * SPLIT_TOKENS + 40, 0, 40, 1], 4, 2, 16)
    args, more = (case.queries(5), *case.pool(), case.rows, case.lens), {"num_splits": num_splits}
    want = decode_attention(*args, backend="triton", **more)
    assert_near(want, reference.decode_attention(*args))
    for order in (longest_first(case.lens), torch.tensor([2, 0, 4, 1, 3], dtype=torch.int32, device=DEVICE)):
        out = torch.full_like(want, torch.nan)
        assert decode_attention(*args, backend="triton", order=order, out=out, **more).equal(want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_lanes_are_finite_and_empty_rows_are_zero(variant):
    case = Case([0, 9, 1, 1], 4, 2, 16, page_size=4)
    case.rows[2:] = 0  # a padding lane: row 0, length 1, slot 0
    q = case.queries(4)
    got, want = run(case, q, variant)
    assert_near(got, want)
    assert (got[0] == 0).all() and torch.isfinite(got).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_out_scale_and_index_types(variant):
    case = Case([3, 20], 4, 2, 16)
    q = case.queries(2)
    wide = torch.full((2, 7, 16), 123.0, device=DEVICE)
    case.rows, case.lens = case.rows.int(), case.lens.long()
    args = (q, *case.pool(), case.rows, case.lens)
    got = decode_attention(*args, sm_scale=0.5, out=wide[:, 2:6], **VARIANTS[variant])
    assert got.data_ptr() == wide[:, 2:6].data_ptr()
    assert_near(wide[:, 2:6], reference.decode_attention(*args, sm_scale=0.5))
    assert (wide[:, :2] == 123).all() and (wide[:, 6:] == 123).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_scores_do_not_overflow(variant):
    case = Case([40], 2, 2, 8)
    args = (case.queries(1) * 1e4, *case.pool(), case.rows, case.lens)
    got = decode_attention(*args, **VARIANTS[variant])
    # Scores near 1e4 carry an fp32 rounding error near 1e-3, which is one of the softmax's relative error.
    torch.testing.assert_close(got.double(), reference.decode_attention(*args), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("variant", ["torch", "tiles of 16"])
def test_addresses_past_2_to_the_31(variant):
    """The row starts past entry 2^31 of the table and its slots lie past entry 2^31 of the pool."""
    table = torch.empty(16386, 131072, dtype=torch.int32, device=DEVICE)
    num_slots = 2**31 // (8 * 128) + 40
    k, v = (torch.empty(num_slots, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    slots = torch.arange(num_slots - 20, num_slots, device=DEVICE)
    k[slots], v[slots] = (torch.randn(20, 8, 128).to(DEVICE, torch.bfloat16) for _ in range(2))
    table[16385, :20] = slots.int()
    q = torch.randn(1, 8, 128).to(DEVICE, torch.bfloat16)
    args = (q, k, v, table, torch.tensor([16385], device=DEVICE), torch.tensor([20], device=DEVICE))
    assert_near(decode_attention(*args, **VARIANTS[variant]), reference.decode_attention(*args))


def chunk_case(chunks, gaps, shape, page_size=1, dtype=torch.float32, seed=0):
    """chunks: (start, length). gaps: tokens of q before each chunk that belong to none (decode rows)."""
    case = Case([start + length for start, length in chunks], *shape, page_size, dtype, seed)
    bounds = [gaps]
    for _, length in chunks:
        bounds.append(bounds[-1] + length)
    indptr = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([start for start, _ in chunks], dtype=torch.int32, device=DEVICE)
    q = case.queries(bounds[-1] + 2)
    return case, (q, *case.pool(), indptr, case.rows, starts), max([n for _, n in chunks], default=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.fuzz
@few
@given(
    chunks=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 40)), max_size=3),
    gaps=st.integers(0, 3),
    shape=st.sampled_from([(1, 1, 8), (3, 1, 16), (8, 2, 24), (7, 1, 40), (16, 1, 16)]),
    page_size=st.sampled_from([1, 1, 5, 16]),
    shared=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_chunks_equal_the_loop(backend, chunks, gaps, shape, page_size, shared, seed):
    """shared: with tiles that were found before, for more tokens and a longer chunk than there are."""
    _, args, longest = chunk_case(chunks, gaps, shape, page_size, seed=seed)
    out = torch.full(args[0].shape, 55.0, device=DEVICE)
    more = {"page_size": page_size, "backend": backend}
    if shared and chunks:
        size = {"longest": longest + seed % 50, "group": shape[0] // shape[1]}
        more["tiles"] = prefill_tiles(args[4], args[0].shape[0] + seed % 40, **size)
    got = prefill_attention(*args, max_chunk_len=longest + seed % 3, out=out, **more)
    inside = slice(gaps, gaps + sum(length for _, length in chunks))
    assert_near(got[inside], reference.prefill_attention(*args, page_size=page_size)[inside])
    assert (got[: inside.start] == 55).all() and (got[inside.stop :] == 55).all()


@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.fuzz
@few
@given(
    lens=st.lists(st.integers(0, 200), min_size=1, max_size=9),
    begin=st.integers(0, 5),
    spare=st.integers(0, 300),
    longer=st.integers(0, 100),
)
def test_every_query_is_in_one_tile(group, lens, begin, spare, longer):
    indptr = torch.tensor([begin, *(begin + np.cumsum(lens))], dtype=torch.int32, device=DEVICE)
    found = prefill_tiles(indptr, sum(lens) + spare, longest=max(lens) + longer, group=group)
    tiles = list(zip(found.chunks.tolist(), found.firsts.tolist(), strict=True))
    wanted = [(i, n) for i, length in enumerate(lens) for n in range(-(-length * group // found.queries))]
    assert tiles[: len(wanted)] == wanted
    assert all(chunk == len(lens) for chunk, _ in tiles[len(wanted) :])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 2, 64), (8, 2, 80), (4, 1, 128)])
def test_chunks_of_model_shapes(backend, dtype, shape):
    _, args, longest = chunk_case([(0, 1), (40, 30), (5, 17)], 0, shape, dtype=dtype)
    got = prefill_attention(*args, max_chunk_len=longest, backend=backend)
    assert_near(got[:48], reference.prefill_attention(*args)[:48])


def test_a_chunk_of_one_token_is_decode():
    case, args, _ = chunk_case([(30, 1), (0, 1)], 0, (6, 2, 16))
    got = prefill_attention(*args, max_chunk_len=1, backend="triton")[:2]
    want = decode_attention(args[0][:2], *case.pool(), case.rows, case.lens, backend="triton")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named():
    case = Case([4, 5], 4, 2, 16)
    q, (k, v, table) = case.queries(2), case.pool()

    def call(q=q, k=k, v=v, table=table, rows=case.rows, lens=case.lens, **more):
        return decode_attention(q, k, v, table, rows, lens, **more)

    with pytest.raises(TypeError, match="k_pool must be bfloat16, got float32"):
        call(q=q.bfloat16())
    with pytest.raises(ValueError, match="q has 3 heads, not a multiple of the pool's 2"):
        call(q=q[:, :3])
    with pytest.raises(ValueError, match="seq_lens must have shape"):
        call(lens=case.lens[:1])
    with pytest.raises(ValueError, match="req_to_token must have a last stride of 1"):
        call(table=table[:, ::2])
    with pytest.raises(ValueError, match="not a multiple of page_size 2"):
        call(page_size=2)
    with pytest.raises(ValueError, match="workspace has 3 entries"):
        call(num_splits=2, workspace=torch.empty(3, device=DEVICE))
    with pytest.raises(ValueError, match="num_splits must be in"):
        call(num_splits=0)
    with pytest.raises(ValueError, match=r"config\.tokens must be a power of two of at least 16"):
        call(config=DecodeConfig(tokens=8))
    with pytest.raises(ValueError, match="order must have shape"):
        call(order=case.lens[:1])
    with pytest.raises(TypeError, match="order must be int32"):
        call(order=case.rows.long())
    with pytest.raises(TypeError, match="seq_lens must be int32 or int64"):
        longest_first(q)
    with pytest.raises(ValueError, match="out must have a last stride of 1"):
        call(out=torch.empty(2, 16, 4, device=DEVICE).transpose(1, 2))
    _, args, _ = chunk_case([(0, 3)], 0, (2, 1, 8))
    with pytest.raises(TypeError, match="max_chunk_len must be an int"):
        prefill_attention(*args, max_chunk_len=3.0)
    tiles = prefill_tiles(args[4], 5, longest=3, group=2)
    for bad, words in (
        (replace(tiles, queries=24), "tiles.queries must be a power of two of at least 16, got 24"),
        (replace(tiles, firsts=tiles.firsts[1:]), "tiles.firsts must have shape"),
    ):
        with pytest.raises(ValueError, match=words):
            prefill_attention(*args, max_chunk_len=3, tiles=bad)
    with pytest.raises(TypeError, match="qo_indptr must be int32"):
        prefill_attention(*args[:4], args[4].long(), *args[5:], max_chunk_len=3)


@cuda_only
def test_graph_replays_follow_device_lengths():
    case = Case([300] * 64, 8, 2, 128, dtype=torch.bfloat16)
    q, out = case.queries(64), torch.empty(64, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    args = (q, *case.pool(), case.rows, case.lens)
    graphs = []
    for num_splits in (1, 2):
        more = VARIANTS["tiles of 16"] | {"num_splits": num_splits, "out": out}
        decode_attention(*args, **more)  # compile outside the capture
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            decode_attention(*args, order=longest_first(case.lens), **more)
    for seed in range(3):
        case.lens.copy_(torch.randint(0, 301, (64,), generator=torch.Generator().manual_seed(seed)))
        want = reference.decode_attention(*args)
        for graph in graphs:
            out.fill_(torch.nan)
            graph.replay()
            assert_near(out, want)


@cuda_only
def test_no_new_kernel_for_another_batch_or_table():
    from phalanx.kernels.decode_attention_triton import attend_rows

    def compiled():
        return sum(len(cache[0]) for cache in attend_rows.device_caches.values())

    case = Case([20] * 64, 8, 2, 128, dtype=torch.bfloat16)
    q = torch.randn(64, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    decode_attention(q, *case.pool(), case.rows, case.lens, **VARIANTS["tiles of 16"])
    before = compiled()
    for bs in (1, 16, 33):
        table = torch.nn.functional.pad(case.table, (0, bs))
        decode_attention(
            q[:bs], case.k, case.v, table, case.rows[:bs], case.lens[:bs], **VARIANTS["tiles of 16"]
        )
    assert compiled() == before
