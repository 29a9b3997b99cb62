"""`LLM.generate` called wrongly, from threads, and interrupted: each call ends alone and leaves all free."""

from __future__ import annotations

import operator
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from phalanx import LLM, EngineError, LogprobParams, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


def make(**options: Any) -> LLM:
    settings = {"device": "cpu", "dtype": "float32", "context_length": 64, "max_total_tokens": 1024}
    return LLM(
        "tiny-llama", load_format="dummy", progress=False, max_running_requests=4, **settings, **options
    )


@pytest.fixture(scope="module")
def shared() -> LLM:
    return make()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_free(shared)


def assert_free(llm: LLM) -> None:
    llm._worker.scheduler.check()
    stats = llm._worker.stats()
    names = ("running", "queued", "steps_in_flight", "pages_held", "pages_reserved")
    assert [stats[name] for name in names] == [0] * 5


def run(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    results = llm.generate(prompts, params, progress=False, **options)
    return [c.token_ids for r in results for c in r.outputs]


@pytest.mark.parametrize(
    "prompts",
    [None, 5, np.array(5), {"prompt": "a"}, {5, 6}, b"abc", [None], [5, "a"], [{5: 6}], [[5], [999]]],
    ids=repr,
)
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError):
        run(llm, prompts)


@pytest.mark.parametrize(
    "params", [{"n": "3"}, {"n": 1.5}, {"n": None}, {"n": 10**9}, {"ignore_eos": "no"}, {"stop_regex": "("}]
)
def test_what_is_no_parameter_runs_nothing(llm: LLM, params: dict[str, Any]) -> None:
    num_steps = llm._worker.num_steps
    with pytest.raises(RequestError, match=next(iter(params))):
        run(llm, [[5], [6]], [GREEDY, SamplingParams(**params)])
    assert llm._worker.num_steps == num_steps


def test_prompts_in_any_kind_of_list(llm: LLM) -> None:
    expected = run(llm, [[5, 6], [7, 8]])
    for prompts in (((5, 6), (7, 8)), np.array([[5, 6], [7, 8]]), (p for p in ([5, 6], range(7, 9)))):
        assert run(llm, prompts) == expected
    assert run(llm, np.array(["a", "b c"])) == run(llm, ["a", "b c"])
    for messages in (None, 5, [5], [[5]]):
        with pytest.raises(RequestError):
            llm.chat(messages, progress=False)  # type: ignore[arg-type]


def test_logprobs_of_ids_in_an_array(llm: LLM) -> None:
    want = LogprobParams(token_ids=np.array([5, 7]))  # type: ignore[arg-type]
    for result in llm.generate([[5], [6], [7]], GREEDY, logprobs=want, progress=False):
        assert [[i for i, _ in p.ids] for p in result.outputs[0].logprobs or []] == [[5, 7]] * 8


@pytest.mark.parametrize("skip_tokenizer_init", [False, True])
def test_no_tokens_have_no_logprobs_but_a_list(skip_tokenizer_init: bool) -> None:
    other = make(skip_tokenizer_init=skip_tokenizer_init)
    params = [SamplingParams(max_new_tokens=n) for n in (0, 1)]
    results = other.generate([[5], [6]], params, logprobs=LogprobParams(), progress=False)
    assert [len(r.outputs[0].logprobs or ()) for r in results] == [0, 1]
    assert results[0].outputs[0].logprobs == []
    assert other.generate([5], params[0], progress=False)[0].outputs[0].logprobs is None


def test_an_expression_ends_the_run_and_not_only_the_text(llm: LLM) -> None:
    text = llm.generate([5, 6], GREEDY, progress=False)[0].outputs[0].text
    assert text is not None and len(text.split()) == 8
    num_steps = llm._worker.num_steps
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True, stop_regex="[a-z]")
    completion = llm.generate([5, 6], params, progress=False)[0].outputs[0]
    assert len(completion.token_ids) == 1 and completion.finish_reason.matched == "[a-z]"
    assert llm._worker.num_steps - num_steps <= 3


def test_an_expression_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        run(make(skip_tokenizer_init=True), [[5]], SamplingParams(stop_regex="a"))


def test_calls_from_threads(llm: LLM) -> None:
    prompts = [[[5 + i], [40 + i, 6], [70 + i, 7, 8]] for i in range(6)]
    expected = [run(llm, p) for p in prompts]
    found: list[Any] = [None] * 6

    def call(i: int) -> None:
        found[i] = [run(llm, prompts[i]) for _ in range(3)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[e] * 3 for e in expected]


def press_in(owner: Any, name: str, presses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the third call of this method press Ctrl-C so often before it does anything."""
    num_calls = 0
    inner: Callable[..., Any] = getattr(owner, name)

    def method(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        for _ in range(presses if num_calls == 3 else 0):
            signal.raise_signal(signal.SIGINT)
        return inner(*args)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("disable_overlap_schedule", [False, True])
@pytest.mark.parametrize("place", ["pages.enter", "pages.advance", "pages.release", "_counters.ended"])
def test_ctrl_c_within_a_step_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch, place: str, disable_overlap_schedule: bool, presses: int
) -> None:
    llm = make(disable_overlap_schedule=disable_overlap_schedule)
    prompts = [[5 + i] for i in range(40)]
    expected = run(llm, prompts)
    attribute, name = place.split(".")
    with monkeypatch.context() as patch:
        press_in(getattr(llm._worker.scheduler, attribute), name, presses, patch)
        with pytest.raises(KeyboardInterrupt):
            run(llm, prompts)
    assert_free(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(llm, prompts) == expected


def test_the_third_ctrl_c_raises_at_once_and_the_next_call_says_what_it_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make()
    press_in(llm._worker.scheduler.pages, "enter", 3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(llm, [[5 + i] for i in range(40)])
    with pytest.raises(EngineError, match="make a new LLM"):
        run(llm, [[5]])


PLACES = [
    "_worker._engine.launch",
    "_worker.scheduler.pages.release",
    "_worker.scheduler.pages.allocator.alloc",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_before", [True, False])
def test_a_call_that_breaks_within_a_step_ends(
    monkeypatch: pytest.MonkeyPatch, place: str, is_before: bool
) -> None:
    """What is lost half way is said, not waited for."""
    llm = make()
    path, name = place.rsplit(".", 1)
    owner = operator.attrgetter(path)(llm)
    inner = getattr(owner, name)
    num_calls = 0

    def method(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3 and is_before:
            raise RuntimeError("the device is gone")
        result = inner(*args)
        if num_calls == 3:
            raise RuntimeError("the device is gone")
        return result

    monkeypatch.setattr(owner, name, method)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(llm, [[5 + i] for i in range(20)])
    with pytest.raises(EngineError, match="make a new LLM"):
        run(llm, [[5]])


def test_a_handler_of_the_programs_own_stays(llm: LLM) -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        timer = threading.Timer(0, signal.raise_signal, [signal.SIGINT])
        timer.start()
        assert len(run(llm, [[5], [6]])) == 2
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [signal.SIGINT]
