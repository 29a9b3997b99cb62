"""`LLM` on SmolLM2: the same tokens alone, in a batch, serial, run-ahead, paged differently (fp32)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from phalanx import LLM, LogprobParams, RequestError, SamplingParams
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]


def make(smollm2: str, **options: Any) -> LLM:
    settings = {"dtype": "float32", "max_total_tokens": 8192, "context_length": 1024, "random_seed": 0}
    return LLM(smollm2, progress=False, **{**settings, **options})


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Iterator[LLM]:
    yield make(smollm2)


def run(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[Any]:
    results = llm.generate(prompts, params, progress=False, **options)
    stats = llm._worker.stats()
    assert stats["pages_held"] == 0
    llm._worker.scheduler.check()
    return results


def tokens(results: list[Any]) -> list[list[int]]:
    return [c.token_ids for r in results for c in r.outputs]


GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
MIXED = [
    SamplingParams(temperature=0.8, sampling_seed=i, max_new_tokens=12 + i, top_k=[-1, 20, 1][i % 3])
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def together(llm: LLM) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of all prompts in one batch: greedy, and with mixed sampling."""
    return tokens(run(llm, PROMPTS, GREEDY)), tokens(run(llm, PROMPTS, MIXED))


def test_batch_equals_each_alone(llm: LLM, together: tuple[list[list[int]], list[list[int]]]) -> None:
    for first, params, expected in zip((0, 1), ([GREEDY] * len(PROMPTS), MIXED), together, strict=True):
        for i in range(first, len(PROMPTS), 2):
            assert tokens(run(llm, PROMPTS[i], params[i])) == [expected[i]]


@pytest.mark.parametrize(
    "options",
    [
        {"disable_overlap_schedule": True},
        {"page_size": 1},
        {"chunked_prefill_size": 4},
        {"max_running_requests": 3},
        {"max_total_tokens": 64, "page_size": 16},
    ],
    ids=lambda o: next(iter(o)),
)
def test_every_way_to_run_gives_the_same_tokens(
    smollm2: str, together: tuple[list[list[int]], list[list[int]]], options: dict[str, Any]
) -> None:
    other = make(smollm2, **options)
    for params, expected in zip((GREEDY, MIXED), together, strict=True):
        assert tokens(run(other, PROMPTS, params)) == expected


def test_stop_strings_cut_text_ids_and_logprobs_alike(llm: LLM) -> None:
    prompt = "A, B, C, D, E,"
    full = run(llm, prompt, GREEDY)[0].outputs[0]
    assert " H, I" in full.text
    params = SamplingParams(temperature=0, max_new_tokens=24, stop=("H, I",))
    cut = run(llm, prompt, params, logprobs=LogprobParams(top_k=2))[0].outputs[0]
    assert cut.text == full.text[: full.text.index("H, I")]
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(full.token_ids)
    assert len(cut.logprobs) == len(cut.token_ids)
    assert cut.finish_reason.kind == "stop" and cut.finish_reason.matched == "H, I"


def test_logprobs_are_those_of_the_chosen_tokens(llm: LLM) -> None:
    want = LogprobParams(prompt_start=0, top_k=3, token_ids=(5, 7))
    result = run(llm, PROMPTS[0], GREEDY, logprobs=want)[0]
    completion = result.outputs[0]
    assert [p.token_id for p in completion.logprobs] == completion.token_ids
    for position in completion.logprobs:
        assert position.top[0] == (position.token_id, position.logprob)  # greedy: the likeliest
        assert [i for i, _ in position.ids] == [5, 7]
        assert position.logprob <= 0
    assert [p.token_id for p in result.prompt_logprobs] == result.prompt_token_ids[1:]
    again = run(llm, result.prompt_token_ids + completion.token_ids, GREEDY, logprobs=want)[0]
    tail = again.prompt_logprobs[-len(completion.token_ids) :]
    for decoded, prefilled in zip(completion.logprobs, tail, strict=True):
        assert decoded.logprob == pytest.approx(prefilled.logprob, abs=1e-3)


def test_n_outputs_and_zero_tokens(llm: LLM) -> None:
    params = [
        SamplingParams(n=3, sampling_seed=5, max_new_tokens=8),
        SamplingParams(max_new_tokens=0),
        SamplingParams(max_new_tokens=1, temperature=0),
    ]
    three, zero, one = run(llm, PROMPTS[:3], params)
    assert [c.index for c in three.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in three.outputs}) > 1
    assert zero.outputs[0].token_ids == [] and zero.outputs[0].text == ""
    assert zero.outputs[0].finish_reason.kind == "length"
    assert len(one.outputs[0].token_ids) == 1


def test_bad_prompts_run_nothing(llm: LLM) -> None:
    for prompts in ([], "", [[]], ["fine", ""], [[10**9]], [[1] * 5000], [1.5]):
        with pytest.raises(RequestError):
            run(llm, prompts, GREEDY)
    for params in ({"temperature": 0}, "hot", [GREEDY, None], [GREEDY] * 3):
        with pytest.raises(RequestError):
            run(llm, PROMPTS[:2], params)
    with pytest.raises(RequestError):
        run(llm, PROMPTS[:2], GREEDY, logprobs=5)
    assert len(tokens(run(llm, PROMPTS[:1], GREEDY))[0]) == 24


def test_chat_stops_at_the_models_end_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=200)
    message = {"role": "user", "content": "Say hi."}
    completion = llm.chat([message], params, progress=False)[0].outputs[0]
    assert completion.finish_reason.kind == "stop"
    assert completion.token_ids[-1] == 2
    assert "<|im_end|>" not in completion.text


def test_greedy_tokens_equal_transformers(llm: LLM) -> None:
    import torch

    from tests.models.tiny import hf_from_source

    hf = hf_from_source(llm.settings.source, llm.settings.model)
    ours = run(llm, PROMPTS, SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True))
    longest = max(len(result.prompt_token_ids) for result in ours)
    padding = [longest - len(result.prompt_token_ids) for result in ours]
    ids = torch.tensor([[0] * n + r.prompt_token_ids for n, r in zip(padding, ours, strict=True)])
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
    with torch.inference_mode():
        out = hf.generate(ids, attention_mask=mask, max_new_tokens=32, do_sample=False, eos_token_id=None)
    assert [result.outputs[0].token_ids for result in ours] == out[:, longest:].tolist()
