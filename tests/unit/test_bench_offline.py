"""`phalanx bench offline` with the null engine: what it reports, and what it refuses."""

from __future__ import annotations

import argparse
import json

import pytest

from phalanx.core.errors import ConfigError
from phalanx.microbench import offline

FLAGS = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "null", "--context-length", "256"]


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    return parser.parse_args([*FLAGS, *flags])


def test_the_last_line_tells_throughput_and_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("--num-prompts", "40", "--random-output-len", "30", "--repeats", "2")
    assert offline.run(args) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    prompts, lens = offline.draw_workload(40, 32, 30, 0.0, 512, 42)
    assert result["num_prompts"] == 40 and len(result["durations_s"]) == 2
    assert result["input_tokens"] == sum(map(len, prompts)) and result["output_tokens"] == sum(lens)
    between = result["host_time_between_steps_ms"]
    assert 0 < between["mean"] and 0 < between["p99"]
    assert result["kv_indices_backend"] is None
    assert "host time between decode steps, P99 (ms)" in printed


def test_without_a_decode_step_there_is_no_time_between_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert offline.run(parse("--num-prompts", "3", "--random-output-len", "1")) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["host_time_between_steps_ms"] == {"mean": None, "p99": None}
    assert printed.count("n/a") == 2


def test_lengths_are_drawn_in_their_range() -> None:
    prompts, lens = offline.draw_workload(500, 8, 6, 0.5, 10, 1)
    assert {len(p) for p in prompts} == {4, 5, 6, 7, 8} and set(lens) == {3, 4, 5, 6}
    assert all(0 <= p.min() and p.max() < 10 for p in prompts)


@pytest.mark.parametrize("flags", [("--num-prompts", "0"), ("--repeats", "0"), ("--random-range-ratio", "2")])
def test_wrong_numbers_are_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        offline.run(parse(*flags))
