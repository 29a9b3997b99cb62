from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.request import WORKER_SHIFT, EngineRequest, LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import StepOutputs, TokenLogprobs
from phalanx.messages import (
    Abort,
    Control,
    ControlReply,
    EngineReady,
    MessageError,
    Submit,
    decode,
    encode,
    split_outputs,
)

INT32 = st.integers(0, 2**31 - 1)
STREAM_IDS = st.integers(0, 3).flatmap(lambda w: st.integers(0, 2**20).map(lambda i: w << WORKER_SHIFT | i))


def assert_same(a, b):
    """Equality through dataclasses and arrays, dtypes included."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif dataclasses.is_dataclass(a):
        for f in dataclasses.fields(a):
            assert_same(getattr(a, f.name), getattr(b, f.name))
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def round_trip(message):
    return decode([bytes(frame) for frame in encode(message)])


@st.composite
def sampling_params(draw):
    return SamplingParams(
        max_new_tokens=draw(st.integers(0, 10**6)),
        temperature=draw(st.floats(0, 10)),
        top_k=draw(st.sampled_from([-1, 1, 50])),
        stop=tuple(draw(st.lists(st.text(min_size=1, max_size=5), max_size=3))),
        stop_token_ids=tuple(draw(st.lists(INT32, max_size=3))),
        logit_bias=draw(st.dictionaries(INT32, st.floats(-100, 100), max_size=3)),
        sampling_seed=draw(st.integers(-(2**63), 2**63 - 1)),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def requests(draw):
    logprobs = st.builds(
        LogprobParams,
        st.integers(-1, 9),
        st.integers(0, 9),
        st.lists(INT32, max_size=3).map(tuple),
    )
    return EngineRequest(
        stream_id=draw(STREAM_IDS),
        input_ids=np.array(draw(st.lists(INT32, min_size=1, max_size=9)), np.int32),
        sampling=draw(sampling_params()),
        stop_ids=tuple(draw(st.lists(INT32, max_size=3))),
        logprobs=draw(st.none() | logprobs),
    )


@st.composite
def token_logprobs(draw, num_streams):
    q = draw(st.integers(0, 6)) if num_streams else 0
    floats = st.floats(-50, 0, width=32)

    def column(values, n, dtype):
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    def csr():
        lens = draw(st.lists(st.integers(0, 3), min_size=q, max_size=q))
        indptr = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        return indptr, column(INT32, int(indptr[-1]), np.int32), column(floats, int(indptr[-1]), np.float32)

    index = column(st.integers(0, max(num_streams - 1, 0)), q, np.int32)
    return TokenLogprobs(index, column(INT32, q, np.int32), column(floats, q, np.float32), *csr(), *csr())


@st.composite
def step_outputs(draw):
    ids = draw(st.lists(STREAM_IDS, max_size=12, unique=True))
    n = len(ids)
    errors = st.tuples(STREAM_IDS, st.sampled_from([400, 503]), st.text(max_size=8))
    return StepOutputs(
        step_id=draw(st.integers(-1, 2**40)),
        stream_ids=np.array(ids, np.int64),
        tokens=np.array(draw(st.lists(st.integers(-1, 99), min_size=n, max_size=n)), np.int32),
        finish=np.array(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)), np.uint8),
        logprobs=draw(st.none() | token_logprobs(n)),
        prompt_logprobs=draw(st.none() | token_logprobs(n)),
        errors=tuple(draw(st.lists(errors, max_size=3))),
    )


@pytest.mark.fuzz
@given(st.lists(requests(), max_size=4))
def test_submit_survives(batch):
    message = Submit(tuple(batch))
    assert_same(round_trip(message), message)


@pytest.mark.fuzz
@given(step_outputs())
def test_outputs_survive(message):
    assert_same(round_trip(message), message)


@pytest.mark.parametrize(
    "message",
    [
        Abort(()),
        Abort((0, 3 << WORKER_SHIFT | 7, 2**63 - 1)),
        Control(2**40, "stats", {}),
        Control(1, "abort", {"rid": "é", "abort_all": False, "n": [1, 2.5, None]}),
        ControlReply(5, False, {"message": "busy"}),
        EngineReady({"pid": 12, "max_total_num_tokens": 4096, "nested": {"a": []}}),
        Submit(()),
    ],
)
def test_small_messages_survive(message):
    assert_same(round_trip(message), message)


@pytest.mark.fuzz
@given(st.lists(st.binary(max_size=64), max_size=6))
def test_garbage_is_refused_and_nothing_else(frames):
    with pytest.raises(MessageError):
        decode(frames)


@pytest.mark.fuzz
@given(step_outputs(), st.data())
def test_damaged_outputs_are_refused_or_still_whole(message, data):
    """A cut, doubled or missing frame must not give arrays that do not fit together."""
    frames = encode(message)
    victim = data.draw(st.integers(0, len(frames) - 1))
    damage = data.draw(st.sampled_from(["cut", "double", "drop", "longer"]))
    if damage == "drop":
        del frames[victim]
    else:
        frames[victim] = {
            "cut": frames[victim][: len(frames[victim]) // 2],
            "double": frames[victim] * 2,
            "longer": frames[victim] + b"\0" * 8,
        }[damage]
    try:
        result = decode(frames)
    except MessageError:
        return
    assert len(result.stream_ids) == len(result.tokens) == len(result.finish)
    for part in (result.logprobs, result.prompt_logprobs):
        if part is not None:
            assert len(part.index) == len(part.logprobs) == len(part.top_indptr) - 1
            assert part.top_indptr[-1] == len(part.top_ids) == len(part.top_logprobs)


def test_wrong_contents_are_refused():
    frames = encode(Submit((EngineRequest(1, np.array([1, 2], np.int32), SamplingParams()),)))
    for lens in ([3], [-1], [1], [2, 0]):
        with pytest.raises(MessageError):
            decode([frames[0], frames[1], np.array(lens, np.int64).tobytes(), frames[3]])
    with pytest.raises(MessageError):
        decode([msgspec.msgpack.encode({"type": "submit", "asks": [], "more": 1}), b"", b"", b""])
    with pytest.raises(MessageError):
        decode([b"\x81" * 100_000])
    with pytest.raises(MessageError):
        decode([])
    with pytest.raises(MessageError):
        encode("no message")
    floats = StepOutputs(0, np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(1, np.uint8))
    with pytest.raises(MessageError):
        encode(floats)


def test_arrays_may_be_strided_and_empty():
    wide = np.arange(8, dtype=np.int32)
    message = Submit((EngineRequest(1, wide[::2], SamplingParams()),))
    np.testing.assert_array_equal(round_trip(message).requests[0].input_ids, [0, 2, 4, 6])


@pytest.mark.fuzz
@given(step_outputs(), st.integers(1, 4))
def test_split_gives_each_worker_its_rows(message, num_workers):
    parts = dict(split_outputs(message, range(num_workers)))
    owners = [int(i) >> WORKER_SHIFT for i in message.stream_ids]
    for worker in range(num_workers):
        rows = [i for i, owner in enumerate(owners) if owner == worker]
        errors = tuple(e for e in message.errors if e[0] >> WORKER_SHIFT == worker)
        if not rows and not errors:
            assert worker not in parts
            continue
        part = parts[worker]
        assert part.step_id == message.step_id and part.errors == errors
        for name in ("stream_ids", "tokens", "finish"):
            np.testing.assert_array_equal(getattr(part, name), getattr(message, name)[rows])
        for name in ("logprobs", "prompt_logprobs"):
            assert logprob_rows(part, name) == [
                row for row in logprob_rows(message, name) if row[0] >> WORKER_SHIFT == worker
            ]


def logprob_rows(outputs, name):
    """Each position as plain values, its stream id first."""
    lp = getattr(outputs, name)
    rows = []
    for i in range(0 if lp is None else len(lp.index)):
        top = slice(lp.top_indptr[i], lp.top_indptr[i + 1])
        ids = slice(lp.ids_indptr[i], lp.ids_indptr[i + 1])
        rows.append(
            (
                int(outputs.stream_ids[lp.index[i]]),
                int(lp.token_ids[i]),
                float(lp.logprobs[i]),
                lp.top_ids[top].tolist(),
                lp.top_logprobs[top].tolist(),
                lp.ids[ids].tolist(),
                lp.ids_logprobs[ids].tolist(),
            )
        )
    return rows
