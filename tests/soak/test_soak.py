"""Ten minutes of mixed load against a real server: `make soak`. Minutes come from PHALANX_SOAK_MINUTES.

Streams, plain requests, chats, aborts, disconnects and bad input, all at once. Afterwards: no failure but
those provoked, the KV accounting exact, resident memory flat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.serving import Server, running

MINUTES = float(os.environ.get("PHALANX_SOAK_MINUTES", "10"))
CLIENTS = 24
GROWTH_MB = 64  # allocator noise of three processes; a leak of one KB per request would show at this rate


async def _plain(client: httpx.AsyncClient, rng: random.Random) -> None:
    params = {"max_new_tokens": rng.randrange(1, 64), "temperature": rng.choice([0, 0.7])}
    reply = await client.post(
        "/generate", json={"text": "Tell me " * rng.randrange(1, 20), "sampling_params": params}
    )
    assert reply.status_code == 200, reply.text


async def _stream(client: httpx.AsyncClient, rng: random.Random, leave_after: int | None) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Count " * rng.randrange(1, 9)}],
        "stream": True,
        "max_tokens": rng.randrange(8, 96),
    }
    events = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        last = ""
        async for line in reply.aiter_lines():
            last = line or last
            events += bool(line)
            if leave_after is not None and events > leave_after:
                return
    assert last == "data: [DONE]", last


async def _bad(client: httpx.AsyncClient, rng: random.Random) -> None:
    bodies = [
        {"text": ""},
        {"input_ids": [10**9]},
        {"text": "x", "sampling_params": {"temperature": "hot"}},
        {"text": "x" * 200_000},
        {"nothing": True},
    ]
    reply = await client.post("/generate", json=rng.choice(bodies))
    assert 400 <= reply.status_code < 500, reply.text


async def _client(url: str, seed: int, until: float, done: list[int]) -> None:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while time.monotonic() < until:
            kind = rng.random()
            if kind < 0.4:
                await _plain(client, rng)
            elif kind < 0.7:
                await _stream(client, rng, None)
            elif kind < 0.9:
                with contextlib.suppress(httpx.StreamClosed):
                    await _stream(client, rng, rng.randrange(0, 10))
            else:
                await _bad(client, rng)
            done[0] += 1


def _resident_mb(server: Server) -> dict[str, float]:
    return {
        " ".join(p.cmdline()[2:3]): p.memory_info().rss / 2**20
        for p in [psutil.Process(server.process.pid), *server.children()]
    }


async def _fill(url: str) -> None:
    """Use every page of the pool at once: its memory is taken when a page is first written."""
    params = {"max_new_tokens": 40, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        bodies = [{"input_ids": [5 + i] * 1990, "sampling_params": params} for i in range(8)]
        replies = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
    assert [reply.status_code for reply in replies] == [200] * 8


async def _load(url: str, seconds: float, seed: int) -> int:
    done = [0]
    until = time.monotonic() + seconds
    await asyncio.gather(*(_client(url, seed * 1000 + i, until, done) for i in range(CLIENTS)))
    return done[0]


@pytest.mark.slow
def test_soak(tmp_path: Path) -> None:
    with running(tmp_path / "log", "--max-total-tokens", "16384", "--context-length", "2048") as server:
        asyncio.run(_fill(server.url))
        asyncio.run(_load(server.url, 60 * MINUTES * 0.2, seed=1))  # caches fill, allocators settle
        server.assert_live()
        before = _resident_mb(server)
        count = asyncio.run(_load(server.url, 60 * MINUTES * 0.8, seed=2))
        server.assert_live()
        after = _resident_mb(server)
        log = (tmp_path / "log").read_text()
    print(f"\nsoak: {count} requests in {MINUTES * 0.8:.1f} min; resident MB before {before}, after {after}")
    assert "Traceback" not in log
    for name, mb in after.items():
        assert mb - before[name] < GROWTH_MB, f"{name} grew by {mb - before[name]:.0f} MB"
