"""`phalanx profile`: what it reads out of a trace, and a real run on the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import main
from phalanx.core.errors import ConfigError
from phalanx.microbench.named_ranges import PREFIX, named_ranges
from phalanx.microbench.profile import print_breakdown
from phalanx.microbench.step_trace import (
    GROUPS,
    Event,
    breakdown,
    busy,
    group_of_kernel,
    host_busy_ms,
    read_trace,
    self_times,
)


def kernel(start: float, dur: float, name: str, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "ts": start, "dur": dur, "name": name, "tid": 7}


def named(start: float, dur: float, name: str, thread: int = 1) -> dict[str, Any]:
    event = kernel(start, dur, PREFIX + name, "user_annotation")
    return {**event, "tid": thread}


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def device_step(start: float) -> list[dict[str, Any]]:
    """100 us, of which 10 us idle between steps and 5 us inside."""
    return [
        kernel(start, 5, "prepare_lanes"),
        kernel(start + 5, 40, "nvjet_sm90_tst_128x256"),
        kernel(start + 50, 20, "attend_rows"),
        kernel(start + 70, 10, "rope_heads"),
        kernel(start + 80, 5, "choose_tokens"),
        kernel(start + 88, 1, "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy"),
    ]


def test_a_step_on_the_device_by_kernel_names(tmp_path: Path) -> None:
    events = [event for i in range(5) for event in device_step(100.0 * i)]
    events.append(kernel(0, 500, PREFIX + "step", "gpu_user_annotation"))  # no work of its own
    for i in range(5):
        events += [
            named(100.0 * i, 60, "step"),
            named(100.0 * i + 1, 5, "plan"),
            named(100.0 * i + 10, 12, "launch"),
            named(100.0 * i + 11, 4, "upload"),
            named(100.0 * i + 30, 20, "read"),
            named(100.0 * i + 52, 6, "apply"),
        ]
    found = breakdown(*read_trace(write(tmp_path, events)))
    assert found.num_steps == 3
    assert found.step_ms == pytest.approx(0.1)
    want = {"gemm": 40, "attention": 20, "elementwise": 10, "sampling": 5, "prep": 5, "copies": 1, "idle": 19}
    assert found.groups_ms == pytest.approx({g: want.get(g, 0) / 1e3 for g in GROUPS})
    assert found.between_ms == pytest.approx(0.015)  # the copy counts as idle here
    host = {"plan": 5, "launch": 12, "upload": 4, "read": 20, "apply": 6, "other": 17}
    assert found.host_ms == pytest.approx({name: us / 1e3 for name, us in host.items()})
    assert host_busy_ms(found.host_ms) == pytest.approx(0.040)


def test_a_step_of_the_engines_thread_by_ranges(tmp_path: Path) -> None:
    events = []
    for i in range(4):
        start = 1000.0 * i
        events += [
            named(start, 900, "engine", 2),
            named(start + 10, 50, "upload", 2),
            named(start + 100, 500, "model", 2),
            named(start + 110, 200, "attention", 2),
            named(start + 400, 100, "activation", 2),
            named(start + 410, 60, "gemm", 2),
            named(start + 700, 100, "sampling", 2),
            named(start + 100, 300, "step", 1),
        ]
    found = breakdown(*read_trace(write(tmp_path, events)))
    assert (found.num_steps, found.step_ms) == (2, pytest.approx(1.0))
    want = {"prep": 50, "attention": 200, "gemm": 60, "elementwise": 40, "sampling": 100, "idle": 100}
    want["other"] = 200 + 250  # of "model" and "engine" themselves
    assert found.groups_ms == pytest.approx({g: want.get(g, 0) / 1e3 for g in GROUPS})
    assert found.names_ms["model"] == pytest.approx(0.2)


def test_a_trace_without_a_whole_step_is_refused(tmp_path: Path) -> None:
    for events in ([], device_step(0) + device_step(100), [named(0, 1, "engine"), named(2, 1, "engine")]):
        with pytest.raises(ConfigError, match="no whole step"):
            breakdown(*read_trace(write(tmp_path, events)))


def test_self_times_of_ranges_that_touch_and_nest() -> None:
    ranges = [Event(0, 10, "a", 1), Event(0, 4, "b", 1), Event(4, 10, "b", 1), Event(10, 12, "a", 1)]
    assert dict(self_times(ranges)) == {"a": 2, "b": 10}


def test_busy_counts_overlaps_once() -> None:
    assert busy([Event(0, 10, "x"), Event(2, 5, "x"), Event(8, 12, "x"), Event(20, 21, "x")]) == 13


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void cutlass::device_kernel<flashinfer::BatchPrefillWithPagedKVCacheKernel<...>>", "attention"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "gemm"),
        ("void splitKreduce_kernel<32, 16>", "gemm"),
        ("void at::native::index_elementwise_kernel<128, 4>", "prep"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor>", "other"),
        ("Memset (Device)", "copies"),
    ],
)
def test_group_of_kernel(name: str, group: str) -> None:
    assert group_of_kernel(name) == group


COMMAND = "profile --model tiny-llama --load-format dummy --device cpu --num-threads 1 --dtype float32"
QUICK = "--num-prompts 8 --steps 3 --warm-up-steps 1 --random-seed 0"


@pytest.mark.parametrize(
    "flags", ["", "--disable-overlap-schedule", "--random-output-len 2 --num-prompts 40"]
)
def test_profile_on_the_cpu(flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json.gz"
    flags += " --max-running-requests 8"
    assert main([*f"{COMMAND} {QUICK} {flags} --output".split(), str(path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] in (range(3, 6) if result["overlap"] else [4])
    assert result["running"] == 8 or ("output-len" in flags and 0 < result["running"] < 8)
    assert sum(result["groups_ms"].values()) == pytest.approx(result["step_ms"], rel=1e-3)
    for name in ("gemm", "attention", "sampling", "prep", "elementwise"):
        assert result["groups_ms"][name] > 0, name
    assert result["overlap"] == ("disable-overlap" not in flags)
    # Six steps. Running ahead, one more may end in the trace, and one of them after it; either leaves parts.
    _, ranges = read_trace(path)
    names = [event.name for event in ranges]
    for name in ("step", "plan", "launch", "read", "engine", "upload", "model", "head"):
        assert names.count(name) in (range(5, 8) if result["overlap"] else [6]), name
    assert names.count("step") == names.count("plan") == names.count("launch") == 6
    partial = names.count("attention") - 3 * names.count("model")  # two layers, and what they share
    assert partial in (range(-3, 7) if result["overlap"] else [0])
    engine = {event.thread for event in ranges if event.name == "engine"}
    assert len(engine) == 1 and engine != {event.thread for event in ranges if event.name == "plan"}


def test_the_hot_path_is_put_back_as_it_was() -> None:
    from phalanx.layers.linear import Linear
    from phalanx.models import decoder
    from phalanx.runtime.llm import LLM

    llm = LLM(
        "tiny-llama",
        load_format="dummy",
        device="cpu",
        skip_tokenizer_init=True,
        progress=False,
        max_total_tokens=64,
    )
    worker = llm._worker
    call, store, step = Linear.__call__, decoder.store_kv, worker.step
    with pytest.raises(RuntimeError), named_ranges(worker):
        assert Linear.__call__ is not call and worker.step != step
        raise RuntimeError
    assert Linear.__call__ is call and decoder.store_kv is store and worker.step == step
    for owner in (worker, worker.scheduler, worker._engine, worker._engine._batches):
        assert not {"step", "plan", "apply", "launch", "copy", "advance", "_run"} & vars(owner).keys()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--steps 0", "--steps must be at least 1"),
        ("--warm-up-steps -1", "--warm-up-steps must not be negative"),
        ("--random-range-ratio 2", "must be in [0, 1]"),
        ("--output trace.txt", "must end in .json"),
        ("--output /nowhere/trace.json", "no such folder"),
        ("--num-prompts 9 --max-running-requests 8", "8 decode at once"),
        ("--steps 4000", "pass the context of 4096"),
        ("--max-total-tokens 256", "but the pool holds 256"),
        ("--device null", "nothing to profile"),
        ("--random-output-len 1", "raise --num-prompts"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    flags: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [] if "--output" in flags else ["--output", str(tmp_path / "t.json")]
    assert main([*f"{COMMAND} {QUICK} {flags}".split(), *out]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("phalanx: error: ") and words in error


def test_shares_of_the_host_are_of_its_own_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU the host's thread is beside the engine's: its turn may be longer than the traced step."""
    result = {
        "model": "m",
        "running": 1,
        "device": "cpu",
        "steps": 1,
        "step_ms": 2.0,
        "untraced_step_ms": 2.0,
    }
    result |= {"groups_ms": {"other": 2.0}, "idle_between_steps_ms": 0.0, "names_ms": {}, "trace": "t"}
    host_ms = {"plan": 1.0, "launch": 2.0, "upload": 0.5, "read": 5.0}
    print_breakdown(result | {"host_ms": host_ms, "host_busy_ms": 3.0})
    host = capsys.readouterr().out.partition("the host in a step")[2]
    for share in ("12.5%", "25.0%", "6.2%", "62.5%", "37.5%"):
        assert share in host
    print_breakdown(result | {"host_ms": {}, "host_busy_ms": 0.0})
