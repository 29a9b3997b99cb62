"""The sampler against its float64 reference, and what must hold for every row whatever shares its batch."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import EngineError
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish
from phalanx.sampling.adjust import adjust_logits
from phalanx.sampling.choose import DRAW_BLOCK, argmax_rows, draw_rows
from phalanx.sampling.reference import adjusted_logits, distribution, race, reference_sample
from phalanx.sampling.rows import SamplingRows
from phalanx.sampling.sampler import Sampler
from phalanx.sampling.uniform import exponentials, reference_exponentials, row_keys
from tests.unit.step_plans import entering, i32

CPU = torch.device("cpu")


def make_sampler(
    params: list[SamplingParams],
    vocab: int,
    *,
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    stops: list[tuple[int, ...]] | None = None,
    max_context: int = 64,
) -> Sampler:
    """A sampler whose rows 1..n hold these requests, with their tokens so far recorded."""
    rows = range(1, len(params) + 1)
    prompts = prompts or [[0]] * len(params)
    outputs = outputs or [[]] * len(params)
    table = SamplingRows(len(params) + 1, vocab, max_context, CPU)
    table.enter(entering(rows, params, [len(p) for p in prompts], stops))
    for row, prompt, output in zip(rows, prompts, outputs, strict=True):
        tokens = prompt + output
        table.record_prompt(i32([row] * len(tokens)), i32(range(len(tokens))), i32(tokens))
    return Sampler(table)


def run(
    sampler: Sampler,
    logits: torch.Tensor,
    num_generated: list[int] | None = None,
    lines: list[int] | None = None,
) -> tuple[list[int], list[int]]:
    lines = list(range(len(logits))) if lines is None else lines
    done = [0] * len(logits) if num_generated is None else num_generated
    tokens, finish = sampler.sample(
        logits[lines], i32(lines) + 1, i32(done)[lines], np.ones(len(lines), bool)
    )
    assert tokens.dtype == torch.int32 and finish.dtype == torch.uint8
    return tokens.tolist(), finish.tolist()


def acceptable(logits: np.ndarray, params: SamplingParams, stops, prompt, output) -> set[int]:
    """Tokens that rounding of 1e-5 in the race or at a filter's edge may turn the reference's token into."""
    found = set()
    adjusted = adjusted_logits(logits, params, stops, prompt, output)
    for edge in (-1e-5, 0.0, 1e-5):
        moved = msgspec.structs.replace(
            params,
            top_p=params.top_p if params.top_p >= 1 else params.top_p + edge,
            min_p=params.min_p if params.min_p <= 0 else params.min_p * (1 + edge),
        )
        blocks, inside = race(distribution(adjusted, moved), params.sampling_seed, len(output))
        for block in np.flatnonzero(blocks >= blocks.max() * (1 - 1e-5)):
            lanes = np.flatnonzero(inside[block] >= inside[block].max() * (1 - 1e-5))
            found |= set((block * DRAW_BLOCK + lanes).tolist())
    return found


dyadic = st.integers(-128, 128).map(lambda v: v / 64)


@st.composite
def requests(draw, vocab: int):
    tokens = st.integers(0, vocab - 1)
    output = draw(st.lists(tokens, max_size=8))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01])),
        top_k=draw(st.sampled_from([-1, -1, 1, 2, 50, 10_000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.9])),
        frequency_penalty=draw(st.just(0.0) | dyadic),
        presence_penalty=draw(st.just(0.0) | dyadic),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.25, 2.0])),
        min_new_tokens=draw(st.sampled_from([0, 0, 4])),
        logit_bias=draw(st.just({}) | st.dictionaries(tokens, dyadic, max_size=5)),
        sampling_seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )
    stops = tuple(draw(st.lists(tokens, max_size=3)))
    return params, draw(st.lists(tokens, min_size=1, max_size=8)), output, stops


@pytest.mark.fuzz
@given(st.data())
def test_mixed_batch_follows_the_reference(data) -> None:
    vocab = data.draw(st.sampled_from([2, 31, 257, 512, 700, 1300]))
    batch = data.draw(st.lists(requests(vocab), min_size=1, max_size=24))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    logits = (torch.randn(len(batch), vocab, generator=generator) * 3).to(dtype)
    if data.draw(st.booleans()):
        logits = logits.round()  # many ties
    params, prompts, outputs, stops = (list(x) for x in zip(*batch, strict=True))
    sampler = make_sampler(params, vocab, prompts=prompts, outputs=outputs, stops=stops)
    tokens, finish = run(sampler, logits, [len(o) for o in outputs])
    for line, (request, prompt, output, stop) in enumerate(batch):
        raw = logits[line].double().numpy()
        expected = reference_sample(raw, request, stop_ids=stop, prompt=prompt, output=output)
        if expected is None:
            assert (tokens[line], finish[line]) == (0, Finish.ERROR)
            continue
        if tokens[line] != expected:
            assert not request.is_greedy
            assert tokens[line] in acceptable(raw, request, stop, prompt, output)
        assert finish[line] == (Finish.STOP if tokens[line] in stop else Finish.NONE)


def test_reference_tokens_exactly() -> None:
    """Rounding may move a draw once in a hundred thousand; over 2000 rows of a fixed seed it never does."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2000, 300, generator=generator).bfloat16() * 3
    kinds = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.7, "min_p": 0.05}]
    params = [
        SamplingParams(temperature=0.5 + i % 7 / 4, sampling_seed=i, **kinds[i % 5]) for i in range(2000)
    ]
    tokens, _ = run(make_sampler(params, 300), logits)
    raw = logits.double().numpy()
    assert tokens == [reference_sample(raw[i], p) for i, p in enumerate(params)]


def test_real_vocabulary_size() -> None:
    vocab = 49152
    logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(0)).bfloat16() * 4
    kinds = [
        {"temperature": 0},
        {},
        {"top_p": 0.9},
        {"top_k": 1000},
        {"top_p": 0.3, "temperature": 9.0},
        {"top_k": 3},
    ]
    params = [SamplingParams(sampling_seed=i, **kinds[i % 6]) for i in range(12)]
    tokens, _ = run(make_sampler(params, vocab), logits)
    raw = logits.double().numpy()
    for i, request in enumerate(params):
        if request.is_greedy:
            assert tokens[i] == int(np.argmax(raw[i]))
        else:
            assert tokens[i] in acceptable(raw[i], request, (), [0], [])


def test_greedy_ties_take_the_lowest_index_beside_a_warm_row() -> None:
    """FreeToken#471, vllm#14301: greedy turned random in a mixed batch."""
    logits = torch.tensor([[1.0, 1.0, 0.0]] * 4)
    params = [
        SamplingParams(temperature=0, top_p=0.5),
        SamplingParams(temperature=1.0, sampling_seed=3),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, top_k=1, sampling_seed=4),
    ]
    for done in range(50):
        tokens, _ = run(make_sampler(params, 3), logits, [done] * 4)
        assert tokens[0] == tokens[2] == tokens[3] == 0


def test_top_k_unset_one_and_fifty_in_one_batch() -> None:
    vocab, draws = 64, 1000
    logits = torch.zeros(3, vocab).repeat(draws, 1)  # all tied: top_k keeps the lowest ids
    params = [SamplingParams(top_k=k, sampling_seed=i) for i in range(draws) for k in (-1, 1, 50)]
    tokens, _ = run(make_sampler(params, vocab), logits)
    by_kind = np.asarray(tokens).reshape(draws, 3)
    assert set(by_kind[:, 0]) == set(range(64))
    assert set(by_kind[:, 1]) == {0}
    assert set(by_kind[:, 2]) == set(range(50))


@pytest.mark.parametrize(
    "top_p, allowed", [(0.499, {3}), (0.501, {1, 3}), (0.749, {1, 3}), (0.751, {0, 1, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, allowed: set[int]) -> None:
    """Probabilities 1/8, 1/4, 1/8, 1/2; of the tied pair the lower id is kept."""
    logits = torch.log(torch.tensor([1 / 8, 1 / 4, 1 / 8, 1 / 2], dtype=torch.float64)).float()
    params = [SamplingParams(top_p=top_p, sampling_seed=i) for i in range(300)]
    tokens, _ = run(make_sampler(params, 4), logits.repeat(300, 1))
    assert set(tokens) == allowed


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = torch.log(torch.tensor([0.5, 0.26, 0.24]))
    params = [SamplingParams(min_p=0.5, sampling_seed=i) for i in range(200)]
    tokens, _ = run(make_sampler(params, 3), logits.repeat(200, 1))
    assert set(tokens) == {0, 1}


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 30000 draws, seeds by counters; 29.9 is the 1e-4 quantile at 7 degrees of freedom."""
    vocab, rows, steps, temperature = 8, 1000, 30, 0.7
    raw = torch.tensor([0.1, 2.0, -1.0, 0.5, 1.5, 1.5, -0.5, 0.0])
    sampler = make_sampler(
        [SamplingParams(temperature=temperature, sampling_seed=i) for i in range(rows)], vocab
    )
    counts = np.zeros(vocab)
    for done in range(steps):
        tokens, _ = run(sampler, raw.repeat(rows, 1), [done] * rows)
        counts += np.bincount(tokens, minlength=vocab)
    expected = torch.softmax(raw.double() / temperature, 0).numpy() * rows * steps
    assert ((counts - expected) ** 2 / expected).sum() < 29.9


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=20)
)
def test_noise_follows_its_specification(pairs: list[tuple[int, int]]) -> None:
    seeds, done = zip(*pairs, strict=True)
    counters = np.array([0, 1, 255, 256, 150_000])
    found = exponentials(row_keys(torch.tensor(seeds), torch.tensor(done)), torch.from_numpy(counters))
    want = np.stack([reference_exponentials(s, c, counters) for s, c in pairs])
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-12)
    assert (found > 0).all()


def test_noise_of_neighbouring_seeds_positions_and_counters_is_unrelated() -> None:
    """Uniforms exp(-noise): 1000 means of 1000 have a standard deviation of 0.0091; six of it bound each."""
    steps = torch.arange(1000)
    zeros = torch.zeros_like(steps)
    grids = [
        exponentials(row_keys(steps, zeros), steps),
        exponentials(row_keys(zeros, steps), steps),
        exponentials(row_keys(steps.repeat_interleave(1000), steps.repeat(1000)), zeros[:1]).view(1000, 1000),
    ]
    for grid in grids:
        centred = torch.exp(-grid) - 0.5
        assert centred.mean(0).abs().max() < 0.055
        assert centred.mean(1).abs().max() < 0.055
        for other in (centred[1:, :-1], centred[:-1, 1:], centred[1:, 1:]):
            assert abs((centred[:-1, :-1] * other).mean() * 12) < 6e-3  # 1e6 pairs: sigma 1e-3


def mixed_params(n: int) -> list[SamplingParams]:
    kinds = [
        {"temperature": 0},
        {},
        {"top_p": 0.8},
        {"top_k": 7},
        {"min_p": 0.05},
        {"frequency_penalty": 0.7, "temperature": 0},
        {"repetition_penalty": 1.3, "top_p": 0.95, "top_k": 40},
        {"logit_bias": {5: 3.5, 9: -2.0}},
        {"min_new_tokens": 3},
    ]
    return [SamplingParams(sampling_seed=i, **kinds[i % len(kinds)]) for i in range(n)]


@pytest.mark.parametrize("vocab", [300, 5000])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocab: int) -> None:
    n = 45
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(1)) * 2
    params = mixed_params(n)
    prompts = [[i % vocab, 3, 4] for i in range(n)]
    outputs = [[5, i % vocab, 5] for i in range(n)]

    def tokens_of(lines: list[int]) -> list[int]:
        sampler = make_sampler(params, vocab, prompts=prompts, outputs=outputs, stops=[(1, 2)] * n)
        return run(sampler, logits, [3] * n, lines)[0]

    together = tokens_of(list(range(n)))
    assert [tokens_of([i])[0] for i in range(n)] == together
    shuffled = np.random.default_rng(0).permutation(n).tolist()
    assert tokens_of(shuffled) == [together[i] for i in shuffled]


@pytest.mark.parametrize("bad", ["nan", "one nan", "+inf", "-inf"])
def test_rows_without_finite_maximum_end_in_error_alone(bad: str) -> None:
    n, vocab = 18, 600
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(2))
    params = mixed_params(n)
    clean, _ = run(make_sampler(params, vocab), logits)
    for line in range(9):  # one of each kind
        spoiled = logits.clone()
        match bad:
            case "nan":
                spoiled[line] = math.nan
            case "one nan":
                spoiled[line, 77] = math.nan
            case "+inf":
                spoiled[line, 599] = math.inf
            case _:
                spoiled[line] = -math.inf
        tokens, finish = run(make_sampler(params, vocab, stops=[(0,)] * n), spoiled)
        assert (tokens[line], finish[line]) == (0, Finish.ERROR)
        assert [t for i, t in enumerate(tokens) if i != line] == [t for i, t in enumerate(clean) if i != line]
        assert Finish.ERROR not in [f for i, f in enumerate(finish) if i != line]


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((500, 10), -math.inf)
    logits[:, [2, 7]] = 1.0
    params = [SamplingParams(sampling_seed=i, temperature=5.0, top_p=1 - i % 2 / 100) for i in range(500)]
    tokens, finish = run(make_sampler(params, 10), logits)
    assert set(tokens) == {2, 7} and set(finish) == {Finish.NONE}


def test_penalties_change_logits_exactly() -> None:
    vocab = 9
    params = [
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.25),
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(repetition_penalty=0.5, frequency_penalty=-1.0),
        SamplingParams(),
    ]
    prompts = [[1, 1, 2], [3, 4], [5], [6, 7, 8, 0]]
    outputs = [[2, 2, 2, 4], [5], [5, 5], [1]]
    logits = torch.tensor([[2.0, -2.0, 4.0, 1.0, -1.0, 3.0, 0.0, 0.5, -0.5]]).repeat(4, 1)
    sampler = make_sampler(params, vocab, prompts=prompts, outputs=outputs)
    changed = logits.clone()
    adjust_logits(changed, sampler.table, i32([1, 2, 3, 4]), i32([len(o) for o in outputs]))
    base = logits[0].tolist()
    # Row 1: token 2 three times in the output, token 4 once; the prompt does not count.
    assert changed[0].tolist() == [*base[:2], 4 - 1.5 - 0.25, base[3], -1 - 0.5 - 0.25, *base[5:]]
    # Row 2: 3 and 4 in the prompt, 5 in the output; positive divided, negative multiplied.
    assert changed[1].tolist() == [*base[:3], 0.5, -2.0, 1.5, *base[6:]]
    assert changed[2].tolist() == [*base[:5], 3 / 0.5 + 2, *base[6:]]
    assert changed[3].tolist() == base


def test_history_grows_with_the_tokens_that_the_sampler_chose() -> None:
    """With a presence penalty a greedy row walks down the logits, one token after the other."""
    logits = torch.tensor([[3.0, 2.5, 2.0, 1.5]])
    sampler = make_sampler([SamplingParams(temperature=0, presence_penalty=2.0)], 4, prompts=[[0, 1, 2, 3]])
    assert [run(sampler, logits, [step])[0][0] for step in range(4)] == [0, 1, 2, 3]


def test_history_never_leaves_its_row() -> None:
    params = [SamplingParams(temperature=0, presence_penalty=0.5)] * 2
    sampler = make_sampler(params, 4, prompts=[[1] * 6, [2] * 6], max_context=8)
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 2)
    for step in range(5):  # positions 6..10 of 8
        run(sampler, logits, [step] * 2)
    assert sampler.table.history[1, :6].tolist() == [1] * 6
    assert sampler.table.history[2, :6].tolist() == [2] * 6
    assert sampler.table.history[0].tolist() == [0] * 8


def test_min_new_tokens_holds_end_tokens_back() -> None:
    logits = torch.tensor([[5.0, 1.0, 4.0, 3.0]] * 2)
    params = [SamplingParams(temperature=0, min_new_tokens=2), SamplingParams(temperature=0)]
    sampler = make_sampler(params, 4, stops=[(0, 2, 99), (0,)])
    assert run(sampler, logits, [0, 0]) == ([3, 0], [Finish.NONE, Finish.STOP])
    assert run(sampler, logits, [1, 1]) == ([3, 0], [Finish.NONE, Finish.STOP])
    assert run(sampler, logits, [2, 2]) == ([0, 0], [Finish.STOP, Finish.STOP])


def test_logit_bias_forces_and_bans() -> None:
    logits = torch.zeros(3, 5)
    params = [
        SamplingParams(temperature=0, logit_bias={3: 100.0}),
        SamplingParams(temperature=0, logit_bias={0: -100.0, 1: -100.0}),
        SamplingParams(temperature=0),
    ]
    assert run(make_sampler(params, 5), logits)[0] == [3, 2, 0]


def test_wide_bias_tables_grow_and_rows_forget_their_last_request() -> None:
    vocab = 600
    table = SamplingRows(4, vocab, 8, CPU)
    sampler = Sampler(table)
    few = SamplingParams(temperature=0, logit_bias={7: 50.0})
    many = SamplingParams(temperature=0, logit_bias={i: float(i == 42) for i in range(300)})
    plain = SamplingParams(temperature=0)
    logits = torch.zeros(2, vocab)
    table.enter(entering([1], [few], [1], [(7,)]))
    table.enter(entering([2], [many], [1]))
    assert run(sampler, logits) == ([7, 42], [Finish.STOP, Finish.NONE])
    table.enter(entering([2, 1], [few, plain], [1, 1], [(), (1,)]))
    assert run(sampler, logits) == ([0, 7], [Finish.NONE, Finish.NONE])


def test_rows_that_need_no_eager_sampling_skip_it() -> None:
    """The plan says when min_new_tokens matters no more; the fast path then takes the row."""
    sampler = make_sampler([SamplingParams(temperature=0, min_new_tokens=9)], 3, stops=[(0,)])
    tokens, finish = sampler.sample(torch.tensor([[2.0, 1.0, 0.0]]), i32([1]), i32([9]), np.zeros(1, bool))
    assert tokens.tolist() == [0] and finish.tolist() == [Finish.STOP]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e6, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[-40.0, 30.0, 29.0, 8.0]] * 200)
    params = [SamplingParams(temperature=temperature, sampling_seed=i) for i in range(200)]
    tokens, finish = run(make_sampler(params, 4), logits)
    assert set(tokens) == ({1} if temperature < 1 else {0, 1, 2, 3})
    assert set(finish) == {Finish.NONE}


def test_no_rows() -> None:
    tokens, finish = make_sampler([SamplingParams()], 5).sample(
        torch.zeros(0, 5), i32([]), i32([]), np.zeros(0, bool)
    )
    assert tokens.shape == finish.shape == (0,)


def test_entering_rows_are_checked_before_anything_is_written() -> None:
    table = SamplingRows(3, 10, 8, CPU)
    with pytest.raises(EngineError, match="logit_bias"):
        table.enter(entering([1], [SamplingParams(logit_bias={10: 1.0})], [1]))
    with pytest.raises(EngineError, match="17 entries where 16 fit"):
        table.enter(entering([1], [SamplingParams()], [1], [tuple(range(17))]))
    assert table.uses.tolist() == [0, 0, 0] and (table.stop_ids == -1).all()
    table.enter(entering([], [], []))


@pytest.mark.parametrize("vocab", [1, 2, 511, 512, 513, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_lowest_index_of_the_maximum(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab)).mul(2).round().to(dtype)
    index, maxima = argmax_rows(logits)
    assert index.tolist() == [int(np.argmax(row)) for row in logits.float().numpy()]
    assert torch.equal(maxima, logits.amax(1))


def test_draws_follow_their_weights_within_and_across_blocks() -> None:
    """40000 draws over 5 weights: chi-square with 4 degrees of freedom stays under 28.5 (p = 1e-5)."""
    rows = 40_000
    weights = torch.zeros(1, 2 * DRAW_BLOCK)
    where = [3, DRAW_BLOCK - 1, DRAW_BLOCK, DRAW_BLOCK + 9, 2 * DRAW_BLOCK - 1]
    share = torch.tensor([0.25, 0.1, 0.05, 0.5, 0.1])
    weights[0, where] = share * 7  # need not sum to 1
    drawn = draw_rows(weights.expand(rows, -1).contiguous(), row_keys(torch.arange(rows), torch.zeros(rows)))
    counts = torch.bincount(drawn, minlength=2 * DRAW_BLOCK)
    assert counts[where].sum() == rows  # nothing of weight 0
    expected = share.double() * rows
    assert ((counts[where] - expected) ** 2 / expected).sum() < 28.5


def test_rounding_of_the_weights_hardly_ever_turns_a_draw() -> None:
    """50000 tokens in 2000 rows, weights off by 1e-6: an inverted cumulative sum would turn some of them."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2000, 25 * DRAW_BLOCK, generator=generator).mul(2).exp()
    noise = 1 + 1e-6 * torch.randn(weights.shape, generator=generator)
    keys = row_keys(torch.arange(2000), torch.zeros(2000))
    assert torch.equal(draw_rows(weights, keys), draw_rows(weights * noise, keys))


def test_a_row_with_nothing_left_to_choose_ends_in_error() -> None:
    logits = torch.zeros(2, 3)
    params = [SamplingParams(min_new_tokens=5, temperature=t, sampling_seed=1) for t in (0, 1)]
    assert run(make_sampler(params, 3, stops=[(0, 1, 2)] * 2), logits) == ([0, 0], [Finish.ERROR] * 2)
