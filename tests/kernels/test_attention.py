"""The CPU's attention backends against a dense fp32 reference, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.attention import registry
from phalanx.attention.base import DecodePart, ForwardBatch, PrefillPart
from phalanx.attention.grouping import QUERY_BLOCK, group_by_length, query_blocks
from phalanx.attention.registry import create_attention
from phalanx.attention.torch_native import TorchNativeAttention
from phalanx.config.groups import ModelConfig, RopeConfig
from phalanx.core.errors import ConfigError
from phalanx.kvcache.pool import KVPool

CPU = torch.device("cpu")
GARBAGE = 2**31 - 1  # table entries beyond a row's length must never be read


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shape(num_q_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def make_case(
    config: ModelConfig,
    decode_lens: list[int],
    chunks: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[ForwardBatch, KVPool, torch.Tensor]:
    """decode_lens: KV length of each decode row; chunks: (start, length). Slots are shuffled."""
    rng = np.random.default_rng(seed)
    totals = decode_lens + [start + length for start, length in chunks]
    num_rows = len(totals)
    slots = rng.permutation(sum(totals)) + 1
    table = np.full((num_rows + 3, max(totals, default=1) + 2), GARBAGE, dtype=np.int32)
    rows = rng.permutation(num_rows) + 1
    for row, total, end in zip(rows, totals, np.cumsum(totals), strict=True):
        table[row, :total] = slots[end - total : end]
    pool = KVPool(config, num_pages=sum(totals) + 1, page_size=1, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for tensor in pool.k + pool.v:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    num_tokens = len(decode_lens) + sum(length for _, length in chunks)
    n = len(decode_lens)
    batch = ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        req_to_token=torch.from_numpy(table),
        logits_index=torch.arange(num_tokens),
        num_decode=n,
        decode=DecodePart(torch.from_numpy(rows[:n]), torch.tensor(decode_lens, dtype=torch.int32)),
        prefill=PrefillPart(torch.from_numpy(rows[n:]), [s for s, _ in chunks], [c for _, c in chunks]),
    )
    q = torch.randn(num_tokens, config.num_q_heads, config.head_dim, generator=generator).to(dtype)
    return batch, pool, q


def dense(batch: ForwardBatch, pool: KVPool, q: torch.Tensor, layer: int) -> torch.Tensor:
    """One query at a time, in fp32."""
    spans = [
        (row, length - 1, 1)
        for row, length in zip(batch.decode.rows.tolist(), batch.decode.seq_lens.tolist(), strict=True)
    ]
    spans += zip(batch.prefill.rows.tolist(), batch.prefill.starts, batch.prefill.lens, strict=True)
    out, token = torch.empty(q.shape), 0
    for row, start, length in spans:
        for position in range(start, start + length):
            slots = batch.req_to_token[row, : position + 1].long()
            group = q.shape[1] // pool.k[layer].shape[1]
            k = pool.k[layer][slots].float().repeat_interleave(group, 1)
            v = pool.v[layer][slots].float().repeat_interleave(group, 1)
            scores = torch.einsum("hd,lhd->hl", q[token].float(), k) * q.shape[2] ** -0.5
            out[token] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
            token += 1
    return out


def attend(
    name: str, config: ModelConfig, batch: ForwardBatch, pool: KVPool, q: torch.Tensor, layer: int = 1
):
    backend = create_attention(name, config)
    return backend.forward(layer, q, pool, backend.begin(batch, pool))


both = pytest.mark.parametrize("name", ["torch_native", "numba"])


@both
@pytest.mark.parametrize("head_dim", [40, 64, 80])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_mixed_step_equals_dense(name: str, group: int, head_dim: int) -> None:
    config = shape(2 * group, 2, head_dim)
    case = make_case(config, [1, 15, 16, 17, 300], [(0, 1), (0, 17), (16, 15), (299, 1), (33, 40)])
    torch.testing.assert_close(attend(name, config, *case), dense(*case, layer=1), rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize(
    ("decode_lens", "chunks"),
    [
        ([5], []),
        ([7, 7, 7], []),
        ([300, 1], []),
        ([], [(0, 1)]),
        ([], [(0, QUERY_BLOCK)]),
        ([], [(3, QUERY_BLOCK + 1)]),
        ([2], [(0, 2 * QUERY_BLOCK + 3), (9, 4)]),
    ],
)
def test_shapes_of_steps(name: str, decode_lens: list[int], chunks: list[tuple[int, int]]) -> None:
    config = shape(3, 1, 16)
    case = make_case(config, decode_lens, chunks)
    torch.testing.assert_close(attend(name, config, *case), dense(*case, layer=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("torch_native", torch.bfloat16), ("torch_native", torch.float16), ("numba", torch.bfloat16)],
)
def test_half_precision_is_near_dense(name: str, dtype: torch.dtype) -> None:
    config = shape(6, 2, 64)
    case = make_case(config, [1, 40, 150], [(0, 30), (20, 9)], dtype)
    got = attend(name, config, *case)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), dense(*case, layer=1), rtol=0.02, atol=0.02)


@both
def test_strided_queries_and_empty_step(name: str) -> None:
    config = shape(6, 2, 8)
    batch, pool, q = make_case(config, [3, 50], [(0, 4)])
    joined = torch.cat((q, torch.full_like(q, torch.nan)), dim=1)
    torch.testing.assert_close(
        attend(name, config, batch, pool, joined[:, :6]), attend(name, config, batch, pool, q)
    )
    batch, pool, q = make_case(config, [], [])
    assert attend(name, config, batch, pool, q).shape == (0, 6, 8)


@both
def test_padding_lanes_may_share_row_zero(name: str) -> None:
    """Lanes that an engine pads with: row 0, length 1, slot 0."""
    config = shape(2, 2, 8)
    batch, pool, q = make_case(config, [4, 1, 1], [])
    batch.req_to_token[0] = 0
    batch.decode.rows[1:] = 0
    torch.testing.assert_close(
        attend(name, config, batch, pool, q), dense(batch, pool, q, 1), rtol=1e-4, atol=1e-5
    )


lengths = st.lists(st.integers(1, 70), max_size=12)
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=5)


@both
@pytest.mark.fuzz
@given(lengths, spans, st.sampled_from([(1, 1), (3, 1), (6, 2), (14, 2), (4, 4)]), st.integers(0, 10**6))
def test_any_step_equals_dense(name, decode_lens, chunks, heads, seed) -> None:
    config = shape(*heads, 8)
    case = make_case(config, decode_lens, chunks, seed=seed)
    torch.testing.assert_close(attend(name, config, *case), dense(*case, layer=1), rtol=1e-4, atol=1e-5)


@pytest.mark.fuzz
@given(st.lists(st.tuples(st.integers(1, QUERY_BLOCK), st.integers(0, 5000)), min_size=1, max_size=200))
def test_groups_are_a_partition(items) -> None:
    query_lens = np.array([q for q, _ in items])
    kv_lens = query_lens + np.array([start for _, start in items])
    groups = group_by_length(query_lens, kv_lens)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(items)))
    longest = [kv_lens[group].max() for group in groups]
    assert longest == sorted(longest)


def test_unequal_lengths_are_split_and_equal_ones_are_not() -> None:
    ones = np.ones(64, dtype=np.int64)
    assert len(group_by_length(ones, np.full(64, 500))) == 1
    groups = group_by_length(ones, np.where(np.arange(64) < 40, 10, 2000))
    assert [len(group) for group in groups] == [40, 24]


@pytest.mark.fuzz
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 3 * QUERY_BLOCK)), min_size=1, max_size=20))
def test_query_blocks_cover_every_token(chunks) -> None:
    starts, lens = np.array([c[0] for c in chunks]), np.array([c[1] for c in chunks])
    chunk, first_pos, size, token = query_blocks(starts, lens)
    assert size.min() >= 1 and size.max() <= QUERY_BLOCK
    got = np.concatenate([np.arange(t, t + n) for t, n in zip(token, size, strict=True)])
    assert got.tolist() == list(range(int(lens.sum())))
    places = np.concatenate([np.arange(p, p + n) for p, n in zip(first_pos, size, strict=True)])
    want = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])
    assert places.tolist() == want.tolist()
    assert (np.repeat(chunk, size) == np.repeat(np.arange(len(lens)), lens)).all()


@pytest.mark.parametrize("name", ["flash", "", "TORCH_NATIVE"])
def test_unknown_backend_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="torch_native"):
        create_attention(name, shape(2, 1, 8))


def test_numba_gives_way_where_it_cannot_run(monkeypatch, caplog) -> None:
    monkeypatch.setattr(registry, "numba_problem", lambda dtype: "numba cannot be imported (just so)")
    assert isinstance(create_attention("numba", shape(2, 1, 8)), TorchNativeAttention)
    assert "torch_native instead of numba: numba cannot be imported (just so)" in caplog.text
