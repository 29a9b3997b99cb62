"""Gathering the outputs of `LLM`: every token to its stream, in order, whatever the steps looked like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepOutputs
from phalanx.runtime.llm import _step_slices
from phalanx.runtime.outputs import Collector
from phalanx.text.output import FinishReason


def outputs(step: list[tuple[int, int, Finish]]) -> StepOutputs:
    streams, tokens, finish = zip(*step, strict=True)
    return StepOutputs(1, np.array(streams, np.int64), np.array(tokens, np.int32), np.array(finish, np.uint8))


@pytest.mark.fuzz
@given(st.data())
def test_every_stream_gets_its_own_tokens_in_order(data: st.DataObject) -> None:
    num_streams = data.draw(st.sampled_from([1, 2, 3, 7] * 8 + [65_536, 65_537]))  # large ones take long
    some = data.draw(st.lists(st.integers(0, num_streams - 1), min_size=1, max_size=6, unique=True))
    some = sorted({*some, num_streams - 1})
    collector = Collector([SamplingParams()] * num_streams, None)
    expected: dict[int, list[int]] = {stream: [] for stream in some}
    for _ in range(data.draw(st.integers(0, 5))):
        live = data.draw(st.lists(st.sampled_from(some), min_size=1, unique=True))
        step = [(s, data.draw(st.integers(-1, 2**31 - 1)), Finish.NONE) for s in live]
        assert collector.push(outputs(step)) == []
        for stream, token, _ in step:
            expected[stream] += [token] if token >= 0 else []
    reasons = {s: data.draw(st.sampled_from([f for f in Finish if f != Finish.NONE])) for s in some}
    collector.push(outputs([(s, 11, reasons[s]) for s in some]))
    assert collector.num_finished == len(some)
    others = sorted(set(range(num_streams)) - set(some))
    assert collector.unfinished() == others
    if others:
        collector.push(outputs([(s, -1, Finish.LENGTH) for s in others]))
    completions = collector.completions()
    assert len(completions) == num_streams
    for stream in some:
        got, reason = completions[stream], reasons[stream]
        assert got.token_ids == [*expected[stream], 11]
        matched = 11 if reason == Finish.STOP else None
        assert got.finish_reason == FinishReason(reason.name.lower(), matched)  # type: ignore[arg-type]
        assert got.text is None and got.error is None and got.logprobs is None
    assert all(completions[s].token_ids == [] for s in others)


def test_an_end_without_any_token() -> None:
    collector = Collector([SamplingParams()] * 2, None)
    collector.push(outputs([(1, -1, Finish.STOP), (0, -1, Finish.ABORT)]))
    first, second = collector.completions()
    assert first.token_ids == second.token_ids == []
    assert first.finish_reason == FinishReason("abort") and second.finish_reason == FinishReason("stop")


def request(stream_id: int, prompt_len: int) -> EngineRequest:
    ids = np.zeros(prompt_len, np.int32)
    return EngineRequest(stream_id, ids, SamplingParams(max_new_tokens=1, sampling_seed=0))


@pytest.mark.fuzz
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 60))
def test_slices_hold_what_a_step_can_take_and_lose_none(lens: list[int], num_tokens: int) -> None:
    requests = [request(i, n) for i, n in enumerate(lens)]
    slices = list(_step_slices(requests, num_tokens))
    assert [r.stream_id for part in slices for r in part] == list(range(len(lens)))
    sizes = [[len(r.input_ids) for r in part] for part in slices]
    assert all(sum(size) >= num_tokens for size in sizes[:-1])
    assert all(sum(size[:-1]) < num_tokens for size in sizes)  # and not a request more
