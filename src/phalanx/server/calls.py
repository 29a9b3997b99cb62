"""From checked prompts to running streams: the part that the three generating routes share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from phalanx.core.errors import RequestError
from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.server.errors import renamed
from phalanx.server.logprobs import MAX_ENTRIES, LogprobLog, too_many
from phalanx.server.pace import Pace
from phalanx.server.response import Receive, Response, wait_disconnect
from phalanx.server.sessions import Call, Form, OutputStream
from phalanx.server.state import ApiWorker
from phalanx.server.texts import Ids, as_array
from phalanx.text.output import TextStream

MAX_OUTPUTS = 1024  # SamplingParams.check allows no more for n
MAX_SEQUENCES = 16384  # outputs of all prompts of one HTTP request
MAX_LOGPROBS = 2**18  # alternatives and asked-for ids per position, of all outputs of one HTTP request
MAX_RID_CHARS = 256
ANY_VOCAB = 2**31  # for checks of parameters where the vocabulary is not known
_SUBMIT_SLICE = 128  # sequences per message: with the largest logit_bias, some milliseconds of encoding


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt: its ids, and how `sampling.n` outputs of it are made.

    rid: None draws one. interval: tokens per chunk, None for the server's own number.
    """

    input_ids: Ids
    sampling: SamplingParams
    logprobs: LogprobParams | None = None
    rid: str | None = None
    interval: int | None = None


def possible_outputs(n: int | None) -> int:
    """How many outputs `n` asks for, but none for an absurd n, which `Settler.settle` refuses."""
    return 1 if n is None else min(max(n, 0), MAX_OUTPUTS)


def check_sequences(num_prompts: int, num_outputs: int, prompt_name: str) -> None:
    """Refuse a request that asks for more outputs, of all its prompts together, than one request may.

    Raises:
        RequestError: 400 with the numbers.
    """
    wanted = max(num_prompts, num_outputs)
    if wanted > MAX_SEQUENCES:
        name = "n" if num_outputs > num_prompts else prompt_name
        raise RequestError(
            f"{name}: {num_prompts} prompts ask for {wanted} outputs in all; one request may ask for "
            f"{MAX_SEQUENCES}",
            param=name,
            code="too_many_sequences",
        )


def check_rid(rid: str | None) -> None:
    """Refuse a request name that is too long: it stands in every event."""
    if rid is not None and len(rid) > MAX_RID_CHARS:
        raise RequestError(
            f"rid has {len(rid)} characters; at most {MAX_RID_CHARS} are allowed",
            param="rid",
            code="invalid_value",
        )


async def make_streams(
    worker: ApiWorker, call: Call, asks: Iterable[Ask], names: Mapping[str, str] | None = None
) -> None:
    """Settle every prompt and add its streams to the call, in slices; nothing is sent yet.

    names: what the client calls our parameters.

    Raises:
        RequestError: any prompt or parameter is wrong; the whole call is refused.
    """
    pace = Pace()
    num_logprobs = num_entries = 0
    for ask in asks:
        try:
            # An absurd n is refused by `settle`, which checks all parameters; its ids are not drawn first.
            stream_ids = worker.stream_ids(possible_outputs(ask.sampling.n))
            input_ids = await as_array(worker, ask.input_ids)
            requests = worker.settler.settle(stream_ids, input_ids, ask.sampling, ask.logprobs)
        except RequestError as error:
            raise renamed(error, names or {}) from None
        if ask.logprobs is not None:
            num_logprobs += len(requests) * (ask.logprobs.top_k + len(ask.logprobs.token_ids))
            _check_logprobs(num_logprobs)
            num_entries += sum(map(_certain_logprobs, requests))
            if num_entries > MAX_ENTRIES:
                raise too_many(num_entries)
        prompt_rid = ask.rid or uuid.uuid4().hex
        for i, request in enumerate(requests):
            rid = prompt_rid if len(requests) == 1 else f"{prompt_rid}_{i}"
            call.streams.append(
                OutputStream(
                    call=call,
                    index=len(call.streams),
                    rid=rid,
                    prompt_rid=prompt_rid,
                    # The engine sees to it that no two running ones share a name; drawn ones are unique.
                    request=request if ask.rid is None else replace(request, rid=rid),
                    text=TextStream(worker.detokenizer, ask.sampling),
                    logprobs=None if request.logprobs is None else LogprobLog(),
                    interval=ask.interval,
                )
            )
            await pace.breathe()


def _certain_logprobs(request: EngineRequest) -> int:
    """How many log-probabilities the request will have at least: those of its prompt."""
    wanted = request.logprobs
    if wanted is None or wanted.prompt_start < 0:
        return 0
    return (len(request.input_ids) - max(wanted.prompt_start, 1)) * (1 + wanted.top_k + len(wanted.token_ids))


def _check_logprobs(num_logprobs: int) -> None:
    if num_logprobs > MAX_LOGPROBS:
        raise RequestError(
            f"the request asks for {num_logprobs} or more log-probabilities per position, of all its outputs "
            f"together; at most {MAX_LOGPROBS} are allowed",
            code="too_many_logprobs",
        )


async def run_call(worker: ApiWorker, call: Call, receive: Receive) -> None:
    """Send the call to the engine and stay until it is answered or its client has gone."""
    worker.engine.require_alive()
    log = worker.request_log if call.is_logged else None
    if log is not None:
        log.received(call)
    worker.dispatcher.register(call)
    cause = "disconnect"
    try:
        await _submit(worker, call)
        await wait_disconnect(receive)
        await call.response.finished()
    except asyncio.CancelledError:
        cause = "timeout"  # nothing else cancels a call
        raise
    finally:
        if log is not None:
            log.ended(call)
        worker.dispatcher.drop(call, cause)


async def _submit(worker: ApiWorker, call: Call) -> None:
    """Send the sequences, a slice per turn of the event loop, and not those that have ended meanwhile."""
    for start in range(0, len(call.streams), _SUBMIT_SLICE):
        if start:
            await asyncio.sleep(0)
        streams = call.streams[start : start + _SUBMIT_SLICE]
        requests = [s.request for s in streams if worker.dispatcher.is_running(s)]
        if requests:
            worker.engine.submit(requests)


def new_call(form: Form, response: Response, *, is_stream: bool) -> Call:
    """A call without streams."""
    return Call(form=form, response=response, is_stream=is_stream)
