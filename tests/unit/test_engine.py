"""The engine under hand-made plans, with a tiny fp32 decoder."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch

from phalanx.attention.base import ForwardBatch, PrefillPart
from phalanx.attention.registry import create_attention
from phalanx.config.groups import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ModelSource,
    SchedulerConfig,
    ServerConfig,
    Settings,
)
from phalanx.core.errors import ConfigError, EngineError
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepResult
from phalanx.engine import null
from phalanx.engine.buckets import (
    MixedShape,
    MixedShapes,
    bucket_of,
    decode_buckets,
    free_tokens,
    power_of_two_buckets,
)
from phalanx.engine.build import build_engine
from phalanx.engine.engine import Engine
from phalanx.engine.null import NullEngine, null_token_ids
from phalanx.engine.plan_arrays import padded, plan_arrays
from phalanx.engine.rows import grant_ring
from phalanx.engine.upload import upload
from phalanx.kvcache.pool import KVPool
from phalanx.models.decoder import Decoder
from phalanx.models.dummy import BUILTIN_CONFIGS
from phalanx.models.weights import iter_dummy_weights
from tests.unit.step_plans import HandScheduler, i32
from tests.unit.test_logprobs import plan as logprob_plan

CPU = torch.device("cpu")
CONFIG: ModelConfig = msgspec.structs.replace(
    BUILTIN_CONFIGS["tiny-llama"], vocab_size=97, tie_word_embeddings=False
)
GREEDY = SamplingParams(temperature=0)
CONTEXT = 40
PROMPTS = [[5, 9, 13, 2, 7], [11], [3] * 17, list(range(20, 36))]


def settings(page_size: int, **changes: object) -> Settings:
    found = Settings(
        source=ModelSource(name="tiny", load_format="dummy", path="tiny", tokenizer_path="dummy"),
        model=CONFIG,
        cache=CacheConfig(
            page_size=page_size, max_total_tokens=None, mem_fraction_static=0.5, dtype="float32"
        ),
        scheduler=SchedulerConfig(max_running_requests=6, context_length=CONTEXT, grant_tokens=16),
        engine=EngineConfig(
            device="cpu",
            dtype="float32",
            attention_backend="numba",
            overlap=True,
            cuda_graph=False,
            random_seed=0,
            num_threads=1,
        ),
        server=ServerConfig(host="", port=0, served_model_name="tiny"),
    )
    return msgspec.structs.replace(found, **changes)


def decisive_decoder() -> Decoder:
    """Ten times the usual spread, so that a wrong position or a missing token changes the argmax."""
    decoder = Decoder(CONFIG, dtype=torch.float32, device=CPU)
    weights = iter_dummy_weights(CONFIG, seed=3, dtype=torch.float32, device=CPU)
    decoder.load_weights((name, w if name.endswith("norm.weight") else w * 10) for name, w in weights)
    return decoder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decisive_decoder()


class Rig:
    """An engine and the hand-made plans for it."""

    def __init__(
        self, model: object, page_size: int = 4, num_pages: int = 80, grant_tokens: int = 16
    ) -> None:
        pool = KVPool(CONFIG, num_pages=num_pages, page_size=page_size, dtype=torch.float32, device=CPU)
        self.pool = pool
        chosen = settings(page_size)
        scheduler = msgspec.structs.replace(chosen.scheduler, grant_tokens=grant_tokens)
        chosen = msgspec.structs.replace(chosen, scheduler=scheduler)
        self.engine = Engine(chosen, model, pool, create_attention("numba", CONFIG), CPU)
        self.hand = HandScheduler(num_pages, page_size)

    def step(self, **kwargs: object) -> StepResult:
        return self.engine.launch(self.hand.plan(**kwargs)).result()

    def add(self, *prompts: list[int], params: SamplingParams = GREEDY, first_row: int = 1) -> list[int]:
        rows = list(range(first_row, first_row + len(prompts)))
        for row, prompt in zip(rows, prompts, strict=True):
            self.hand.add(row, prompt, params)
        return rows


@pytest.fixture
def rig(model: Decoder):
    rigs = []

    def make(page_size: int = 4, using: object = model, **kwargs: int) -> Rig:
        rigs.append(Rig(using, page_size, **kwargs))
        return rigs[-1]

    yield make
    for each in rigs:
        each.engine.close()


def full_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]: one causal pass over the whole sequence, in a pool of its own."""
    n = len(tokens)
    pool = KVPool(CONFIG, num_pages=n + 1, page_size=1, dtype=torch.float32, device=CPU)
    batch = ForwardBatch(
        input_ids=torch.tensor(tokens),
        positions=torch.arange(n),
        slot_mapping=torch.arange(1, n + 1),
        req_to_token=torch.arange(1, n + 1, dtype=torch.int32)[None],
        logits_index=torch.arange(n),
        num_decode=0,
        decode=None,
        prefill=PrefillPart(rows=torch.zeros(1, dtype=torch.int64), starts=[0], lens=[n]),
    )
    with torch.inference_mode():
        return model.logits(model.forward(batch, pool, create_attention("torch_native", CONFIG)))


def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected(model: Decoder) -> list[list[int]]:
    """Eight greedy tokens of each prompt."""
    found = [greedy(model, prompt, 8) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)
    assert all(len(set(tokens)) > 2 for tokens in found)  # else a stuck engine would pass
    return found


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decode_after_prefill_equals_the_full_forward(rig, expected, page_size: int) -> None:
    r = rig(page_size)
    rows = r.add(*PROMPTS)
    got = [r.step(chunks=[(row, len(p)) for row, p in zip(rows, PROMPTS, strict=True)]).tokens]
    got += [r.step(decode=rows).tokens for _ in range(7)]
    assert np.stack(got, 1).tolist() == expected


def test_mixed_steps_with_chunked_prompts(rig, expected) -> None:
    r = rig()
    got: dict[int, list[int]] = {row: [] for row in r.add(*PROMPTS)}

    def step(decode: list[int] = (), chunks: list[tuple[int, int]] = ()) -> None:
        plan = r.hand.plan(decode=decode, chunks=chunks)
        result = r.engine.launch(plan).result()
        assert result.step_id == plan.step_id
        for row, token in zip(plan.sample_rows.tolist(), result.tokens.tolist(), strict=True):
            got[row].append(token)

    step(chunks=[(1, 3), (3, 6)])  # nothing is sampled
    step(chunks=[(3, 6), (1, 2), (2, 1)])
    step(decode=[2, 1], chunks=[(3, 5), (4, 1)])
    step(decode=[3, 1, 2], chunks=[(4, 15)])
    for _ in range(4):
        step(decode=[4, 2, 1, 3])
    assert got == {row: expected[row - 1][: len(tokens)] for row, tokens in got.items()}
    assert [len(got[row]) for row in (1, 2, 3, 4)] == [7, 7, 6, 5]


def test_two_steps_in_flight(rig, expected) -> None:
    """The second plan is made and launched before the first is read."""
    r = rig()
    r.add(*PROMPTS)
    handles = [r.engine.launch(r.hand.plan(chunks=[(row, len(PROMPTS[row - 1])) for row in (1, 2, 3, 4)]))]
    tokens = []
    for _ in range(7):
        handles.append(r.engine.launch(r.hand.plan(decode=[1, 2, 3, 4])))
        tokens.append(handles.pop(0).result().tokens)
    tokens.append(handles.pop(0).result().tokens)
    assert np.stack(tokens, 1).tolist() == expected


def test_rows_are_reused(rig, expected) -> None:
    r = rig()
    r.add(PROMPTS[2])
    r.step(chunks=[(1, 17)])
    r.step(decode=[1])
    r.hand.add(1, PROMPTS[0], GREEDY)
    got = [r.step(chunks=[(1, 5)]).tokens[0]] + [r.step(decode=[1]).tokens[0] for _ in range(7)]
    assert got == expected[0]


class FailingModel:
    """Fails in the n-th forward; otherwise the model it wraps."""

    def __init__(self, model: Decoder, fail_at: int) -> None:
        self._model, self._left, self.logits = model, fail_at, model.logits

    def forward(self, *args: object) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("out of luck")
        return self._model.forward(*args)


def test_a_failed_step_says_why_and_harms_no_other_row(rig, model: Decoder, expected) -> None:
    r = rig(using=FailingModel(model, fail_at=3))
    r.add(*PROMPTS[:2])
    tokens = [r.step(chunks=[(1, 5)]).tokens[0], r.step(decode=[1]).tokens[0]]
    failing = r.engine.launch(r.hand.plan(chunks=[(2, 1)]))
    after = r.engine.launch(r.hand.plan(decode=[1]))  # launched before the failure is known
    with pytest.raises(EngineError, match="step 3 failed: RuntimeError: out of luck") as caught:
        failing.result()
    assert isinstance(caught.value.__cause__, RuntimeError)
    tokens += [after.result().tokens[0]] + [r.step(decode=[1]).tokens[0] for _ in range(5)]
    assert tokens == expected[0]
    r.hand.add(2, PROMPTS[1], GREEDY)  # the row of the failed request serves again
    assert r.step(chunks=[(2, 1)]).tokens[0] == expected[1][0]


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"decode_rows": i32([7]), "sample_rows": i32([7, 1])}, "decode row 7"),
        ({"decode_rows": i32([0]), "sample_rows": i32([0, 1])}, "decode row 0"),
        ({"sample_rows": i32([])}, "sample_rows"),
        ({"slots": i32([4, 5, 6, 7, 80 * 4])}, "slot 320"),
        ({"slots": i32([3, 5, 6, 7, 8])}, "slot 3"),
        ({"slots": i32([4])}, "1 slots"),
        ({"starts": i32([CONTEXT - 4])}, "chunk end 41"),
    ],
)
def test_plans_out_of_range_are_refused_and_change_nothing(rig, expected, broken: dict, message: str) -> None:
    r = rig()
    r.add(PROMPTS[0])
    plan = r.hand.plan(chunks=[(1, 5)])
    prefill = {k: v for k, v in broken.items() if k in ("slots", "starts")}
    rest = {k: v for k, v in broken.items() if k not in prefill}
    spoiled = replaced(plan, prefill=replaced(plan.prefill, **prefill), **rest)
    with pytest.raises(EngineError, match=message):
        r.engine.launch(spoiled).result()
    assert r.engine.launch(plan).result().tokens[0] == expected[0][0]


def replaced(value: object, **changes: object) -> object:
    fields = {name: getattr(value, name) for name in value.__slots__}
    return type(value)(**(fields | changes))


def test_the_last_position_of_the_context_and_one_beyond(rig, model: Decoder) -> None:
    """mini-sglang#68: a row that is full neither leaves its table row nor touches its neighbours."""
    r = rig(page_size=16)
    prompt = [1 + i % 90 for i in range(CONTEXT - 2)]
    r.add(prompt, PROMPTS[0])
    neighbour = greedy(model, PROMPTS[0], 5)
    tokens = [r.step(chunks=[(1, len(prompt)), (2, 5)]).tokens.tolist()]
    tokens += [r.step(decode=[1, 2]).tokens.tolist() for _ in range(2)]  # positions 38 and 39, the last
    assert [t[0] for t in tokens] == greedy(model, prompt, 3)
    tokens += [r.step(decode=[1, 2]).tokens.tolist() for _ in range(2)]
    assert [t[1] for t in tokens] == neighbour


def test_padding_lanes_leave_the_last_slot_alone(rig, expected) -> None:
    """Three live rows in a bucket of eight; one owns the last page. sglang#32477, vllm#43810."""
    r = rig(page_size=4, num_pages=40)
    r.hand.free.append(r.hand.free.pop(r.hand.free.index(39)))  # the first page handed out
    for part in (*r.pool.k, *r.pool.v):
        part[:4] = 1e30  # what padding may have left in page 0
    r.add(*PROMPTS[:3])
    got = [r.step(chunks=[(row, len(PROMPTS[row - 1])) for row in (1, 2, 3)]).tokens]
    assert 39 in r.hand.sequences[1].pages
    got += [r.step(decode=[1, 2, 3]).tokens for _ in range(7)]
    assert np.stack(got, 1).tolist() == expected[:3]


def test_warm_rows_repeat_their_tokens_in_another_batch(rig) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, sampling_seed=77)
    alone, together = rig(), rig()
    alone.add(PROMPTS[0], params=params)
    together.add(PROMPTS[0], params=params)
    together.add(*PROMPTS[1:], first_row=2)
    first = [alone.step(chunks=[(1, 5)]).tokens[0]] + [alone.step(decode=[1]).tokens[0] for _ in range(6)]
    second = [together.step(chunks=[(row, len(PROMPTS[row - 1])) for row in (4, 1, 2, 3)]).tokens[1]]
    second += [together.step(decode=[3, 1, 4, 2]).tokens[1] for _ in range(6)]
    assert first == second


def test_stop_tokens_finish_on_the_device(rig, expected) -> None:
    r = rig()
    r.hand.add(1, PROMPTS[0], GREEDY, stops=(96, expected[0][1]))
    assert r.step(chunks=[(1, 5)]).finish.tolist() == [Finish.NONE]
    assert r.step(decode=[1]).finish.tolist() == [Finish.STOP]


class SpoiledModel:
    """Makes the logits of one line NaN."""

    def __init__(self, model: Decoder, line: int) -> None:
        self._model, self._line, self.forward = model, line, model.forward

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden).clone()
        logits[self._line] = torch.nan
        return logits


def test_a_row_of_nan_ends_alone(rig, model: Decoder, expected) -> None:
    r = rig(using=SpoiledModel(model, line=1))
    r.add(*PROMPTS[:3])
    result = r.step(chunks=[(row, len(PROMPTS[row - 1])) for row in (1, 2, 3)])
    assert result.finish.tolist() == [Finish.NONE, Finish.ERROR, Finish.NONE]
    assert result.tokens.tolist() == [expected[0][0], 0, expected[2][0]]


def test_logprobs_of_outputs_and_of_a_chunked_prompt(rig, model: Decoder, expected) -> None:
    r = rig()
    r.add(PROMPTS[3], PROMPTS[0])
    truth = torch.log_softmax(full_logits(model, PROMPTS[3]).double(), 1).numpy()
    r.step(chunks=[(2, 5)])
    # The chunk of positions 0..9 delivers positions 3..10, the last being the next chunk's first token.
    wanted = logprob_plan(prompt=[(0, 1, [4, 5], PROMPTS[3][3:11])])
    result = r.step(decode=[2], chunks=[(1, 10)], logprobs=replaced(wanted, prompt_start=i32([3])))
    found = result.prompt_logprobs
    assert found.index.tolist() == [0] * 8 and found.token_ids.tolist() == PROMPTS[3][3:11]
    np.testing.assert_allclose(found.logprobs, truth[np.arange(2, 10), PROMPTS[3][3:11]], atol=1e-4)
    np.testing.assert_array_equal(found.top_ids, truth[2:10].argmax(1))
    np.testing.assert_allclose(found.ids_logprobs.reshape(8, 2), truth[2:10][:, [4, 5]], atol=1e-4)
    wanted = logprob_plan([(1, 2, [8])], [(0, 0, [], PROMPTS[3][11:])])
    result = r.step(decode=[2], chunks=[(1, 6)], logprobs=replaced(wanted, prompt_start=i32([11])))
    found = result.prompt_logprobs
    np.testing.assert_allclose(found.logprobs, truth[np.arange(10, 15), PROMPTS[3][11:]], atol=1e-4)
    assert result.tokens.tolist() == [expected[0][2], expected[3][0]]
    assert result.logprobs.index.tolist() == [1]
    assert result.logprobs.token_ids.tolist() == [expected[3][0]]
    np.testing.assert_allclose(result.logprobs.logprobs, [truth[15].max()], atol=1e-4)
    np.testing.assert_allclose(result.logprobs.ids_logprobs, [truth[15][8]], atol=1e-4)
    assert result.logprobs.top_ids.tolist() == np.argsort(-truth[15])[:2].tolist()


@pytest.mark.parametrize("page_size, pages", [(1, 64), (4, 16), (16, 4), (64, 4)])
def test_grant_ring_holds_two_blocks_and_the_page_in_use(page_size: int, pages: int) -> None:
    config = SchedulerConfig(max_running_requests=1, context_length=8, grant_tokens=16)
    assert grant_ring(config, page_size) == pages


def test_a_ring_smaller_than_the_context_is_used_round_and_round(rig, model: Decoder) -> None:
    r = rig(page_size=1, grant_tokens=2)
    assert r.engine._rows.granted_pages.shape[1] == 8
    prompt = PROMPTS[1]
    r.add(prompt)
    got = [r.step(chunks=[(1, 1)]).tokens[0]] + [r.step(decode=[1]).tokens[0] for _ in range(38)]
    assert got == greedy(model, prompt, 39)


def test_build_engine_runs_a_dummy_model() -> None:
    built = build_engine(settings(4), progress=False)
    try:
        assert built.pool.num_pages == 6 * (CONTEXT // 4) + 1  # all rows at full context, and page 0
        assert set(built.phases) == {"load_weights", "kv_pool"}
        hand = HandScheduler(built.pool.num_pages, 4)
        hand.add(1, PROMPTS[0], GREEDY)
        assert built.engine.launch(hand.plan(chunks=[(1, 5)])).result().finish.tolist() == [Finish.NONE]
    finally:
        built.engine.close()


@pytest.mark.parametrize("device", ["null", "tpu", "cuda"])
def test_devices_that_are_not_there_are_refused(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    engine = msgspec.structs.replace(settings(4).engine, device=device)
    with pytest.raises(ConfigError, match=device):
        build_engine(settings(4, engine=engine), progress=False)


@pytest.mark.parametrize("max_rows", [1, 8, 9, 64, 65, 300, 4096, 5000, 8192])
def test_buckets_hold_every_batch_and_waste_little(max_rows: int) -> None:
    buckets = decode_buckets(max_rows)
    assert buckets == sorted(set(buckets)) and buckets[-1] == -(-max_rows // 8) * 8
    sizes = np.arange(1, max_rows + 1)
    padded = np.array([bucket_of(n, buckets) for n in sizes.tolist()])
    assert (padded >= sizes).all() and (padded % 8 == 0).all() and len(buckets) <= 60
    waste = (padded - sizes)[sizes > 64] / sizes[sizes > 64]
    assert max_rows < 128 or (waste.mean() < 0.08 and waste.max() < 0.25)
    assert power_of_two_buckets(max_rows)[-1] >= max_rows


@pytest.mark.parametrize("most_tokens", [1, 128, 500, 8192])
@pytest.mark.parametrize("max_rows", [1, 20, 300, 4096, 8192])
def test_mixed_shapes_hold_what_fits_them(max_rows: int, most_tokens: int) -> None:
    shapes = MixedShapes(decode_buckets(max_rows), free_tokens=900, most_tokens=most_tokens)
    known = shapes.all()
    assert len(known) == len(set(known)) <= 90
    sums = [shape.lanes + shape.tokens for shape in known]
    assert sums == sorted(sums, reverse=True)
    assert {shape.lanes for shape in known} <= set(decode_buckets(max_rows))
    assert max(shape.tokens for shape in known) >= min(most_tokens, 128)
    assert all(shape.tokens < max(2 * 512, 2 * most_tokens) for shape in known)  # none that no step needs
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        lens = rng.integers(1, int(rng.choice([2, 33, 600])), rng.integers(1, 100))
        lens = lens[np.cumsum(lens) <= most_tokens]
        num_decode = int(rng.integers(0, max_rows + 1))
        size = {"num_decode": num_decode, "num_tokens": int(lens.sum()), "num_chunks": len(lens)}
        shape = shapes.fit(**size)
        holding = [
            s for s in known if s.lanes >= num_decode and s.tokens >= lens.sum() and s.chunks >= len(lens)
        ]
        limit = max(900, 1.15 * (num_decode + int(lens.sum())))
        wanted = [s.lanes + s.tokens for s in holding if s.lanes + s.tokens <= limit]
        if shape is None:
            assert not wanted
        else:
            hits += 1
            assert shape in holding and shape.lanes + shape.tokens == min(wanted)
    assert hits > 0
    assert MixedShapes([], free_tokens=900, most_tokens=most_tokens).all() == []


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-0.6b"])
def test_the_seeds_arrivals_fit_a_captured_step(model: str) -> None:
    """4096 rows of which some 64 end in a step, and as many prompts of 1-32 tokens enter."""
    free = free_tokens(BUILTIN_CONFIGS[model], "bfloat16")
    shapes = MixedShapes(decode_buckets(4096), free_tokens=free, most_tokens=8192)
    for count in (40, 64, 90):
        found = shapes.fit(num_decode=4096 - count, num_tokens=16 * count, num_chunks=count)
        assert found is not None and found.lanes == 4096


def test_where_the_device_would_wait_for_the_host_steps_are_captured() -> None:
    """qwen3-0.6b takes 2 us a token and 18 ms to queue: any number of rows, beside arrivals as they come."""
    free = free_tokens(BUILTIN_CONFIGS["qwen3-0.6b"], "bfloat16")
    shapes = MixedShapes(decode_buckets(4096), free_tokens=free, most_tokens=8192)
    for num_decode in [0, 1, 100, 1000, 2283, 2950, 3073, 3841, 4096]:
        for lens in ([1], [1000], [4096], [16] * 64, [500] * 4, [2000, 3, 30]):
            size = {"num_decode": num_decode, "num_tokens": sum(lens), "num_chunks": len(lens)}
            shape = shapes.fit(**size)
            assert shape is not None and shape.lanes + shape.tokens <= free, size
    assert shapes.fit(num_decode=9, num_tokens=8192, num_chunks=2) is None
    assert shapes.fit(num_decode=9, num_tokens=1000, num_chunks=600) is None
    assert shapes.fit(num_decode=4097, num_tokens=1, num_chunks=1) is None


def test_tokens_that_are_free_follow_the_model() -> None:
    free = {name: free_tokens(config, "bfloat16") for name, config in BUILTIN_CONFIGS.items()}
    assert 768 <= free["llama-3-8b"] < 1200 < free["llama-3.2-1b"] < free["qwen3-0.6b"] < 12000
    assert free_tokens(BUILTIN_CONFIGS["qwen3-0.6b"], "float32") == 768
    untied = msgspec.structs.replace(BUILTIN_CONFIGS["qwen3-0.6b"], tie_word_embeddings=False)
    assert free_tokens(untied, "float16") == free["qwen3-0.6b"]  # an embedding is no product


def test_padded_arrays_keep_what_is_there_and_add_nothing_that_counts() -> None:
    hand = HandScheduler(40, 4)
    for row, prompt in ((1, PROMPTS[0]), (2, PROMPTS[2])):
        hand.add(row, prompt, GREEDY)
    plan = hand.plan(chunks=[(1, 5), (2, 9)])
    plain = plan_arrays(plan, 8)
    found = padded(plain, MixedShape(lanes=8, tokens=128, chunks=16))
    for name, array in plain.items():
        assert found[name][: len(array)].tolist() == array.tolist()
        rest = found[name][len(array) :]
        assert (rest == (14 if name == "chunk_indptr" else 0)).all() and found[name].dtype == array.dtype
    assert {name: len(array) for name, array in found.items()} == {
        **dict.fromkeys(("sample_rows", "num_generated", "logits_index"), 24),
        **dict.fromkeys(("input_ids", "positions", "slots", "token_rows"), 128),
        **dict.fromkeys(("chunk_rows", "chunk_starts", "chunk_ends"), 16),
        "chunk_indptr": 17,
    }


def test_upload_keeps_values_and_dtypes() -> None:
    arrays = {"a": i32([1, -2, 3]), "b": np.arange(5, dtype=np.int64)[::2], "c": i32([])}
    arrays["a"].flags.writeable = False
    whole, sent = upload(arrays, CPU)
    assert whole.dtype == torch.uint8 and sent["c"].data_ptr() < whole.data_ptr() + len(whole)
    assert whole[:12].view(torch.int32).tolist() == [1, -2, 3]
    assert {name: t.tolist() for name, t in sent.items()} == {"a": [1, -2, 3], "b": [0, 2, 4], "c": []}
    assert [sent[name].dtype for name in "abc"] == [torch.int32, torch.int64, torch.int32]


def test_null_engine_is_deterministic_and_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(null, "time", clock)
    paced = msgspec.structs.replace(settings(4).engine, null_step_ms=3.0)
    fast, slow = NullEngine(settings(4)), NullEngine(settings(4, engine=paced))
    hand = HandScheduler(40, 4)
    seeds = {1: 2**63 - 1, 2: 5, 3: 7}
    for row, seed in seeds.items():
        hand.add(row, PROMPTS[0], SamplingParams(temperature=0, sampling_seed=seed))
    wanted = logprob_plan([(0, 2, [8, 9]), (2, 0, [])], [(1, 1, [7], [9, 13])])
    plan = hand.plan(chunks=[(row, 5) for row in (1, 2, 3)], logprobs=wanted)
    result = fast.launch(plan).result()
    assert result.tokens.tolist() == fast.launch(plan).result().tokens.tolist()
    said = [null_token_ids(seed, 1, CONFIG.vocab_size)[0] for seed in seeds.values()]
    assert result.tokens.tolist() == said and len(set(said)) == 3
    assert result.tokens.min() >= CONFIG.vocab_size // 2 and result.tokens.max() < CONFIG.vocab_size
    assert result.finish.tolist() == [Finish.NONE] * 3
    assert result.logprobs.token_ids.tolist() == result.tokens[[0, 2]].tolist()
    assert result.logprobs.top_indptr.tolist() == [0, 1, 1] and result.logprobs.ids.tolist() == [8, 9]
    assert result.prompt_logprobs.token_ids.tolist() == [9, 13]
    assert result.prompt_logprobs.ids.tolist() == [7, 7]
    handle = slow.launch(plan)
    clock.now_s += 0.002
    assert not handle.done and handle.result().tokens.tolist() == result.tokens.tolist() and handle.done
    assert clock.now_s == pytest.approx(1000.003)


class Clock:
    """`time` that passes by sleeping alone."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_what_the_null_engine_says_is_known_by_seed_and_position() -> None:
    engine = NullEngine(settings(4))
    hand = HandScheduler(40, 4)
    said: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for row in said:
        hand.add(row, PROMPTS[0], SamplingParams(temperature=0, sampling_seed=1000 * row))
    plan = hand.plan(chunks=[(row, len(PROMPTS[0])) for row in said])
    for step in range(5):
        for row, token in zip(plan.sample_rows.tolist(), engine.launch(plan).result().tokens, strict=True):
            said[row].append(int(token))
        plan = hand.plan(decode=[3, 1] if step % 2 else [1, 2, 3])
    for row, ids in said.items():
        assert ids == null_token_ids(1000 * row, len(ids), CONFIG.vocab_size)
        assert all(a != b for a, b in itertools.pairwise(ids))
