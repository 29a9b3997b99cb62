"""Log-probabilities without end: a request may not fill the worker's memory, nor repeat megabytes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from phalanx.core.request import EngineRequest, LogprobParams
from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish
from phalanx.server import calls, stream
from phalanx.server.logprobs import LogprobLog
from tests.e2e.fake_engine import token_logprobs
from tests.unit import tiny_tokenizers
from tests.unit.test_server_stream import Rig

WANTED = LogprobParams(top_k=3, token_ids=(4,))  # 5 entries per position, the chosen one included
KINDS = ("chat", "completions", "incremental", "cumulative")


def rig_of(kind: str, count: int) -> Rig:
    rig = Rig(tiny_tokenizers.byte_level(), kind, SamplingParams(max_new_tokens=None), count)
    for one in rig.call.streams:
        one.request = replace(one.request, logprobs=WANTED)
        one.logprobs = LogprobLog()
    return rig


def tell(rig: Rig, position: int, finish: int = Finish.NONE) -> None:
    """One token for each stream, with its log-probabilities."""
    rows = [(i, 65 + position % 26, finish) for i in range(len(rig.call.streams))]
    wanted = [(i, token, rig.call.streams[i].request) for i, token, _ in rows]
    rig.dispatcher.on_outputs([replace(rig.step(rows), logprobs=token_logprobs(wanted))])


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_with_too_many_is_ended_with_an_error(kind, monkeypatch):
    monkeypatch.setattr(stream, "MAX_ENTRIES", 99)

    async def run() -> Rig:
        rig = rig_of(kind, 2)
        for position in range(9):
            tell(rig, position)
        assert rig.aborted == [] and rig.dispatcher.num_streams == 2
        tell(rig, 9)  # too much with the second stream; where the other may go on, it has no more either
        tell(rig, 10)
        await asyncio.sleep(0)
        return rig

    rig = asyncio.run(run())
    assert sorted(rig.aborted) == [100, 101] and rig.dispatcher.num_streams == 0
    assert rig.call.response.ended
    assert b"at most 2097152 are allowed" in rig.transport.written


@pytest.mark.parametrize("kind", KINDS)
def test_events_that_repeat_them_carry_more_tokens_the_more_there_are(kind, monkeypatch):
    monkeypatch.setattr(stream, "_ENTRIES_PER_TOKEN", 20)
    repeats = kind in ("incremental", "cumulative")

    async def run() -> Rig:
        rig = rig_of(kind, 1)
        for position in range(40):
            tell(rig, position, Finish.LENGTH if position == 39 else Finish.NONE)
        await asyncio.sleep(0)
        return rig

    rig = asyncio.run(run())
    items = rig.items()
    if not repeats:
        assert len(items) >= 40
        return
    counts = [item["meta_info"]["completion_tokens"] for item in items]
    # 5 entries per token: at k tokens the event needs 5k / 20 new ones.
    assert all(
        new >= (before + new) * 5 // 20 for before, new in zip(counts, np.diff(counts)[:-1], strict=False)
    )
    assert counts[:4] == [1, 2, 3, 4] and counts[-1] == 40 and len(counts) < 16
    told = [item["meta_info"]["output_token_logprobs"] for item in items]
    all_told = told[-1] if kind == "cumulative" else [one for part in told for one in part]
    assert [one[1] for one in all_told] == [65 + i % 26 for i in range(40)]


def test_what_the_prompt_alone_will_have_is_counted_before_it_runs():
    def count(start: int) -> int:
        params = LogprobParams(prompt_start=start, top_k=3, token_ids=(4,))
        ids = np.arange(10, dtype=np.int32)
        return calls._certain_logprobs(EngineRequest(1, ids, SamplingParams(), logprobs=params))

    assert [count(start) for start in (-1, 0, 1, 2, 9)] == [0, 45, 45, 40, 5]
