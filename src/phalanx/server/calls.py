"""From checked prompts to running streams: the part that the three generating routes share."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.errors import RequestError
from phalanx.core.request import LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.server.errors import renamed
from phalanx.server.logprobs import LogprobLog
from phalanx.server.response import Receive, Response, wait_disconnect
from phalanx.server.sessions import Call, Form, OutputStream
from phalanx.server.state import ApiWorker
from phalanx.text.output import TextStream

MAX_OUTPUTS = 1024  # SamplingParams.check allows no more for n


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt: its ids, and how `sampling.n` outputs of it are made. rid: None draws one."""

    input_ids: Sequence[int]
    sampling: SamplingParams
    logprobs: LogprobParams | None = None
    rid: str | None = None


def make_streams(
    worker: ApiWorker, call: Call, asks: Sequence[Ask], names: Mapping[str, str] | None = None
) -> None:
    """Settle every prompt and add its streams to the call; nothing is sent yet.

    names: what the client calls our parameters.

    Raises:
        RequestError: any prompt or parameter is wrong; the whole call is refused.
    """
    for ask in asks:
        try:
            if ask.sampling.stop and worker.detokenizer is None:
                raise RequestError("stop needs a tokenizer, and this server runs without one", param="stop")
            # An absurd n is refused by `settle`, which checks all parameters; its ids are not drawn first.
            stream_ids = worker.stream_ids(min(max(ask.sampling.n, 0), MAX_OUTPUTS))
            requests = worker.settler.settle(stream_ids, ask.input_ids, ask.sampling, ask.logprobs)
        except RequestError as error:
            raise renamed(error, names or {}) from None
        rid = ask.rid or uuid.uuid4().hex
        for i, request in enumerate(requests):
            call.streams.append(
                OutputStream(
                    call=call,
                    index=len(call.streams),
                    rid=rid if len(requests) == 1 else f"{rid}_{i}",
                    request=request,
                    text=TextStream(worker.detokenizer, ask.sampling),
                    logprobs=None if request.logprobs is None else LogprobLog(),
                )
            )


async def run_call(worker: ApiWorker, call: Call, receive: Receive) -> None:
    """Send the call to the engine and stay until it is answered or its client has gone."""
    worker.engine.require_alive()
    worker.dispatcher.register(call)
    worker.engine.submit([s.request for s in call.streams])
    try:
        await wait_disconnect(receive)
        await call.response.finished()
    finally:
        worker.dispatcher.drop(call)


def new_call(form: Form, response: Response, *, is_stream: bool) -> Call:
    """A call without streams."""
    return Call(form=form, response=response, is_stream=is_stream)
