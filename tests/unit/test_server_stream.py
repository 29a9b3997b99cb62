"""What streams say does not depend on how tokens come or how clients read: exact content by every way.

The dispatcher writes through Uvicorn's own cycle and flow control into a transport that a test can stop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from phalanx.core.request import EngineRequest
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepOutputs
from phalanx.microbench.front_check import split_answer
from phalanx.server import backlog
from phalanx.server import response as response_module
from phalanx.server.form_generate import GenerateForm
from phalanx.server.form_openai import ChatChoices, CompletionChoices, Envelope, OpenAIForm, UsageForm
from phalanx.server.logprobs import TokenTexts
from phalanx.server.response import Response
from phalanx.server.sessions import Call, OutputStream
from phalanx.server.stream import Dispatcher
from phalanx.server.worker_metrics import CAUSES, ENDS, WorkerMetrics
from phalanx.text.output import TextStream
from tests.unit import tiny_tokenizers

FAMILIES = {
    "byte_level": tiny_tokenizers.byte_level,
    "byte_fallback": tiny_tokenizers.byte_fallback,
    "metaspace": tiny_tokenizers.metaspace,
}
KINDS = ("chat", "completions", "incremental", "cumulative")


class FakeTransport:
    """Keeps what is written; while it is stopped, the first write fills its buffer."""

    def __init__(self):
        self.flow = FlowControl(self)
        self.written = b""
        self.num_writes = 0
        self.is_stopped = False
        self.is_aborted = False

    def write(self, data):
        self.written += data
        self.num_writes += 1
        if self.is_stopped:
            self.flow.pause_writing()

    def stop(self):
        self.is_stopped = True

    def go_on(self):
        self.is_stopped = False
        self.flow.resume_writing()

    def get_extra_info(self, name):
        return None

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True

    def close(self):
        self.is_aborted = True


def new_cycle(transport: FakeTransport) -> RequestResponseCycle:
    return RequestResponseCycle(
        scope={"type": "http", "method": "POST", "path": "/", "http_version": "1.1", "headers": []},
        transport=transport,
        flow=transport.flow,
        logger=logging.getLogger("test"),
        access_logger=logging.getLogger("test"),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )


def new_form(kind: str):
    if kind in ("incremental", "cumulative"):
        return GenerateForm(
            has_text=True,
            is_list=True,
            is_incremental=kind == "incremental",
            texts=None,
            with_prompt_ids=False,
        )
    texts = TokenTexts(None)
    if kind == "chat":
        return OpenAIForm(Envelope("chat.completion", "m"), ChatChoices(texts), UsageForm())
    return OpenAIForm(Envelope("text_completion", "m"), CompletionChoices(texts, prompts=None), UsageForm())


class Rig:
    """One call of several streams, and its dispatcher."""

    def __init__(self, tokenizer, kind, sampling, count, interval=1, own=None, first_id=100, dispatcher=None):
        self.transport = FakeTransport()
        self.aborted = []
        self.dispatcher = dispatcher or Dispatcher(abort=self.aborted.extend, stream_interval=interval)
        self.call = Call(
            form=new_form(kind), response=Response(new_cycle(self.transport).send), is_stream=True
        )
        detokenizer = tiny_tokenizers.detokenizer(tokenizer)
        for i in range(count):
            self.call.streams.append(
                OutputStream(
                    call=self.call,
                    index=i,
                    rid=f"r{i}",
                    prompt_rid="r",
                    request=EngineRequest(first_id + i, np.array([1, 2], np.int32), sampling),
                    text=TextStream(detokenizer, sampling),
                    interval=own,
                )
            )
        self.dispatcher.register(self.call)

    def step(self, rows):
        """rows: (stream number, token or -1, finish)."""
        numbers, tokens, finish = zip(*rows, strict=True)
        return StepOutputs(
            1,
            np.array(numbers, np.int64) + 100,
            np.array(tokens, np.int32),
            np.array(finish, np.uint8),
        )

    def items(self):
        """The events, decoded, without [DONE]; checks the HTTP chunks around them."""
        status, body = split_answer(self.transport.written)
        assert status == 200
        *events, rest = body.decode().split("\n\n")
        assert rest == "" and events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def said(kind, items, count):
    """(text, ids, finish reason) of each stream, joined from its events."""
    text, ids, reasons = [""] * count, [[] for _ in range(count)], [None] * count
    for item in items:
        if kind in ("chat", "completions"):
            (item,) = item["choices"]
            i = item["index"]
            assert reasons[i] is None
            text[i] += (item["delta"].get("content") or "") if kind == "chat" else item["text"]
            reasons[i] = item["finish_reason"]
            continue
        i = item["index"]
        assert reasons[i] is None
        if kind == "incremental":
            text[i] += item["text"]
            ids[i] += item["output_ids"]
        else:
            assert item["text"].startswith(text[i]) and item["output_ids"][: len(ids[i])] == ids[i]
            text[i], ids[i] = item["text"], item["output_ids"]
        assert item["meta_info"]["completion_tokens"] == len(ids[i])
        reason = item["meta_info"]["finish_reason"]
        reasons[i] = reason and reason["type"]
    return list(zip(text, ids, reasons, strict=True))


def reference(tokenizer, sampling, tokens):
    """What one stream must say: its tokens one by one, LENGTH with the last."""
    stream = TextStream(tiny_tokenizers.detokenizer(tokenizer), sampling)
    for i, token in enumerate(tokens):
        stream.push([token], Finish.LENGTH if i == len(tokens) - 1 else Finish.NONE)
    return stream.output_text, stream.output_ids, stream.finish_reason.kind


async def play(rig, tokens, plan):
    """Tell the tokens, all streams in each step; plan: (steps that come at once, what the client does)."""
    longest = max(map(len, tokens))
    steps = []
    for position in range(longest):
        rows = []
        for number, ids in enumerate(tokens):
            if position < len(ids):
                rows.append(
                    (number, ids[position], Finish.LENGTH if position == len(ids) - 1 else Finish.NONE)
                )
        steps.append(rig.step(rows))
    plan = iter(plan)
    while steps:
        size, act = next(plan, (1, "read"))
        if act == "stop":
            rig.transport.stop()
        elif act in ("resume", "read"):  # resume: tokens come before the write that waited could end
            rig.transport.go_on()
            if act == "read":
                await asyncio.sleep(0)
        rig.dispatcher.on_outputs(steps[:size])
        del steps[:size]
        if act == "turn":
            await asyncio.sleep(0)
    rig.transport.go_on()
    for _ in range(20 + 2 * len(tokens)):
        await asyncio.sleep(0)


@pytest.mark.fuzz
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_content_is_exact_by_every_way(family, data):
    """Any tokens, half characters too; any steps at once; any reading; n, interval and stop strings."""
    tokenizer = FAMILIES[family]()
    kind = data.draw(st.sampled_from(KINDS))
    count = data.draw(st.integers(1, 4))
    interval = data.draw(st.sampled_from([1, 1, 2, 5]))
    stops = data.draw(st.sampled_from([(), (), ("e",), ("zzz", " t", "世")]))
    sampling = SamplingParams(n=count, stop=stops, skip_special_tokens=data.draw(st.booleans()))
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    tokens = data.draw(st.lists(st.lists(any_id, min_size=1, max_size=24), min_size=count, max_size=count))
    plan = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([1, 1, 1, 2, 5]), st.sampled_from(["go", "stop", "resume", "read", "turn"])
            ),
            max_size=24,
        )
    )

    async def scenario():
        server, own = (interval, None) if data.draw(st.booleans()) else (7, interval)
        rig = Rig(tokenizer, kind, sampling, count, server, own)
        await play(rig, tokens, plan)
        return rig

    rig = asyncio.run(scenario())
    items = rig.items()
    wanted = [reference(tokenizer, sampling, ids) for ids in tokens]
    got = said(kind, items, count)
    if kind in ("chat", "completions"):
        assert [(text, reason) for text, _, reason in got] == [(text, reason) for text, _, reason in wanted]
    else:
        assert got == wanted
    assert rig.dispatcher.num_streams == 0
    # What a stop string ended here is ended in the engine too, and nothing else.
    stopped = {100 + i for i, (_, _, reason) in enumerate(wanted) if reason == "stop"}
    assert set(rig.aborted) <= stopped
    if kind == "incremental":
        assert rig.dispatcher.num_events == len(items)
        joined = sum(max(len(item["output_ids"]) - 1, 0) for item in items)
        assert rig.dispatcher.num_coalesced == joined


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_overtake_the_write_that_waits(kind):
    """The buffer is empty again, but the event that waited for it is not written yet."""
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.encode("one two three four five six")[:6]

    async def scenario():
        rig = Rig(tokenizer, kind, SamplingParams(), 1)
        acts = ["go", "stop", "go", "resume", "go", "read"]
        await play(rig, [ids], [(1, act) for act in acts])
        return rig

    text, _, reason = said(kind, asyncio.run(scenario()).items(), 1)[0]
    assert (text, reason) == (tokenizer.decode(ids), "length")


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_way_writes_what_the_general_way_writes(kind, monkeypatch):
    """Byte for byte, but for the ids and times that are drawn anew."""
    tokenizer = tiny_tokenizers.byte_level()
    tokens = [tokenizer.encode('"quoted" \\ 世界 👩 and\nlines') + tokenizer.encode("plain words go on")] * 2

    async def scenario(has_lane):
        rig = Rig(tokenizer, kind, SamplingParams(n=2), 2)
        if not has_lane:
            rig.call.response.connection = None
        await play(rig, tokens, [])
        assert (rig.call.streams == []) or all((s.lane is not None) == has_lane for s in rig.call.streams)
        return rig

    quick, general = asyncio.run(scenario(True)), asyncio.run(scenario(False))

    def plain(item):
        for key in ("id", "created"):
            item.pop(key, None)
        item.get("meta_info", {}).pop("e2e_latency", None)
        return json.dumps(item)

    assert [plain(i) for i in quick.items()] == [plain(i) for i in general.items()]
    assert quick.transport.num_writes == general.transport.num_writes
    assert quick.dispatcher.num_events == general.dispatcher.num_events
    assert quick.dispatcher.num_coalesced == general.dispatcher.num_coalesced == 0


@pytest.mark.parametrize(("server", "own"), [(2, None), (5, None), (1, 3), (4, 1)])
def test_interval_bounds_the_tokens_of_a_chunk(server, own):
    """The server's, or the request's own."""
    interval = own or server
    tokenizer = tiny_tokenizers.byte_level()
    tokens = [tokenizer.encode("the quick brown fox jumps over the lazy dog")]

    async def scenario():
        rig = Rig(tokenizer, "incremental", SamplingParams(), 1, server, own)
        await play(rig, tokens, [])
        return rig

    rig = asyncio.run(scenario())
    sizes = [len(item["output_ids"]) for item in rig.items()]
    assert sum(sizes) == len(tokens[0]) and sizes[0] == 1
    assert set(sizes[1:-1]) == {interval} and 1 <= sizes[-1] <= interval
    assert rig.dispatcher.num_coalesced == sum(sizes) - len(sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_are_not_streamed(family):
    """Their tokens are gathered one by one and in batches; the last ones are half a character."""
    tokenizer = FAMILIES[family]()
    tokens = [tokenizer.encode("some words, 世界 and more")[: 20 - i] for i in range(3)]

    async def scenario(plan):
        rig = Rig(tokenizer, "incremental", SamplingParams(n=3), 3)
        rig.call.is_stream = False
        rig.dispatcher.register(rig.call)
        await play(rig, tokens, plan)
        assert rig.dispatcher.num_events == rig.dispatcher.num_coalesced == 0
        return json.loads(split_answer(rig.transport.written)[1])

    for plan in ([], [(4, "go")] * 9):
        items = asyncio.run(scenario(plan))
        got = [(i["text"], i["output_ids"], i["meta_info"]["finish_reason"]["type"]) for i in items]
        assert got == [reference(tokenizer, SamplingParams(n=3), ids) for ids in tokens]


def test_steps_are_joined_in_order_and_not_all_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    steps, wanted = [], {}
    for _ in range(20):
        ids = rng.permutation(9)[: rng.integers(0, 9)] * 2**40
        tokens = rng.integers(-1, 50, len(ids))
        for stream_id, token in zip(ids.tolist(), tokens.tolist(), strict=True):
            wanted.setdefault(stream_id, []).extend([token] if token >= 0 else [])
        steps.append(StepOutputs(1, ids, tokens.astype(np.int32), np.zeros(len(ids), np.uint8)))
    steps[-1].finish[:] = Finish.LENGTH
    ended = set(steps[-1].stream_ids.tolist())
    joined = {i: (ids, flag) for i, ids, flag in backlog.joined(steps)}
    assert {i: ids for i, (ids, _) in joined.items()} == wanted
    assert {i for i, (_, flag) in joined.items() if flag == Finish.LENGTH} == ended
    assert list(backlog.joined([empty_step()] * 2)) == []

    monkeypatch.setattr(backlog, "MAX_JOINED", 10)
    waiting = backlog.Backlog()
    waiting.add(steps)
    taken = []
    while waiting:
        taken.append(waiting.take())
    assert [step for part in taken for step in part] == steps
    assert all(sum(len(s.tokens) for s in part) <= 10 or len(part) == 1 for part in taken) and len(taken) > 3


def empty_step():
    return StepOutputs(1, np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))


def test_a_slow_reader_coalesces_and_holds_up_nobody():
    """While its buffer is full its tokens are kept; another call's come at once; then it gets all in one."""
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.encode("words that one client reads and the other does not, for a long time")

    async def scenario():
        slow = Rig(tokenizer, "incremental", SamplingParams(), 1)
        slow.transport.stop()
        for token in ids[:-1]:
            slow.dispatcher.on_outputs([slow.step([(0, token, Finish.NONE)])])
        before = slow.transport.num_writes
        assert slow.call.response.blocked and before < 5
        assert len(slow.call.waiting) == 1
        slow.transport.go_on()
        for _ in range(5):
            await asyncio.sleep(0)
        slow.dispatcher.on_outputs([slow.step([(0, ids[-1], Finish.LENGTH)])])
        return slow

    slow = asyncio.run(scenario())
    items = slow.items()
    assert said("incremental", items, 1)[0] == (tokenizer.decode(ids), ids, "length")
    assert len(items) < 6 and slow.dispatcher.num_coalesced >= len(ids) - 6


def test_a_reader_that_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(response_module, "STALL_S", 0.01)
    tokenizer = tiny_tokenizers.byte_level()

    async def scenario():
        rig = Rig(tokenizer, "chat", SamplingParams(), 1)
        rig.transport.stop()
        for token in tokenizer.encode("some words"):
            rig.dispatcher.on_outputs([rig.step([(0, token, Finish.NONE)])])
        assert rig.call.response.blocked and not rig.transport.is_aborted
        await asyncio.wait_for(rig.call.response.finished(), 120)
        assert rig.transport.is_aborted and rig.call.response.stalled and rig.call.response.ended
        written = rig.transport.written
        rig.dispatcher.on_outputs([rig.step([(0, 5, Finish.NONE)])])
        assert rig.transport.written == written
        rig.dispatcher.drop(rig.call)  # what the route does when the connection is lost
        assert rig.aborted == [100] and rig.dispatcher.num_stalled == 1 and rig.dispatcher.num_streams == 0

    asyncio.run(scenario())


def test_the_rest_of_a_whole_answer_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(response_module, "STALL_S", 0.01)

    async def scenario():
        transport = FakeTransport()
        transport.stop()
        response = Response(new_cycle(transport).send)
        response.write_whole(200, b"{}")
        await asyncio.wait_for(response.finished(), 120)
        assert transport.is_aborted and response.stalled

    asyncio.run(scenario())


def test_a_lane_that_fails_ends_its_stream_alone(caplog):
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.encode("a few words")

    async def scenario():
        good = Rig(tokenizer, "incremental", SamplingParams(), 1)
        bad = Rig(tokenizer, "chat", SamplingParams(), 1, first_id=500, dispatcher=good.dispatcher)
        for token in ids[:2]:
            rows = [(0, token, Finish.NONE), (400, token, Finish.NONE)]
            good.dispatcher.on_outputs([good.step(rows)])
        lane = bad.call.streams[0].lane

        class Broken:
            def write(self, token):
                raise RuntimeError("broken")

        assert lane is not None
        bad.call.streams[0].lane = Broken()
        for i, token in enumerate(ids[2:], 3):
            finish = Finish.LENGTH if i == len(ids) else Finish.NONE
            good.dispatcher.on_outputs([good.step([(400, token, Finish.NONE), (0, token, finish)])])
        assert good.aborted == [500]
        return good, bad

    good, bad = asyncio.run(scenario())
    assert said("incremental", good.items(), 1)[0] == (tokenizer.decode(ids), ids, "length")
    assert b"internal error" in bad.transport.written and b"[DONE]" not in bad.transport.written


LOST = (503, "the API worker did not answer for too long")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_the_engine_made_for_want_of_a_worker_is_an_error(kind, is_stream):
    """Not a success with less text; and what the engine has counted is not counted again as a pause."""
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.encode("words that were said")

    async def scenario(is_joined):
        metrics = WorkerMetrics()
        rig = Rig(
            tokenizer,
            kind,
            SamplingParams(),
            1,
            dispatcher=Dispatcher(abort=lambda ids: None, metrics=metrics),
        )
        rig.call.is_stream = is_stream
        tokens = [rig.step([(0, token, Finish.NONE)]) for token in ids[:3]]
        end = replace(rig.step([(0, -1, Finish.ABORT)]), errors=((100, *LOST),))
        for steps in [[*tokens, end]] if is_joined else [[step] for step in (*tokens, end)]:
            rig.dispatcher.on_outputs(steps)
        metrics.publish()
        return rig, metrics.snapshot()

    for is_joined in (False, True):
        rig, figures = asyncio.run(scenario(is_joined))
        written = rig.transport.written
        if is_stream and not is_joined:
            assert written.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" not in written and b'"code":503' in written and b'"retryable":true' in written
            assert b'"abort"' not in written
        else:
            assert written.startswith(b"HTTP/1.1 503")
        assert LOST[1].encode() in written
        assert dict(zip(ENDS, figures["ends"][0], strict=True)) == dict.fromkeys(ENDS, 0) | {"error": 1}
        assert figures["causes"].sum() == 0


def test_an_abort_of_the_engine_without_an_error_is_a_pause():
    tokenizer = tiny_tokenizers.byte_level()
    (token,) = tokenizer.encode("x")
    metrics = WorkerMetrics()

    async def scenario():
        rig = Rig(
            tokenizer,
            "incremental",
            SamplingParams(stop=("x",)),
            2,
            dispatcher=Dispatcher(abort=lambda ids: None, metrics=metrics),
        )
        # One has reached its stop string before it is told of the pause: it was not aborted.
        steps = [
            rig.step([(0, token, Finish.NONE)]),
            rig.step([(0, -1, Finish.ABORT), (1, -1, Finish.ABORT)]),
        ]
        rig.dispatcher.on_outputs(steps)
        return said("incremental", rig.items(), 2)

    assert [reason for _, _, reason in asyncio.run(scenario())] == ["stop", "abort"]
    metrics.publish()
    figures = metrics.snapshot()
    assert dict(zip(CAUSES, figures["causes"][0], strict=True)) == dict.fromkeys(CAUSES, 0) | {"pause": 1}


def test_a_stop_string_that_came_with_a_failure_is_a_whole_answer():
    tokenizer = tiny_tokenizers.byte_level()

    async def scenario():
        rig = Rig(tokenizer, "completions", SamplingParams(stop=("x",)), 1)
        tokens = [rig.step([(0, token, Finish.NONE)]) for c in "ax" for token in tokenizer.encode(c)]
        end = replace(rig.step([(0, -1, Finish.ABORT)]), errors=((100, *LOST),))
        rig.dispatcher.on_outputs([*tokens, end])
        return said("completions", rig.items(), 1)

    assert asyncio.run(scenario()) == [("a", [], "stop")]
