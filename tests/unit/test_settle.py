"""Settling requests: defaults, limits and their errors (B23, B24, B25, B34)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phalanx.core.errors import ModelError, RequestError
from phalanx.core.request import LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.settle import Settler, end_tokens, mix_seed


def settler(**changes: Any) -> Settler:
    return Settler(
        **{"vocab_size": 100, "context_length": 64, "eos_token_ids": (2,), "seed_source": 7, **changes}
    )


def one(ids: Any, settler: Settler | None = None, **params: Any) -> Any:
    make = settler or globals()["settler"]()
    return make.settle([5], ids, SamplingParams(**params))[0]


def test_defaults() -> None:
    request = one([1, 2, 3])
    assert request.stream_id == 5
    assert request.input_ids.dtype == np.int32
    assert request.max_new_tokens == min(128, 64 - 3)
    assert request.stop_ids == (2,)
    assert request.sampling.sampling_seed is not None


def test_max_new_tokens_is_capped_by_the_context_and_none_takes_the_room() -> None:
    assert one([1] * 60, max_new_tokens=999999).max_new_tokens == 4
    assert one([1] * 10, max_new_tokens=None).max_new_tokens == 54
    assert one([1] * 63).max_new_tokens == 1
    assert one([1], max_new_tokens=0).max_new_tokens == 0


@pytest.mark.parametrize("length", [64, 65, 640])
def test_prompt_beyond_the_context_names_both_numbers(length: int) -> None:
    for ids in ([1] * length, (1,) * length, range(length), np.ones(length, np.int32)):
        with pytest.raises(RequestError) as error:
            one(ids, settler(vocab_size=1000))
        assert str(length) in error.value.message
        assert "64" in error.value.message


def test_prompt_beyond_the_pool() -> None:
    small = settler(max_request_tokens=32)
    for ids, params in (([1] * 40, {}), ([1] * 20, {"max_new_tokens": 20})):
        with pytest.raises(RequestError, match="KV cache of 32"):
            one(ids, small, **params)
    assert one([1] * 20, small, max_new_tokens=None).max_new_tokens == 12
    with pytest.raises(RequestError, match="KV cache of 32"):
        one([1] * 40, small, max_new_tokens=None)


@pytest.mark.parametrize(
    "ids",
    [[], [100], [-1], [10**9], ["a"], [1.5], None, [[1]], [[1], [2, 3]], [True, "x"], "abc", 5, np.array(5)],
)
def test_bad_prompts(ids: Any) -> None:
    with pytest.raises(RequestError) as error:
        one(ids)
    assert error.value.status == 400


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": "5"},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 2},
        {"top_k": 0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"frequency_penalty": 3},
        {"presence_penalty": -3},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-39},
        {"top_k": 2**31},
        {"temperature": 10**400},
        {"stop": ("x" * 4097,)},
        {"stop": ("x",) * 65},
        {"min_new_tokens": 5, "max_new_tokens": 4},
        {"n": 0},
        {"stop": ("",)},
        {"stop_token_ids": (100,)},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": tuple(range(9))},
        {"logit_bias": {100: 1.0}},
        {"logit_bias": {1: 1000.0}},
        {"sampling_seed": 2**63},
        {"ignore_eos": "false"},
        {"no_stop_trim": 1},
        {"skip_special_tokens": None},
    ],
)
def test_bad_parameters_name_the_field(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        one([1], **params)
    assert error.value.param in params
    assert error.value.param in error.value.message


def test_what_people_naturally_pass() -> None:
    params = SamplingParams(
        stop="Xa",
        stop_token_ids=[5, np.int64(7)],
        logit_bias=None,
        n=np.int64(2),
        temperature=np.float32(0.5),
        sampling_seed=np.int64(3),
        ignore_eos=np.bool_(True),
    )
    assert params.stop == ("Xa",) and params.stop_token_ids == (5, 7) and params.logit_bias == {}
    assert type(params.n) is int and params.temperature == 0.5
    assert SamplingParams(stop=["a", "b"], logit_bias={np.int64(1): np.float32(2)}).logit_bias == {1: 2.0}
    params.check(100)
    for bad in ({"stop": {"a": 1}}, {"logit_bias": [1]}, {"stop_token_ids": 1.5}):
        with pytest.raises(RequestError):
            SamplingParams(**bad)


def test_ignore_eos_keeps_the_users_stop_tokens() -> None:
    assert one([1], ignore_eos=True, stop_token_ids=(9,)).stop_ids == (9,)
    assert one([1], stop_token_ids=(9, 2)).stop_ids == (2, 9)


def test_n_outputs_have_distinct_reproducible_seeds() -> None:
    params = SamplingParams(n=3, sampling_seed=11)
    first = [r.sampling.sampling_seed for r in settler().settle([1, 2, 3], [1], params)]
    second = [r.sampling.sampling_seed for r in settler().settle([4, 5, 6], [1], params)]
    assert first == second
    assert len(set(first)) == 3
    assert first[0] == 11


def test_drawn_seeds_follow_the_seed_source() -> None:
    def draws(**changes: Any) -> list[int]:
        s = settler(**changes)
        return [one([1], s).sampling.sampling_seed for _ in range(4)]

    assert draws() == draws()
    assert draws() != draws(seed_source=8)
    assert draws() != draws(worker=1)
    assert len(set(draws())) == 4


def test_mix_seed_fits_int64() -> None:
    for seed in (0, -(2**63), 2**63 - 1):
        for index in range(4):
            assert -(2**63) <= mix_seed(seed, index) < 2**63


@pytest.mark.parametrize(
    "logprobs",
    [
        LogprobParams(top_k=-1),
        LogprobParams(top_k=101),
        LogprobParams(prompt_start=3),
        LogprobParams(prompt_start=-2),
        LogprobParams(token_ids=(100,)),
        LogprobParams(token_ids=(1.5,)),  # type: ignore[arg-type]
        LogprobParams(token_ids=("a",)),  # type: ignore[arg-type]
        LogprobParams(top_k="a"),  # type: ignore[arg-type]
        LogprobParams(top_k=1.5),  # type: ignore[arg-type]
        LogprobParams(top_k=None),  # type: ignore[arg-type]
        LogprobParams(prompt_start=0.5),  # type: ignore[arg-type]
    ],
)
def test_bad_logprob_requests(logprobs: LogprobParams) -> None:
    with pytest.raises(RequestError):
        settler().settle([1], [1, 2, 3], SamplingParams(), logprobs)


def test_logprob_requests_as_people_pass_them() -> None:
    params = LogprobParams(np.int64(0), np.int32(2), np.array([5, 7]))  # type: ignore[arg-type]
    assert params == LogprobParams(prompt_start=0, top_k=2, token_ids=(5, 7))
    assert LogprobParams(token_ids=[5]).token_ids == (5,)  # type: ignore[arg-type]
    assert LogprobParams(token_ids=None).token_ids == ()  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        LogprobParams(token_ids=1.5)  # type: ignore[arg-type]


def test_end_tokens_of_model_and_tokenizer_are_one_list() -> None:
    assert end_tokens((5, 3), (3, 9)) == (5, 3, 9)
    assert len(end_tokens(range(16), [3])) == 16
    with pytest.raises(ModelError, match=r"the model has 17 end tokens.*at most 16"):
        end_tokens(range(16), [16])


def test_stop_ids_share_a_row_with_the_models_own() -> None:
    many = settler(eos_token_ids=range(12))
    assert len(one([1], many, stop_token_ids=(20, 21, 22, 23)).stop_ids) == 16
    assert len(one([1], many, stop_token_ids=(0, 1, 2, 3, 20, 21)).stop_ids) == 14  # known ones take no room
    assert one([1], many, stop_token_ids=range(20, 28), ignore_eos=True).stop_ids == tuple(range(20, 28))
    with pytest.raises(RequestError) as caught:
        one([1], many, stop_token_ids=(20, 21, 22, 23, 24))
    assert "5 ids" in caught.value.message and "own 12 end tokens" in caught.value.message
    assert caught.value.param == "stop_token_ids"
