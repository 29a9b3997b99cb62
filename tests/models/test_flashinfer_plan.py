"""FlashInfer's plan of a bucket: the same for all lengths, right for others than it was made from, checked.

That FlashInfer plans so is shown on a GPU; what `FlashInferAttention` accepts and refuses, with a wrapper
that counts tiles as its scheduler does (`PrefillSplitQOKVIndptr` of 0.6.x).
"""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from phalanx.attention.base import DecodePart, ForwardBatch
from phalanx.attention.flashinfer import FlashInferAttention
from phalanx.config.groups import ModelConfig
from phalanx.config.hardware import detect
from phalanx.core.errors import EngineError
from phalanx.kernels import decode_attention
from phalanx.kvcache.pool import KVPool
from phalanx.models.dummy import BUILTIN_CONFIGS

HAS_CUDA = torch.cuda.is_available()
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device"),
    pytest.mark.skipif(not detect().has_flashinfer, reason="needs flashinfer"),
]
NUM_ROWS, LONGEST = 40, 3000
LENGTHS = {
    "one token each": np.ones(NUM_ROWS, np.int64),
    "one of 3000 among short ones": np.where(np.arange(NUM_ROWS) == 7, LONGEST, np.arange(NUM_ROWS) % 30 + 1),
    "all long": 2000 + 25 * np.arange(NUM_ROWS),
}


def model_config(num_q_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return msgspec.structs.replace(BUILTIN_CONFIGS["tiny-llama"], num_layers=1, **heads)


class Bucket:
    """Rows in buffers that keep their addresses, as the engine's are; the pages of a row lie scattered."""

    def __init__(
        self,
        config: ModelConfig,
        page_size: int,
        device: str,
        num_rows: int = NUM_ROWS,
        longest: int = LONGEST,
    ) -> None:
        self.page_size, self.device = page_size, torch.device(device)
        pages = -(-longest // page_size)
        num_pages = 1 + num_rows * pages
        dtype = torch.bfloat16
        self.pool = KVPool(config, num_pages=num_pages, page_size=page_size, dtype=dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        for tensor in (self.pool.k[0], self.pool.v[0]):
            tensor.normal_(generator=generator)
        shape = (num_rows, config.num_q_heads, config.head_dim)
        self.q = torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=generator)
        order = np.random.default_rng(0).permutation(np.arange(1, num_pages)).reshape(num_rows, pages)
        self.page_ids = torch.from_numpy(order.astype(np.int32)).to(self.device)
        tokens = torch.arange(page_size, dtype=torch.int32, device=self.device)
        self.table = (self.page_ids[:, :, None] * page_size + tokens).flatten(1)

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.decode = DecodePart(
            rows=torch.arange(num_rows, device=self.device),
            seq_lens=zeros(num_rows),
            kv_indptr=zeros(num_rows + 1),
            kv_indices=zeros(num_rows * pages),
            last_page_len=zeros(num_rows),
        )

    def fill(self, lengths: np.ndarray) -> ForwardBatch:
        """Write the rows' arrays, in place."""
        decode, lens = self.decode, torch.from_numpy(lengths).to(self.device)
        pages = -(-lens // self.page_size)
        decode.seq_lens.copy_(lens)
        decode.kv_indptr[1:].copy_(pages.cumsum(0))
        decode.last_page_len.copy_(lens - (pages - 1) * self.page_size)
        taken = torch.arange(self.page_ids.shape[1], device=self.device) < pages[:, None]
        decode.kv_indices[: int(pages.sum())] = self.page_ids[taken]
        nothing = torch.zeros(len(lens), dtype=torch.int64, device=self.device)
        return ForwardBatch(
            input_ids=nothing,
            positions=nothing,
            slot_mapping=nothing,
            req_to_token=self.table,
            logits_index=None,
            num_decode=len(lens),
            decode=decode,
            prefill=None,
        )


def plan_arrays(wrapper: Any, num_rows: int) -> list[list[int]]:
    """What the kernel reads of a plan: request, query tile and KV tile of each tile, and o_indptr."""
    plan = list(wrapper._plan_info)
    counts = {4: plan[0], 5: plan[0], 6: plan[0], 8: num_rows + 1}
    room = wrapper._int_workspace_buffer
    return [room[plan[at] : plan[at] + 4 * n].view(torch.int32).tolist() for at, n in counts.items()]


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "page_size"),
    [
        pytest.param(8, 2, 128, 16, marks=on_gpu),
        pytest.param(8, 8, 128, 1, marks=on_gpu),
        pytest.param(6, 2, 64, 4, marks=on_gpu),
        pytest.param(40, 2, 64, 16, marks=on_gpu),  # 20 heads of a KV head: tiles of 64
    ],
)
def test_a_plan_is_the_same_for_all_lengths_and_right_for_others(
    num_q_heads: int, num_kv_heads: int, head_dim: int, page_size: int
) -> None:
    config = model_config(num_q_heads, num_kv_heads, head_dim)
    bucket = Bucket(config, page_size, "cuda")
    planned, plans, arrays = {}, {}, {}
    for name, lengths in LENGTHS.items():
        attn = FlashInferAttention(config, bucket.device)
        state = attn.begin(bucket.fill(lengths), bucket.pool)
        planned[name] = attn, state
        plans[name] = list(state.wrapper._plan_info)
        arrays[name] = plan_arrays(state.wrapper, NUM_ROWS)
    first, *others = LENGTHS
    for name in others:
        assert plans[name] == plans[first]
        assert arrays[name] == arrays[first]
    tiles = plans[first][0]
    assert arrays[first][0] == np.repeat(np.arange(NUM_ROWS), tiles // NUM_ROWS).tolist()
    assert arrays[first][2] == [0] * tiles
    for planned_for, run_on in itertools.permutations(LENGTHS, 2):
        bucket.fill(LENGTHS[run_on])
        got, want = (
            attn.forward(0, bucket.q, bucket.pool, state)
            for attn, state in (planned[planned_for], planned[run_on])
        )
        assert torch.equal(got, want), f"planned for {planned_for}, run on {run_on}"
        reference = decode_attention(
            bucket.q,
            bucket.pool.k[0],
            bucket.pool.v[0],
            bucket.table,
            bucket.decode.rows,
            bucket.decode.seq_lens,
            page_size=page_size,
            backend="torch",
        )
        torch.testing.assert_close(got.float(), reference.float(), atol=2e-2, rtol=2e-2)


class FakeWrapper:
    """Plans as FlashInfer does with split-KV off; `wrong` changes entries of the plan, `copies` one array."""

    wrong: ClassVar[dict[int, int]] = {}
    copies: ClassVar[str | None] = None

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        assert options == {"use_cuda_graph": False, "use_tensor_cores": True, "backend": "fa2"}

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        assert floats.dtype == ints.dtype == torch.uint8

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert options["disable_split_kv"] is True
        arrays = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        for name, array in arrays.items():
            setattr(self, f"_paged_kv_{name}_buf", array.clone() if name == self.copies else array)
        num_rows, group = len(last_page_len), num_q_heads // num_kv_heads
        pairs = 16 if group <= 16 else 64 if group <= 64 or head_dim >= 256 else 128
        tiles = num_rows * -(-group // pairs)
        plan = [tiles, num_rows, 0, pairs, 0, 256, 512, 0, 768, 1024, 0, 0, 0, 0, 0]
        for entry, value in self.wrong.items():
            plan[entry] = value
        self._plan_info = plan[: self.wrong.get(-1, len(plan))]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWrapper]:
    """`flashinfer` with this wrapper alone, of a class that the test may change."""
    wrapper = type("Wrapper", (FakeWrapper,), {})
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return wrapper


def begin(num_q_heads: int = 8, num_kv_heads: int = 2, head_dim: int = 64) -> tuple[Any, Any]:
    """Begin two steps of one bucket with very different lengths; the wrappers that they run by."""
    config = model_config(num_q_heads, num_kv_heads, head_dim)
    bucket = Bucket(config, 4, "cpu", num_rows=5, longest=40)
    attn = FlashInferAttention(config, bucket.device)
    lengths = np.ones(5, np.int64), np.array([40, 1, 4, 5, 39])
    first, second = (attn.begin(bucket.fill(some), bucket.pool).wrapper for some in lengths)
    return first, second


@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (32, 2), (34, 2), (40, 1), (71, 1), (130, 1)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_plan_of_every_head_layout_is_accepted_and_kept(
    heads: tuple[int, int], head_dim: int, fake: type[FakeWrapper]
) -> None:
    first, second = begin(*heads, head_dim)
    assert first is second


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({14: 1}, "splits rows"),
        ({13: 1}, "launches more than there is"),
        ({0: 4}, "whole tiles"),  # a row is left out
        ({0: 1}, "whole tiles"),
        ({0: 0}, "whole tiles"),
        ({0: 6}, "whole tiles"),  # a tile too many
        ({1: 4}, "whole tiles"),
        ({1: 6}, "whole tiles"),
        ({3: 2}, "whole tiles"),  # tiles of two pairs would have to be ten
        ({3: 0}, "whole tiles"),
        ({-1: 10}, "15 numbers"),  # the CUDA-core decode kernel's plan
    ],
)
def test_a_plan_that_would_not_hold_is_refused(
    wrong: dict[int, int], words: str, fake: type[FakeWrapper]
) -> None:
    fake.wrong = wrong
    with pytest.raises(EngineError, match=words):
        begin()


@pytest.mark.parametrize("name", ["indptr", "indices", "last_page_len"])
def test_a_wrapper_that_keeps_copies_is_refused(name: str, fake: type[FakeWrapper]) -> None:
    fake.copies = name
    with pytest.raises(EngineError, match="copies the arrays"):
        begin()
