"""The load client over several processes, and the options around a run, against a scripted server."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from phalanx.bench.backends import Flavor
from phalanx.bench.errors import BenchError
from phalanx.bench.fleet import Load, RunRecord, run_fleet, settle_num_processes
from phalanx.bench.slots import SlotPool
from phalanx.bench.target import make_target
from tests.e2e.server_harness import PATIENCE_S, wait_until
from tests.e2e.sse_server import DONE, Reply, Respond, Server, Step, native_event, serving, steady
from tests.e2e.test_bench_client import bench

HERE = Path(__file__).parent


def run(
    respond: Respond,
    count: int,
    num_processes: int,
    max_concurrency: int | None = None,
    arrivals: np.ndarray | None = None,
) -> RunRecord:
    """Send `count` requests whose body tells their number."""
    with serving(respond) as server:
        return run_at(server, count, num_processes, max_concurrency, arrivals)


def run_at(
    server: Server,
    count: int,
    num_processes: int,
    max_concurrency: int | None = None,
    arrivals: np.ndarray | None = None,
) -> RunRecord:
    target = make_target(server.url, "", 0, [])
    wires = [target.wire_request("/generate", json.dumps({"number": i}).encode()) for i in range(count)]
    due = np.zeros(count) if arrivals is None else arrivals
    return run_fleet(Load(target, wires, due, max_concurrency, Flavor.NATIVE, True), num_processes)


def named(body: dict, **reply: int) -> Reply:
    """An answer whose text is the request's number."""
    return Reply([Step(0, native_event(f"n{body['number']}", 1)), Step(0, DONE)], **reply)


def peak(record: RunRecord, rows: range) -> int:
    """Most of these requests in flight at one instant."""
    spans = [record.outcomes[i] for i in rows]
    edges = sorted([(o.start, 1) for o in spans] + [(o.end, -1) for o in spans])
    return int(np.cumsum([change for _, change in edges]).max())


# ---- dealing and joining


@pytest.mark.parametrize("num_processes", [1, 3])
def test_answers_come_back_in_the_order_of_the_requests(num_processes: int) -> None:
    record = run(lambda path, body, nth: named(body), 20, num_processes)
    assert [outcome.failure for outcome in record.outcomes] == [None] * 20
    assert [outcome.text for outcome in record.outcomes] == [f"n{i}" for i in range(20)]
    assert [outcome.index for outcome in record.outcomes] == list(range(20))
    shares = [process.num_requests for process in record.processes]
    assert shares == ([20] if num_processes == 1 else [7, 7, 6])
    assert sum(process.num_bytes for process in record.processes) > 0
    assert np.all(record.sent >= record.due) and np.all(record.due >= record.began)


def test_arrivals_are_kept_over_all_processes() -> None:
    arrivals = np.asarray([0.0, 0.05, 0.1, 0.1, 0.15, 0.3])
    record = run(lambda path, body, nth: named(body), 6, 2, arrivals=arrivals)
    # One start for both processes: due times are exactly the asked ones.
    assert (record.due - record.began).tolist() == pytest.approx(arrivals.tolist(), abs=1e-9)
    assert np.all(record.sent >= record.due)
    assert [outcome.failure for outcome in record.outcomes] == [None] * 6


# ---- --max-concurrency over processes


def test_the_cap_holds_over_all_processes() -> None:
    # The first five are answered when all of them are there.
    reply = dataclasses.replace(steady(2, 10), hold=5)
    record = run(lambda path, body, nth: reply, 40, 3, max_concurrency=5)
    assert [outcome.failure for outcome in record.outcomes] == [None] * 40
    assert peak(record, range(40)) == 5
    assert sum(process.num_connections for process in record.processes) <= 40


def test_a_place_never_idles_while_another_process_waits() -> None:
    """Process 0 gets the four slow requests: they must all run at once on four places, two of them its own.

    The server answers none of them before all seven requests have come, so an even split of the places would
    hang here.
    """

    def respond(path: str, body: dict, nth: int) -> Reply:
        return named(body, hold=7 if body["number"] % 2 == 0 else 0)

    record = run(respond, 7, 2, max_concurrency=4)
    assert [outcome.failure for outcome in record.outcomes] == [None] * 7
    assert peak(record, range(0, 7, 2)) == 4
    assert peak(record, range(7)) == 4


def test_late_arrivals_take_places_from_the_pool() -> None:
    # One place in all; requests of both processes arrive in turn and use it one after another.
    arrivals = np.linspace(0.0, 0.2, 8)
    record = run(lambda path, body, nth: steady(2, 15), 8, 2, max_concurrency=1, arrivals=arrivals)
    assert [outcome.failure for outcome in record.outcomes] == [None] * 8
    assert peak(record, range(8)) == 1
    assert record.slot_waits.max() > 0


def test_the_pool_is_as_large_as_asked_and_no_larger() -> None:
    pool = SlotPool(3)
    assert [pool.take() for _ in range(4)] == [True, True, True, False]
    pool.give()
    assert [pool.take(), pool.take()] == [True, False]
    pool.close()
    with pytest.raises(BenchError, match="65536 at most"):
        SlotPool(70_000)


@pytest.mark.parametrize(
    ("asked", "num_requests", "cap", "expected"),
    [(None, 100, None, 1), (None, 1_000_000, 64, 1), (3, 10, None, 3), (8, 5, None, 5), (1, 9, 4, 1)],
)
def test_number_of_processes(asked: int | None, num_requests: int, cap: int | None, expected: int) -> None:
    assert settle_num_processes(asked, num_requests, cap) == expected


def test_auto_takes_a_process_per_1024_streams_and_half_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert settle_num_processes(None, 5000, None) == 5
    assert settle_num_processes(None, 100_000, 2048) == 2
    assert settle_num_processes(None, 100_000, None) == 8


def test_8192_streams_at_once_complete() -> None:
    """Nobody is answered before all have asked, so all of them are open at one instant."""
    if 0 < resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 8300:
        pytest.skip("the hard limit of file descriptors is too low")
    command = [sys.executable, str(HERE / "sse_server.py"), "--num-tokens", "2", "--interval-ms", "1"]
    with subprocess.Popen(
        [*command, "--hold", "8192"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        target = make_target(None, "127.0.0.1", int(server.stdout.readline()), [])
        wires = [target.wire_request("/generate", b"{}")] * 8192
        record = run_fleet(Load(target, wires, np.zeros(8192), None, Flavor.NATIVE, True), 2)
        server.communicate("")
    assert Counter(outcome.failure for outcome in record.outcomes) == {None: 8192}
    assert peak(record, range(8192)) == 8192
    assert [process.num_connections for process in record.processes] == [4096, 4096]


# ---- what can go wrong


def test_a_client_process_that_dies_ends_the_run() -> None:
    def kill_one(path: str, body: dict, nth: int) -> Reply:
        if nth == 0:
            child = multiprocessing.active_children()[0]
            threading.Thread(target=os.kill, args=(child.pid, signal.SIGKILL)).start()
        return Reply([Step(60_000, DONE)])

    with pytest.raises(BenchError, match=r"client process \d died \(exit code -9\)") as caught:
        run(kill_one, 4, 2)
    assert caught.value.exit_code == 1
    assert multiprocessing.active_children() == []


def test_too_few_descriptors_in_a_child_are_told_before_the_run(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "sse_server.py"), "--num-tokens", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = f"ulimit -n 200 && exec {sys.executable} -m phalanx.bench_serving --port {port}"
        client += " --dataset-name random --num-prompts 600 --random-input-len 4 --random-output-len 1"
        client += f" --tokenizer tiny-llama --client-processes 2 --output-file {tmp_path / 'o'}"
        done = subprocess.run(["bash", "-c", client], capture_output=True, text=True, timeout=PATIENCE_S)
        server.communicate("")
    assert done.returncode == 1
    assert "300 connections need 364 file descriptors, but the hard limit is 200" in done.stderr
    assert not (tmp_path / "o").exists()


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with serving(lambda path, body, nth: Reply([Step(600_000, DONE)])) as server:
        command = [sys.executable, "-m", "phalanx.bench_serving", "--base-url", server.url]
        command += ["--dataset-name", "random", "--num-prompts", "4", "--random-input-len", "4"]
        command += ["--random-output-len", "4", "--tokenizer", "tiny-llama", "--warmup-requests", "0"]
        command += ["--client-processes", "2", "--output-file", str(tmp_path / "o")]
        parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: len(server.requests) == 4, "the requests")
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.kill()
        parent.wait()
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []


# ---- the whole run


def test_two_processes_give_the_same_totals_as_one(tmp_path: Path) -> None:
    results = []
    for number in ("1", "2"):
        with serving(lambda path, body, nth: dataclasses.replace(steady(3, 1), hold=8)) as server:
            argv = ["--num-prompts", "30", "--max-concurrency", "8", "--client-processes", number]
            results.append(bench(server, tmp_path, *argv)[1])
    one, two = results
    for name in ("completed", "total_output_tokens", "total_input_tokens", "output_lens", "input_lens"):
        assert one[name] == two[name], name
    assert [len(one["client_processes"]), len(two["client_processes"])] == [1, 2]
    assert two["peak_requests_in_flight"] == 8
    assert sum(process["num_requests"] for process in two["client_processes"]) == 30


def test_steady_state_and_figures_over_time_are_in_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda path, body, nth: steady(4, 10)) as server:
        _, result = bench(server, tmp_path, "--num-prompts", "60", "--max-concurrency", "6", "--plot")
    window = result["steady_state"]
    assert window["rule"] == "in flight"
    assert 0 < window["begin_s"] < window["end_s"] < result["duration"]
    assert 0 < window["mean_in_flight"] <= 6.0
    assert result["in_flight"]["max"] == 6
    series = result["series"]
    width = result["duration"] / len(series["t_s"])
    assert sum(series["output_tokens_per_s"]) * width == pytest.approx(240, rel=1e-3)
    assert [len(values) for values in result["quantiles_ms"].values()] == [101] * 4
    out = capsys.readouterr().out
    assert "Detected by:                             in flight" in out
    assert "\noutput tok/s\n" in out
    assert json.loads(out.splitlines()[-1])["completed"] == 60


def test_profile_routes_frame_the_load(tmp_path: Path) -> None:
    with serving(lambda path, body, nth: steady(1, 0)) as server:
        argv = ["--num-prompts", "3", "--profile", "--profile-activities", "GPU", "--profile-prefix", "p"]
        bench(server, tmp_path, *argv, "--profile-output-dir", "/traces")
    paths = [path for path, _ in server.requests]
    assert paths == ["/start_profile", "/generate", "/generate", "/generate", "/stop_profile"]
    body = server.requests[0][1]
    folder = body.pop("output_dir")
    assert body == {"activities": ["GPU"], "profile_by_stage": False, "profile_prefix": "p"}
    assert folder.startswith("/traces/")
    with serving(lambda path, body, nth: steady(1, 0)) as server:
        bench(server, tmp_path, "--num-prompts", "1", "--profile", "--profile-num-steps", "5")
    assert [path for path, _ in server.requests] == ["/start_profile", "/generate"]


@pytest.mark.parametrize("refused", ["/start_profile", "/stop_profile"])
def test_a_profile_that_fails_costs_the_profile_not_the_run(
    tmp_path: Path, refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(path: str, body: dict, nth: int) -> Reply:
        if path == refused:
            return Reply([Step(0, b"not built")], status=501, framing="length")
        return steady(2, 0)

    with serving(respond) as server:
        code, result = bench(server, tmp_path, "--num-prompts", "3", "--profile")
    problem = f"--profile: {server.url}{refused} answered 501: not built"
    assert (code, result["completed"], result["profile_problems"]) == (0, 3, [problem])
    captured = capsys.readouterr()
    assert f"Warning: {problem}" in captured.err
    assert "Successful requests:                     3 " in captured.out
    # What was never started is not stopped.
    paths = [path for path, _ in server.requests]
    assert ("/stop_profile" in paths) == (refused == "/stop_profile")


def test_figures_of_the_server_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda path, body, nth: steady(1, 0)) as server:
        bench(server, tmp_path, "--num-prompts", "1")
        assert "host time" not in capsys.readouterr().out
        server.info |= {
            "host_time_between_steps_ms": {"mean": 0.25, "p99": 1.5},
            "kv_indices_backend": "fused",
        }
        _, result = bench(server, tmp_path, "--num-prompts", "1")
    assert result["host_time_between_steps_ms"] == {"mean": 0.25, "p99": 1.5}
    assert result["kv_indices_backend"] == "fused"
    rows = [line.split(":") for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[1].strip() for row in rows if len(row) == 2}
    assert shown["Mean host time between steps (ms)"] == "0.25"
    assert shown["P99 host time between steps (ms)"] == "1.50"
    assert shown["KV-indices backend"] == "fused"


def test_sampling_fields_are_sent(tmp_path: Path) -> None:
    argv = ["--num-prompts", "1", "--top-k", "7", "--min-p", "0.1", "--presence-penalty", "0.5"]
    with serving(lambda path, body, nth: steady(1, 0)) as server:
        bench(server, tmp_path, *argv, "--return-logprob", "--top-logprobs-num", "2")
    body = server.requests[0][1]
    sampling = body["sampling_params"]
    assert (sampling["top_k"], sampling["min_p"], sampling["presence_penalty"]) == (7, 0.1, 0.5)
    assert "frequency_penalty" not in sampling
    assert (body["return_logprob"], body["top_logprobs_num"], body["logprob_start_len"]) == (True, 2, -1)


def test_server_metrics_are_sampled(tmp_path: Path) -> None:
    with serving(lambda path, body, nth: steady(2, 10)) as server:
        with pytest.raises(BenchError, match="does not tell running and queued"):
            bench(server, tmp_path, "--num-prompts", "2", "--server-metrics")
        server.gauges = (3, 1)
        _, result = bench(server, tmp_path, "--num-prompts", "2", "--server-metrics")
    samples = result["server_metrics"]
    assert samples["running"][0] == 3 and samples["queued"][0] == 1
    assert len(samples["t_s"]) == len(samples["running"]) == len(samples["queued"]) >= 1


def test_no_secret_header_value_is_written(tmp_path: Path) -> None:
    with serving(lambda path, body, nth: steady(1, 0)) as server:
        bench(server, tmp_path, "--num-prompts", "1", "--header", "X-Key=s3cret")
    text = (tmp_path / "out.jsonl").read_text()
    assert "s3cret" not in text
    assert json.loads(text)["config"]["header"] == ["X-Key"]
