"""Prompts long and short in captured steps: the same logits as in eager ones, beside decode rows or alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
import torch

from phalanx.config.groups import Settings
from phalanx.core.step import StepPlan
from phalanx.engine.sampled import CudaHandle
from tests.models import cuda_rig as engines
from tests.models.cuda_rig import CONFIG, GREEDY, HAS_CUDA, Rig
from tests.models.stand_in_cuda import stand_in

pytestmark = [pytest.mark.gpu] if HAS_CUDA else []
CONTEXT = 1200
NUM_PAGES = 1600  # of 4
# What a step holds: rows that decode, and (row, tokens) of prompts. Every row gets its prompt in one or more.
STEPS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([], [(1, 1)]),
    ([1], [(2, 700), (3, 5), (4, 64)]),
    ([1, 2, 3, 4], [(5, 600)]),
    ([4, 2], [(5, 511), (6, 33), (7, 1), (8, 900)]),
    ([1, 5, 8], [(n, 1 + n % 3) for n in range(9, 30)]),
    (list(range(29, 0, -1)), [(30, 17)]),
]
LENGTHS = (
    {30: 17}
    | {n: 1 + n % 3 for n in range(9, 30)}
    | dict(zip(range(1, 9), [1, 700, 5, 64, 1111, 33, 1, 900], strict=True))
)


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with nullcontext() if HAS_CUDA else stand_in():
        yield


def long_settings(graph: bool, dtype: str, backend: str) -> Settings:
    chosen = engines.settings(CONFIG, dtype=dtype, backend=backend, graph=graph, rows=32, chunk=2048)
    scheduler = msgspec.structs.replace(chosen.scheduler, context_length=CONTEXT)
    return msgspec.structs.replace(chosen, scheduler=scheduler)


def run(graph: bool, dtype: str, backend: str) -> tuple[list[np.ndarray], list[torch.Tensor], list[bool]]:
    """Tokens and logits of every step, and whether each one was captured."""
    with torch.inference_mode():
        rig = Rig(long_settings(graph, dtype, backend), engines.dummy_decoder(dtype), NUM_PAGES)
    rng = np.random.default_rng(5)
    for row, length in sorted(LENGTHS.items()):
        rig.hand.add(row, rng.integers(1, 1000, length).tolist(), GREEDY)
    tokens, logits, captured = [], [], []
    for decode, chunks in STEPS:
        plan: StepPlan = rig.hand.plan(decode=decode, chunks=chunks)
        captured.append(rig.engine._mixed_shape(plan) is not None)
        handle = rig.engine.launch(plan)
        assert isinstance(handle, CudaHandle)
        tokens.append(handle.result().tokens)
        logits.append(rig.logits(len(plan.sample_rows)))
    return tokens, logits, captured


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("float32", "triton"),
        ("bfloat16", "triton"),
        pytest.param("bfloat16", "flashinfer", marks=engines.needs_flashinfer),
    ],
)
def test_prompts_of_all_lengths_in_captured_steps_equal_eager_ones(dtype: str, backend: str) -> None:
    tokens, logits, captured = run(True, dtype, backend)
    eager_tokens, eager_logits, never = run(False, dtype, backend)
    assert captured == [True] * len(STEPS) and not any(never)
    for step, (got, want) in enumerate(zip(logits, eager_logits, strict=True)):
        assert got.shape == want.shape and torch.isfinite(got).all()
        error = ((got - want).norm() / want.norm()).item()
        assert error < (1e-4 if dtype == "float32" else 3e-2), (step, error)
    if dtype == "float32":
        assert [t.tolist() for t in tokens] == [t.tolist() for t in eager_tokens]
