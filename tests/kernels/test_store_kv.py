from __future__ import annotations

import pytest
import torch

from phalanx.kernels import gather_kv, reference, store_kv

BACKENDS = ["torch", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # compiled there, interpreted here


def make(num_tokens, heads=3, dim=8, num_slots=50, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, 3 * heads * dim, generator=gen).to(dtype)  # k and v: wide token stride
    k_pool = torch.randn(num_slots, heads, dim, generator=gen).to(dtype)
    v_pool = torch.randn(num_slots, heads, dim, generator=gen).to(dtype)
    slots = torch.randperm(num_slots - 1, generator=gen)[:num_tokens] + 1
    joined = qkv.to(DEVICE)
    k, v = (joined[:, part * heads * dim : (part + 1) * heads * dim].view(-1, heads, dim) for part in (1, 2))
    return k, v, k_pool.to(DEVICE), v_pool.to(DEVICE), slots.to(DEVICE)


def both(backend, k, v, k_pool, v_pool, slots):
    want = k_pool.clone(), v_pool.clone()
    reference.store_kv(k, v, *want, slots)
    store_kv(k, v, k_pool, v_pool, slots, backend=backend)
    return (k_pool, v_pool), want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads,dim", [(1, 1), (3, 8), (3, 64), (2, 80), (8, 128)])
def test_equals_reference(backend, dtype, heads, dim):
    k, v, k_pool, v_pool, slots = make(17, heads, dim, dtype=dtype)
    got, want = both(backend, k, v, k_pool, v_pool, slots)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_negative_and_outside_slots_are_dropped(backend, index_dtype):
    k, v, k_pool, v_pool, slots = make(6)
    slots[1], slots[3], slots[4] = -1, 50, -(2**31)
    got, want = both(backend, k, v, k_pool, v_pool, slots.to(index_dtype))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_with_nan_never_reaches_a_live_slot(backend):
    """B05: a live request owns the last slot; padding rows carry NaN."""
    k, v, k_pool, v_pool, slots = make(4)
    slots[0] = 49
    k[1:], v[1:] = float("nan"), float("nan")
    slots[1:] = torch.tensor([-1, -1, -50], device=DEVICE)
    before = k_pool.clone()
    store_kv(k, v, k_pool, v_pool, slots, backend=backend)
    assert torch.equal(k_pool[49], k[0]) and torch.equal(v_pool[49], v[0])
    assert torch.equal(k_pool[:49], before[:49])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    k, v, k_pool, v_pool, slots = make(0)
    before = k_pool.clone()
    store_kv(k, v, k_pool, v_pool, slots, backend=backend)
    assert torch.equal(k_pool, before)


def test_gather_returns_what_was_stored():
    k, v, k_pool, v_pool, slots = make(9)
    store_kv(k, v, k_pool, v_pool, slots)
    got_k, got_v = gather_kv(k_pool, v_pool, slots.int())
    assert torch.equal(got_k, k) and torch.equal(got_v, v)


def test_bad_arguments_are_named():
    k, v, k_pool, v_pool, slots = make(5)
    with pytest.raises(ValueError, match="slot_mapping must have shape"):
        store_kv(k, v, k_pool, v_pool, slots[:4])
    with pytest.raises(TypeError, match="slot_mapping must be int32 or int64"):
        store_kv(k, v, k_pool, v_pool, slots.float())
    with pytest.raises(TypeError, match=r"^k must be float32, got float64"):
        store_kv(k.double(), v, k_pool, v_pool, slots)
    with pytest.raises(ValueError, match=r"^v must have shape"):
        store_kv(k, v[:, :2], k_pool, v_pool, slots)
    with pytest.raises(ValueError, match="k_pool must be contiguous"):
        store_kv(k, v, k_pool.transpose(0, 1).contiguous().transpose(0, 1), v_pool, slots)
    with pytest.raises(ValueError, match="v_pool must have shape"):
        store_kv(k, v, k_pool, v_pool[:40], slots)
    with pytest.raises(ValueError, match="slot_mapping must be contiguous"):
        store_kv(k, v, k_pool, v_pool, slots.repeat_interleave(2)[::2])
    with pytest.raises(ValueError, match="k must have a last stride of 1"):
        store_kv(k.transpose(1, 2).contiguous().transpose(1, 2), v, k_pool, v_pool, slots)
    with pytest.raises(ValueError, match="backend must be one of"):
        store_kv(k, v, k_pool, v_pool, slots, backend="cuda")
