"""Log-probabilities of raw logits, in the core's CSR form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.step import LogprobPlan
from phalanx.sampling.logprobs import output_logprobs, prompt_logprobs
from tests.unit.step_plans import csr, i32


def plan(
    sample: list[tuple[int, int, list[int]]] = (), prompt: list[tuple[int, int, list[int], list[int]]] = ()
) -> LogprobPlan:
    """sample: (index, top_k, ids). prompt: (chunk, top_k, ids, targets)."""
    ids_indptr, ids = csr([s[2] for s in sample])
    prompt_ids_indptr, prompt_ids = csr([p[2] for p in prompt])
    prompt_indptr, targets = csr([p[3] for p in prompt])
    return LogprobPlan(
        sample_index=i32([s[0] for s in sample]),
        top_k=i32([s[1] for s in sample]),
        ids_indptr=ids_indptr,
        ids=ids,
        prompt_chunk=i32([p[0] for p in prompt]),
        prompt_start=i32([1 for _ in prompt]),
        prompt_top_k=i32([p[1] for p in prompt]),
        prompt_ids_indptr=prompt_ids_indptr,
        prompt_ids=prompt_ids,
        prompt_indptr=prompt_indptr,
        prompt_targets=targets,
    )


@pytest.mark.fuzz
@given(st.data())
def test_output_logprobs_equal_log_softmax(data) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 40, 1000]))
    num_lines = data.draw(st.integers(1, 100))
    seed = data.draw(st.integers(0, 1000))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = torch.randn(num_lines, vocab, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)
    rng = np.random.default_rng(seed)
    lines = np.flatnonzero(rng.random(num_lines) < 0.8).tolist()
    wanted = [
        (line, int(rng.integers(0, 7)), rng.integers(0, vocab, rng.integers(0, 4)).tolist()) for line in lines
    ]
    tokens = i32(rng.integers(0, vocab, num_lines))
    found = output_logprobs(logits, tokens, plan(wanted))
    truth = torch.log_softmax(logits.double(), 1).numpy()
    assert found.index.tolist() == lines
    assert found.token_ids.tolist() == tokens[lines].tolist()
    np.testing.assert_allclose(found.logprobs, truth[lines, tokens[lines]], atol=1e-5)
    assert len(found.top_indptr) == len(found.ids_indptr) == len(lines) + 1
    for i, (line, top_k, ids) in enumerate(wanted):
        top = slice(found.top_indptr[i], found.top_indptr[i + 1])
        best = np.argsort(-truth[line], kind="stable")[:top_k]  # of equal ones the lower id first
        assert found.top_ids[top].tolist() == best.tolist()
        np.testing.assert_allclose(found.top_logprobs[top], truth[line, best], atol=1e-5)
        asked = slice(found.ids_indptr[i], found.ids_indptr[i + 1])
        assert found.ids[asked].tolist() == ids
        np.testing.assert_allclose(found.ids_logprobs[asked], truth[line, ids], atol=1e-5)


def test_prompt_logprobs_run_the_head_in_slices() -> None:
    hidden = torch.randn(150, 6, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    calls = []

    def head(part: torch.Tensor) -> torch.Tensor:
        calls.append(len(part))
        return part @ weight.T

    targets = np.random.default_rng(0).integers(0, 20, 150).tolist()
    wanted = plan(
        prompt=[(0, 2, [3, 4], targets[:70]), (3, 0, [], targets[70:71]), (4, 1, [9], targets[71:])]
    )
    found = prompt_logprobs(hidden, head, wanted)
    assert sum(calls) == 150 and max(calls) <= 64
    truth = torch.log_softmax((hidden @ weight.T).double(), 1).numpy()
    assert found.index.tolist() == [0] * 70 + [3] + [4] * 79
    assert found.token_ids.tolist() == targets
    np.testing.assert_allclose(found.logprobs, truth[np.arange(150), targets], atol=1e-5)
    assert np.diff(found.top_indptr).tolist() == [2] * 70 + [0] + [1] * 79
    assert np.diff(found.ids_indptr).tolist() == [2] * 70 + [0] + [1] * 79
    assert found.ids.tolist() == [3, 4] * 70 + [9] * 79
    np.testing.assert_allclose(found.ids_logprobs[-1], truth[149, 9], atol=1e-5)
    np.testing.assert_array_equal(found.top_ids[:140:2], truth[:70].argmax(1))


def test_top_k_orders_signs_and_equal_values() -> None:
    logits = torch.tensor([[-1.0, 0.0, -0.0, 2.0, -3.5, 2.0, -torch.inf, -1e-30]])
    found = output_logprobs(logits, i32([3]), plan([(0, 8, [])]))
    assert found.top_ids.tolist() == [3, 5, 1, 2, 7, 0, 4, 6]
    assert found.top_logprobs[-1] == -np.inf


def test_more_alternatives_than_the_vocabulary_holds() -> None:
    found = output_logprobs(torch.zeros(2, 3), i32([0, 1]), plan([(1, 1024, [])]))
    assert found.top_ids.tolist() == [0, 1, 2] and found.top_indptr.tolist() == [0, 3]
    np.testing.assert_allclose(found.top_logprobs, -np.log(3), atol=1e-6)


def test_nothing_wanted() -> None:
    found = output_logprobs(torch.zeros(2, 3), i32([0, 1]), plan())
    assert found.index.shape == found.top_ids.shape == found.ids.shape == (0,)
    assert found.top_indptr.tolist() == found.ids_indptr.tolist() == [0]
    assert found.token_ids.dtype == found.top_ids.dtype == np.int32
    assert found.logprobs.dtype == found.top_logprobs.dtype == np.float32
