"""EngineClient: what cannot be sent fails by itself; everything else is sent, in order."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.messages import Abort, Submit, encode
from phalanx.server.engine_client import EngineClient


class Channel:
    """A worker's end that encodes, as the real one does."""

    worker_id = 0

    def __init__(self):
        self.sent = []

    def send(self, message):
        encode(message)
        self.sent.append(message)

    def attach(self, loop, callback):
        pass

    def close(self):
        pass


GOOD = SamplingParams(max_new_tokens=1, sampling_seed=0)
TOO_WIDE = msgspec.structs.replace(GOOD, top_k=2**70)
SURROGATE = msgspec.structs.replace(GOOD, stop=("a\ud800",))
OURS = msgspec.structs.replace(GOOD, min_p=object())


def request(stream_id, sampling=GOOD, ids=None):
    logprobs = None if ids is None else LogprobParams(token_ids=ids)
    return EngineRequest(stream_id, np.array([1], np.int32), sampling, logprobs=logprobs)


def flush(submits=(), aborts=()):
    """What one turn of the event loop sends, and the failures it tells of."""
    channel, failed = Channel(), []

    async def scenario():
        client = EngineClient(
            channel,
            on_outputs=lambda steps: None,
            on_death=lambda reason: None,
            on_unsent=lambda *failure: failed.append(failure),
            on_control=lambda message: None,
            on_ready=lambda info: None,
        )
        client.start()
        for requests in submits:
            client.submit(requests)
        client.abort(list(aborts))
        await asyncio.sleep(0)
        client.close()

    asyncio.run(scenario())
    return channel.sent, failed


def test_requests_of_one_turn_go_as_one_message_and_aborts_follow():
    sent, failed = flush([[request(1)], [request(2), request(3)]], aborts=[2])
    assert [type(m) for m in sent] == [Submit, Abort] and not failed
    assert [r.stream_id for r in sent[0].requests] == [1, 2, 3] and sent[1].stream_ids == (2,)


@pytest.mark.parametrize("bad", [TOO_WIDE, SURROGATE], ids=["int", "text"])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_request_that_cannot_be_encoded_fails_alone(bad, place):
    requests = [request(i, bad if i == place else GOOD) for i in range(7)]
    sent, failed = flush([requests[:2], requests[2:]], aborts=[5])
    assert [r.stream_id for m in sent[:-1] for r in m.requests] == [i for i in range(7) if i != place]
    assert sent[-1] == Abort((5,))
    ((stream_id, status, message),) = failed
    assert (stream_id, status) == (place, 400) and "cannot be sent" in message


def test_aborts_are_sent_when_nothing_else_can_be():
    sent, failed = flush([[request(i, TOO_WIDE) for i in range(3)]], aborts=[9])
    assert sent == [Abort((9,))] and [f[:2] for f in failed] == [(0, 400), (1, 400), (2, 400)]


def test_a_fault_of_this_side_is_a_500():
    sent, failed = flush([[request(1), request(2, OURS)]])
    assert [r.stream_id for r in sent[0].requests] == [1]
    assert failed == [(2, 500, "internal error")]
