"""Long work gives way to other clients, and what it gives is the same as in one piece."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from phalanx.core.errors import RequestError
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish, StepOutputs
from phalanx.messages import Abort, EngineReady, Submit
from phalanx.server import calls, pace, state, stream, texts
from phalanx.server.calls import Ask, make_streams, new_call, run_call
from phalanx.server.form_generate import GenerateForm
from phalanx.server.response import Response
from phalanx.server.state import build_api_worker
from phalanx.text.tokenizer import load_tokenizer
from tests.e2e.server_harness import EOS, make_settings, sse_events, write_byte_tokenizer
from tests.inproc_channel import InprocChannel


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(write_byte_tokenizer(tmp_path_factory.mktemp("tok"))), vocab_size=260)


class Rig:
    """A worker without HTTP: the test is its client and its engine."""

    def __init__(self, tokenizer):
        self.channel = InprocChannel()
        self.worker = build_api_worker(make_settings("x"), 0, self.channel.workers[0], tokenizer)
        self.sent = []
        self.gone = asyncio.Event()
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def start(self):
        self.worker.engine.start()
        self.channel.engine.send(0, EngineReady())
        while not self.worker.engine.is_ready:
            await asyncio.sleep(0)

    async def send(self, message):
        await self.is_open.wait() if not self.is_open.is_set() else None
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.gone.set()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self):
        return b"".join(m.get("body", b"") for m in self.sent)

    async def call(self, count, *, is_stream=False, **sampling):
        form = GenerateForm(
            has_text=True, is_list=True, is_incremental=True, texts=None, with_prompt_ids=False
        )
        call = new_call(form, Response(self.send), is_stream=is_stream)
        params = SamplingParams(**sampling)
        await make_streams(self.worker, call, (Ask([1 + i % 200], params) for i in range(count)))
        return call

    async def submitted(self, count):
        """Until so many sequences have come to the engine; the messages."""
        messages = []
        while sum(len(message.requests) for message in messages) < count:
            await asyncio.sleep(0)
            messages += self.messages()
        return messages

    def messages(self):
        return [message for _, message in self.channel.engine.recv(0)]

    def tell(self, call, tokens, finish=Finish.NONE):
        """One step in which every stream of the call gets its next token."""
        count = len(call.streams)
        ids = np.array([s.stream_id for s in call.streams], np.int64)
        row = np.array(tokens, np.int32) if isinstance(tokens, list) else np.full(count, tokens, np.int32)
        return StepOutputs(1, ids, row, np.full(count, finish, np.uint8))


def run(scenario, tokenizer):
    async def main():
        rig = Rig(tokenizer)
        await rig.start()
        try:
            await scenario(rig)
        finally:
            rig.worker.close()

    asyncio.run(main())


class Turns:
    """Counts turns of the event loop while something else is awaited."""

    def __init__(self):
        self.count = 0

    async def __aenter__(self):
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        self.count = 0
        return self

    async def _tick(self):
        while True:
            self.count += 1
            await asyncio.sleep(0)

    async def __aexit__(self, *error):
        self._task.cancel()


@pytest.mark.parametrize(("count", "n"), [(40, 1), (2, 20)])
def test_streams_are_made_in_slices(tokenizer, monkeypatch, count, n):
    monkeypatch.setattr(pace, "_SLICE_S", 0.0)

    async def scenario(rig):
        async with Turns() as turns:
            call = await rig.call(count, n=n, logit_bias={i: 1.0 for i in range(200)})
        assert len(call.streams) == 40 and turns.count >= 40

    run(scenario, tokenizer)


def test_submissions_go_in_slices_and_what_ended_meanwhile_is_left_out(tokenizer):
    count = 3 * calls._SUBMIT_SLICE + 5

    async def scenario(rig):
        call = await rig.call(count)
        task = asyncio.create_task(run_call(rig.worker, call, rig.receive))
        messages = []
        while not messages:
            await asyncio.sleep(0)
            messages += rig.messages()
        # The client's sequences are ended while most of them have not been sent.
        for number in (1, count - 1):
            rig.worker.dispatcher.fail(call.streams[number].stream_id, 503, "no")
        ids = [s.stream_id for s in call.streams]
        for _ in range(10):
            await asyncio.sleep(0)
        messages += rig.messages()
        assert [len(m.requests) for m in messages] == [calls._SUBMIT_SLICE] * 3 + [4]
        assert [r.stream_id for m in messages for r in m.requests] == ids[:-1]
        rig.gone.set()
        await task
        await asyncio.sleep(0)
        (abort,) = rig.messages()
        assert isinstance(abort, Abort) and set(abort.stream_ids) == {*ids} - {ids[1], ids[-1]}

    run(scenario, tokenizer)


@pytest.mark.parametrize("count", [3, stream._MANY_STREAMS + 1])
def test_whole_answers_are_the_same_in_slices(tokenizer, monkeypatch, count):
    monkeypatch.setattr(pace, "_SLICE_S", 0.0)

    async def scenario(rig):
        call = await rig.call(count)
        task = asyncio.create_task(run_call(rig.worker, call, rig.receive))
        await rig.submitted(count)
        rig.worker.dispatcher.on_outputs([rig.tell(call, [97 + i % 26 for i in range(count)])])
        rig.worker.dispatcher.on_outputs([rig.tell(call, 98, Finish.LENGTH)])
        async with Turns() as turns:
            await task
        items = json.loads(rig.body)
        assert [item["text"] for item in items] == [chr(97 + i % 26) + "b" for i in range(count)]
        assert count < 100 or turns.count >= count

    run(scenario, tokenizer)


def test_an_answer_in_slices_ends_with_its_client(tokenizer, monkeypatch):
    monkeypatch.setattr(pace, "_SLICE_S", 0.0)

    async def scenario(rig):
        call = await rig.call(stream._MANY_STREAMS + 1)
        task = asyncio.create_task(run_call(rig.worker, call, rig.receive))
        await rig.submitted(len(call.streams))
        rig.worker.dispatcher.on_outputs([rig.tell(call, 98, Finish.LENGTH)])
        while call.answering is None:
            await asyncio.sleep(0)
        answering = call.answering
        rig.gone.set()
        await task
        await asyncio.wait([answering])
        assert answering.cancelled() and rig.sent == []

    run(scenario, tokenizer)


def test_steps_that_come_while_others_are_worked_on_are_joined_in_order(tokenizer, monkeypatch):
    """Slices of one stream each: no token is lost or out of order, and the loop runs in between."""
    monkeypatch.setattr(stream, "_SLICE_S", 0.0)
    count, num_steps = 5, 12

    async def scenario(rig):
        call = await rig.call(count, is_stream=True)
        task = asyncio.create_task(run_call(rig.worker, call, rig.receive))
        assert isinstance((await rig.submitted(count))[0], Submit)
        for step in range(num_steps):
            finish = Finish.LENGTH if step == num_steps - 1 else Finish.NONE
            rig.worker.dispatcher.on_outputs([rig.tell(call, 97 + step, finish)])
        assert len(rig.sent) == 2, "all of it was written in one turn"
        await task
        *events, done = sse_events(rig.body.decode())
        assert done == "[DONE]" and len(events) < count * num_steps
        for index in range(count):
            mine = [e for e in events if e["index"] == index]
            assert "".join(e["text"] for e in mine) == "abcdefghijkl"
            assert mine[-1]["meta_info"]["finish_reason"]["type"] == "length"

    run(scenario, tokenizer)


def test_what_came_before_the_engines_death_is_told(tokenizer, monkeypatch):
    monkeypatch.setattr(stream, "_SLICE_S", 0.0)

    async def scenario(rig):
        call = await rig.call(4, is_stream=True)
        task = asyncio.create_task(run_call(rig.worker, call, rig.receive))
        await rig.submitted(4)
        rig.worker.dispatcher.on_outputs([rig.tell(call, 97)])
        rig.worker.dispatcher.fail_all(503, "dead")
        await task
        events = sse_events(rig.body.decode())
        assert [e["index"] for e in events if "text" in e] == [0, 1, 2, 3]
        assert [e["error"]["message"] for e in events if "error" in e] == ["dead"] * 4

    run(scenario, tokenizer)


def test_a_slow_reader_of_many_streams_gets_them_in_batches(tokenizer):
    count = 2 * stream._MANY_STREAMS + 3

    async def scenario(rig):
        call = await rig.call(count, is_stream=True)
        task = asyncio.create_task(run_call(rig.worker, call, rig.receive))
        await rig.submitted(count)
        rig.is_open.clear()
        for token, finish in ((97, Finish.NONE), (98, Finish.NONE), (99, Finish.LENGTH)):
            rig.worker.dispatcher.on_outputs([rig.tell(call, token, finish)])
        for _ in range(1000):
            await asyncio.sleep(0)
        assert rig.sent == []
        rig.is_open.set()
        await task
        bodies = [m["body"] for m in rig.sent[1:]]
        assert [b.count(b"data: ") for b in bodies] == [1, 128, 128, 3 + 1]
        assert [m["more_body"] for m in rig.sent[1:]] == [True, True, True, False]
        *events, done = sse_events(rig.body.decode())
        assert done == "[DONE]"
        for index in range(count):
            assert "".join(e["text"] for e in events if e["index"] == index) == "abc"

    run(scenario, tokenizer)


# ---- texts


def test_texts_are_encoded_in_slices(tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "_SLICE_SIZE", 5)
    monkeypatch.setattr(texts, "_SLICE_ITEMS", 3)
    batches = []
    original = type(tokenizer).encode_batch

    def spy(self, batch, **options):
        batches.append(list(batch))
        return original(self, batch, **options)

    monkeypatch.setattr(type(tokenizer), "encode_batch", spy)
    words = ["ab", "c", "", "d", "0123456789", "ef", "ghi", "j"]

    async def scenario(rig):
        assert await texts.encode_texts(rig.worker, words) == [list(w.encode()) for w in words]
        assert await texts.encode_texts(rig.worker, []) == []

    run(scenario, tokenizer)
    assert batches == [["ab", "c", ""], ["d"], ["0123456789"], ["ef", "ghi"], ["j"]]


def test_too_many_big_requests_at_once_are_refused(tokenizer, monkeypatch):
    """What waits for the side process is bounded in bytes; what comes after it is served again."""
    monkeypatch.setattr(state, "MAX_WAITING_BYTES", 8 * 2**20)
    release = threading.Event()

    def stuck(job):
        release.wait(600)
        return job(tokenizer)

    async def scenario(rig):
        monkeypatch.setattr(rig.worker.side, "call", stuck)
        size = 3 * 2**20
        asked = [asyncio.create_task(rig.worker.prepare(size, lambda _: "big")) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="too many big requests") as caught:
            await rig.worker.prepare(size, lambda _: 0)
        assert caught.value.status == 503
        assert await rig.worker.prepare(100, lambda _: "small") == "small"
        release.set()
        await asyncio.gather(*asked)
        assert await rig.worker.prepare(size, lambda _: "again") == "again"
        assert rig.worker.num_side_bytes == 0

    run(scenario, tokenizer)


@pytest.mark.parametrize("skip", [True, False])
def test_ids_are_decoded_in_slices(tokenizer, monkeypatch, skip):
    """A list longer than a slice, cut in the middle of characters, is the text of all of it."""
    monkeypatch.setattr(texts, "_SLICE_SIZE", 4)
    lists = [[97], [], [*"né 世界👍".encode(), EOS, 98, 0xF0, 0x9F], [98, EOS]]

    async def scenario(rig):
        expected = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists]
        assert await texts.decode_ids(rig.worker, lists, skip_special_tokens=skip) == expected
        for bad in (-1, 260):
            with pytest.raises(RequestError, match=f"id {bad} "):
                await texts.decode_ids(rig.worker, [[1], [1, bad, 2]], skip_special_tokens=skip)

    run(scenario, tokenizer)


@pytest.mark.parametrize("bad", [None, [1, 2], 1.5, "x", -1, 260, 2**70, True], ids=lambda bad: str(bad)[:8])
def test_long_prompts_are_checked_as_short_ones_are(tokenizer, monkeypatch, bad):
    """Converted in slices, a prompt with a wrong value is refused as it is without."""
    monkeypatch.setattr(texts, "_SLICE_SIZE", 4)

    def outcome(settler, ids):
        try:
            return settler.check_prompt(ids).tolist()
        except RequestError as error:
            return str(error)

    async def scenario(rig):
        settler = rig.worker.settler
        good = list(range(11))
        array = await texts.as_array(rig.worker, good)
        assert isinstance(array, np.ndarray) and outcome(settler, array) == good
        assert await texts.as_array(rig.worker, good[:4]) == good[:4]
        too_long = [1] * settler.context_length
        assert await texts.as_array(rig.worker, too_long) is too_long
        for place in (0, 5, 10):
            ids = [*good[:place], bad, *good[place:]]
            converted = await texts.as_array(rig.worker, ids)
            assert outcome(settler, converted) == outcome(settler, ids)

    run(scenario, tokenizer)
