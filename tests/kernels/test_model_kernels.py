"""Norms, SiLU-mul and RoPE with its fused norm and KV store, against fp64 and against the layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.config.groups import RopeConfig
from phalanx.kernels import add_rms_norm, reference, rms_norm, rope, silu_mul
from phalanx.layers.rmsnorm import RMSNorm
from phalanx.layers.rope import RotaryEmbedding, apply_rope

BACKENDS = ["torch", "triton"] + ([] if torch.cuda.is_available() else ["numba"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # compiled there, interpreted here
cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
few = settings(max_examples=max(10, settings.default.max_examples // 3))  # the interpreter is slow
# bf16 is truncated, not rounded, by Triton's interpreter.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


def assume_possible(backend, dtype):
    assume(backend != "numba" or dtype != torch.float16)


def assert_near(got, want, dtype=None):
    tolerance = TOLERANCE[dtype or got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def columns(num_tokens, width, seed=0, dtype=torch.float32):
    """[num_tokens, width] inside wider memory, with NaN on both sides."""
    wide = torch.full((num_tokens, width + 5), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, 2 : width + 2] = randn(num_tokens, width, seed=seed, dtype=dtype)
    return wide, wide[:, 2 : width + 2]


def assert_only_inside_changed(wide, width):
    assert wide[:, :2].isnan().all() and wide[:, width + 2 :].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.fuzz
@few
@given(st.integers(0, 5), st.integers(1, 1100), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 99))
def test_norms_equal_fp64(backend, num_tokens, hidden, dtype, in_place, seed):
    assume_possible(backend, dtype)
    _, x = columns(num_tokens, hidden, seed, dtype)
    weight = randn(hidden, seed=seed + 1, dtype=dtype)
    want = reference.rms_norm(x, weight, 1e-5)
    wide, out = columns(num_tokens, hidden, 7, dtype)
    if in_place:
        wide, out = None, x
    got = rms_norm(x, weight, 1e-5, out=out, backend=backend)
    assert got is out
    assert_near(out, want)
    if wide is not None:
        assert_only_inside_changed(wide, hidden)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 576, 1024, 1025])
def test_add_rms_norm_is_addition_then_norm(backend, dtype, hidden):
    if backend == "numba" and dtype == torch.float16:
        pytest.skip("no kernel for float16")
    wide_x, x = columns(4, hidden, 1, dtype)
    wide_r, residual = columns(4, hidden, 2, dtype)
    weight = randn(hidden, seed=3, dtype=dtype)
    summed = x.double() + residual.double()
    add_rms_norm(x, residual, weight, 1e-6, backend=backend)
    assert_near(residual, summed)
    # The norm reads the rounded sum: what residual holds now.
    assert_near(x, reference.rms_norm(residual, weight, 1e-6))
    assert_only_inside_changed(wide_x, hidden)
    assert_only_inside_changed(wide_r, hidden)


def test_norm_is_the_layers():
    layer = RMSNorm(96, 1e-5, dtype=torch.float32, device=torch.device(DEVICE))
    layer.weight.copy_(randn(96, seed=1))
    x = randn(3, 96)
    for backend in BACKENDS:
        assert_near(rms_norm(x, layer.weight, layer.eps, backend=backend), layer(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.fuzz
@few
@given(st.integers(0, 4), st.integers(1, 2100), st.sampled_from(DTYPES), st.integers(0, 99))
def test_silu_mul_equals_fp64(backend, num_tokens, size, dtype, seed):
    assume_possible(backend, dtype)
    _, gate_up = columns(num_tokens, 2 * size, seed, dtype)
    gate_up *= 4
    wide, out = columns(num_tokens, size, 7, dtype)
    assert silu_mul(gate_up, out=out, backend=backend) is out
    assert_near(out, reference.silu_mul(gate_up))
    assert_only_inside_changed(wide, size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_silu_of_extremes(backend):
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 1e4]], device=DEVICE)
    got = silu_mul(torch.cat((gate, torch.ones_like(gate)), 1), backend=backend)
    assert_near(got, torch.nn.functional.silu(gate))


class Heads:
    """q, k and v as views of one merged tensor, a cos/sin cache, and pools with a canary."""

    def __init__(self, num_tokens, num_q_heads, num_kv_heads, head_dim, dtype=torch.float32, seed=0):
        split = [num_q_heads, num_kv_heads, num_kv_heads]
        self.qkv = randn(num_tokens, sum(split), head_dim, seed=seed, dtype=dtype)
        self.q, self.k, self.v = self.qkv.split(split, 1)
        self.before = self.qkv.clone()
        embedding = RotaryEmbedding(
            RopeConfig(), head_dim, 64, dtype=torch.float32, device=torch.device(DEVICE)
        )
        self.embedding, self.cache = embedding, torch.cat((embedding.cos, embedding.sin), 1)
        gen = torch.Generator().manual_seed(seed)
        self.positions = torch.randint(0, 64, (num_tokens,), generator=gen).to(DEVICE)
        self.slots = torch.randperm(num_tokens + 3, generator=gen)[:num_tokens].to(DEVICE)
        self.pools = torch.full((2, num_tokens + 3, num_kv_heads, head_dim), 9.0, dtype=dtype).to(DEVICE)
        self.norms = {
            "q_norm": randn(head_dim, seed=seed + 1, dtype=dtype),
            "k_norm": randn(head_dim, seed=seed + 2, dtype=dtype),
        }
        self.store = {
            "v": self.v,
            "k_pool": self.pools[0],
            "v_pool": self.pools[1],
            "slot_mapping": self.slots,
        }

    def wanted(self, norm):
        """q and k in fp64, with the rounding between norm and rotation."""
        num_q_heads = self.q.shape[1]
        parts = {"q_norm": self.before[:, :num_q_heads], "k_norm": self.before[:, num_q_heads:]}
        out = []
        for name, part in parts.items():
            part = part[:, : self.k.shape[1]] if name == "k_norm" else part
            if norm:
                part = reference.rms_norm(part, self.norms[name], 1e-6).to(self.q.dtype)
            out.append(reference.rotate(part, self.positions, self.cache))
        return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.fuzz
@few
@given(
    num_tokens=st.integers(0, 4),
    heads=st.sampled_from([(1, 1), (9, 3), (14, 2), (16, 8), (3, 9)]),
    head_dim=st.sampled_from([2, 16, 40, 64]),
    dtype=st.sampled_from(DTYPES),
    norm=st.booleans(),
    store=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rope_equals_fp64(backend, num_tokens, heads, head_dim, dtype, norm, store, seed):
    assume_possible(backend, dtype)
    case = Heads(num_tokens, *heads, head_dim, dtype, seed)
    want_q, want_k = case.wanted(norm)
    more = (case.norms if norm else {}) | (case.store if store else {})
    rope(case.q, case.k, case.positions, case.cache, backend=backend, **more)
    assert_near(case.q, want_q, dtype)
    assert torch.equal(case.v, case.before[:, -heads[1] :])
    if not store:
        assert_near(case.k, want_k, dtype)
        assert (case.pools == 9).all()
        return
    assert torch.equal(case.k, case.before[:, heads[0] : sum(heads)])
    assert_near(case.pools[0, case.slots], want_k, dtype)
    assert torch.equal(case.pools[1, case.slots], case.v)
    kept = torch.ones(num_tokens + 3, dtype=torch.bool, device=DEVICE)
    kept[case.slots] = False
    assert (case.pools[:, kept] == 9).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads,head_dim", [((4, 2), 80), ((2, 1), 96), ((16, 8), 128)])
def test_rope_of_model_shapes_is_the_layers(backend, heads, head_dim):
    case = Heads(3, *heads, head_dim)
    cos, signed_sin = case.embedding.tables(case.positions)
    want_q, want_k = (apply_rope(part.contiguous(), cos, signed_sin) for part in (case.q, case.k))
    rope(case.q, case.k, case.positions.int(), case.cache, backend=backend)
    assert_near(case.q, want_q)
    assert_near(case.k, want_k)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_drops_slots_outside_the_pool(backend):
    case = Heads(4, 2, 1, 8)
    case.slots[:3] = torch.tensor([-1, 7, -(2**31)], device=DEVICE)
    case.slots[3] = 6
    case.store["slot_mapping"] = case.slots.int()
    rope(case.q, case.k, case.positions, case.cache, backend=backend, **case.store)
    assert (case.pools[:, :6] == 9).all()
    assert torch.equal(case.pools[1, 6], case.v[3])


def test_rope_stores_past_2_to_the_31():
    num_slots = 2**31 // (8 * 128) + 4
    pools = [torch.empty(num_slots, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    case = Heads(2, 2, 8, 128, torch.bfloat16)
    slots = torch.tensor([num_slots - 1, num_slots - 3], device=DEVICE)
    store = {"v": case.v, "k_pool": pools[0], "v_pool": pools[1], "slot_mapping": slots}
    rope(case.q, case.k, case.positions, case.cache, backend="triton", **store)
    assert torch.equal(pools[1][slots], case.v)
    assert_near(pools[0][slots], case.wanted(False)[1])


def test_bad_arguments_are_named():
    x, weight = randn(3, 8), randn(8)
    with pytest.raises(ValueError, match="weight must have shape"):
        rms_norm(x, weight[:7], 1e-5)
    with pytest.raises(TypeError, match="residual must be float32, got bfloat16"):
        add_rms_norm(x, x.bfloat16(), weight, 1e-5)
    with pytest.raises(ValueError, match="x must have a last stride of 1"):
        rms_norm(randn(8, 3).T, weight, 1e-5)
    with pytest.raises(ValueError, match="gate_up must have an even number"):
        silu_mul(randn(3, 7))
    with pytest.raises(ValueError, match="out must have shape"):
        silu_mul(x, out=x)
    case = Heads(3, 2, 1, 8)
    args = (case.q, case.k, case.positions, case.cache)
    with pytest.raises(ValueError, match="q_norm and k_norm go together"):
        rope(*args, q_norm=case.norms["q_norm"])
    with pytest.raises(ValueError, match="go together, only some are given"):
        rope(*args, v=case.v)
    with pytest.raises(TypeError, match="cos_sin_cache must be float32"):
        rope(*args[:3], case.cache.double())
    with pytest.raises(ValueError, match="must have an even head_dim, got 7"):
        rope(case.q[..., :7], case.k[..., :7], *args[2:])
    with pytest.raises(ValueError, match="v_pool must have shape"):
        rope(*args, **case.store | {"v_pool": case.pools[1, :2]})


@cuda_only
def test_graph_of_one_layer_equals_the_torch_backend():
    """Norm, RoPE with store, SiLU-mul in one graph; positions and slots change between replays."""
    case = Heads(100, 16, 8, 128, torch.bfloat16)
    x, residual, weight = (randn(100, 1024, seed=s, dtype=torch.bfloat16) for s in range(3))
    x, weight = x.contiguous(), weight[0]
    gate_up, out = randn(100, 6000, dtype=torch.bfloat16), randn(100, 3000, dtype=torch.bfloat16)

    def layer(backend):
        add_rms_norm(x, residual, weight, 1e-6, backend=backend)
        more = case.norms | case.store
        rope(case.q, case.k, case.positions, case.cache, backend=backend, **more)
        silu_mul(gate_up, out=out, backend=backend)

    layer("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer("triton")
    state = (x, residual, case.qkv, case.pools, gate_up, out, case.positions, case.slots)
    for seed in range(3):
        x.copy_(randn(100, 1024, seed=seed, dtype=torch.bfloat16))
        case.qkv.copy_(randn(100, 32, 128, seed=seed, dtype=torch.bfloat16))
        case.positions.copy_(torch.randperm(64).repeat(2)[:100])
        case.slots.copy_(torch.randperm(103)[:100])
        saved = [tensor.clone() for tensor in state]
        graph.replay()
        got = [tensor.clone() for tensor in state]
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        layer("torch")
        for mine, want in zip(got, state, strict=True):
            torch.testing.assert_close(mine, want, rtol=2e-2, atol=2e-2)
