"""The figures of a run against a scripted server whose times are known.

A chunk cannot arrive before it was sent, which bounds every time from below; no time is longer than the run.
What does not depend on the clock (counts, shares of a gap, sums) is exact, unless the client stood still for
so long that two chunks came with one read: that run proves nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.sse_server import DONE, Reply, Step, chat_event, native_event, serving
from tests.e2e.test_bench_client import bench


def test_b53_tokens_of_a_chunk_share_its_gap(tmp_path: Path) -> None:
    steps = [
        Step(0, native_event("w1", 1)),
        Step(500, native_event("w1 w2 w3 w4 w5", 5)),
        Step(1000, native_event("w1 w2 w3 w4 w5 w6 w7 w8 w9", 9)),
        Step(1000, DONE),
    ]
    with serving(lambda path, body, nth: Reply(steps)) as server:
        _, result = bench(server, tmp_path, "--num-prompts", "1")
    assert (result["total_output_tokens"], result["output_len_sources"]["server"]) == (9, 1)
    ttft_ms, itls_ms = 1e3 * result["ttfts"][0], [1e3 * itl for itl in result["itls"][0]]
    if len(itls_ms) != 8:
        pytest.skip("the client stood still for half a second")
    assert itls_ms == [pytest.approx(itls_ms[0])] * 4 + [pytest.approx(itls_ms[4])] * 4
    assert 0 <= ttft_ms
    assert 1000 <= ttft_ms + sum(itls_ms) <= 1e3 * result["duration"] + 1e-6
    # The first chunk may have been read late, never early: the gaps are 500 ms each, less or more by that.
    assert 4 * itls_ms[0] >= 500 - ttft_ms
    assert result["mean_itl_ms"] == pytest.approx(sum(itls_ms) / 8)
    assert result["mean_ttft_ms"] == pytest.approx(ttft_ms)
    assert result["mean_e2e_latency_ms"] >= ttft_ms + sum(itls_ms) - 1e-6
    assert result["mean_tpot_ms"] == pytest.approx((result["mean_e2e_latency_ms"] - ttft_ms) / 8)


def test_b54_what_is_not_measured_is_left_out_and_counted(tmp_path: Path) -> None:
    """No text at all; one token; usage only; and one ordinary stream, whose figures are all there are."""
    role = chat_event({"role": "assistant", "content": ""})

    def usage(count: int) -> bytes:
        return (
            b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode() + b"\n\n"
        )

    replies = [
        [Step(0, role), Step(30, usage(0) + DONE)],
        [Step(0, role), Step(30, chat_event({"content": "w1"})), Step(60, usage(1) + DONE)],
        [Step(0, role), Step(30, usage(7) + DONE)],
        [
            Step(0, role),
            Step(100, chat_event({"content": "w1 "})),
            Step(600, chat_event({"content": "w2"})),
            Step(600, usage(2) + DONE),
        ],
    ]
    with serving(lambda path, body, nth: Reply(replies[nth])) as server:
        argv = ("--backend", "sglang-oai-chat", "--num-prompts", "4", "--max-concurrency", "1")
        _, result = bench(server, tmp_path, *argv)
    assert (result["completed"], result["total_output_tokens"]) == (4, 0 + 1 + 7 + 2)
    if result["streams_in_one_piece"]:
        pytest.skip("the client stood still for half a second")
    assert result["unmeasured"] == {"ttft": 2, "tpot": 3, "itl": 3}
    measured = sorted(1e3 * ttft for ttft in result["ttfts"] if ttft is not None)
    assert len(measured) == 2
    assert 30 <= measured[0]
    assert 100 <= measured[1]
    assert result["mean_ttft_ms"] == pytest.approx(sum(measured) / 2)
    assert [len(itls) for itls in result["itls"]].count(1) == 1
    # One value: its mean, percentiles and ends are the same, and no stream without text pulls them to 0.
    for figure in ("tpot", "itl"):
        values = {result[f"{name}_{figure}_ms"] for name in ("min", "mean", "median", "p99", "max")}
        assert len(values) == 1
    assert 600 <= result["max_ttft_ms"] + result["mean_itl_ms"] <= 1e3 * result["duration"] + 1e-6


def test_schedule_delay_is_from_due_to_sent(tmp_path: Path) -> None:
    """One place, answers of 60 ms: request n of a burst is due at 0 and sent 60 n ms later or more."""
    reply = Reply([Step(60, native_event("w1", 1)), Step(60, DONE)])
    with serving(lambda path, body, nth: reply) as server:
        _, result = bench(server, tmp_path, "--num-prompts", "5", "--max-concurrency", "1")
    assert 120 <= result["median_schedule_delay_ms"]
    assert 240 <= result["max_schedule_delay_ms"] <= 1e3 * result["duration"]
    assert (
        result["median_schedule_delay_ms"]
        <= result["p99_schedule_delay_ms"]
        <= result["max_schedule_delay_ms"]
    )
    # The slots are what it waited for; no latency holds that wait.
    assert 120 <= result["median_slot_wait_ms"] <= result["median_schedule_delay_ms"] + 1e-6
    assert result["duration"] * 1e3 >= 5 * 60
    mean_ms = result["mean_e2e_latency_ms"]
    assert 60 <= mean_ms <= 1e3 * result["duration"] / 5
    assert result["concurrency"] == pytest.approx(5 * mean_ms / 1e3 / result["duration"])
