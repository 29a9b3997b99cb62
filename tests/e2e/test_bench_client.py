"""The load client against a scripted server on real sockets.

No test depends on how fast this machine is: bounds are one-sided (a reply cannot arrive before it was sent)
or count events.
"""

from __future__ import annotations

import argparse
import io
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.bench.args import add_arguments
from phalanx.bench.backends import Flavor
from phalanx.bench.check import check_possible
from phalanx.bench.connection import RawRecord
from phalanx.bench.errors import BenchError
from phalanx.bench.metrics import Asked, compute_metrics
from phalanx.bench.parse import parse_record
from phalanx.bench.progress import Progress
from phalanx.bench.run import run
from phalanx.bench.slots import Slots
from phalanx.bench.target import make_target
from phalanx.bench.worker import LoadResult, run_load
from tests.e2e.server_harness import PATIENCE_S
from tests.e2e.sse_server import (
    DONE,
    Reply,
    Respond,
    Server,
    Step,
    chat_event,
    json_reply,
    native_event,
    serving,
    steady,
)

HERE = Path(__file__).parent


class Words:
    vocab_size = 50
    special_ids = frozenset({0})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word[1:]) if word[1:].isdigit() else 1 for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(f"w{i}" for i in ids)

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return str(messages[0]["content"])


def bench(server: Server, tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    """Run the client; return its exit code and the JSON line. Warm-up is off unless asked for."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = tmp_path / "out.jsonl"
    base = ["--base-url", server.url, "--output-file", str(out), "--output-details"]
    if "--warmup-requests" not in argv:
        base += ["--warmup-requests", "0"]
    if "--dataset-name" not in argv:
        base += ["--dataset-name", "random", "--random-input-len", "8", "--random-output-len", "4"]
    code = run(parser.parse_args([*base, *argv]), lambda name: Words(), settle_s=0.0)
    return code, json.loads(out.read_text().splitlines()[-1], parse_constant=_no_constant)


def bench_in_pieces(
    respond: Callable[[float], Reply], num_gaps: int, tmp_path: Path, *argv: str
) -> tuple[Server, int, dict[str, Any]]:
    """A run in which each event came with a read of its own: on a busy machine, some wait for the next one.

    respond: takes the milliseconds between two events. num_gaps: of each answer.
    """
    for interval_ms in (1.0, 10.0, 100.0, 1000.0, 10_000.0):
        reply = respond(interval_ms)
        with serving(lambda path, body, nth, reply=reply: reply) as server:
            code, result = bench(server, tmp_path, *argv)
        if all(len(itls) == num_gaps for itls in result["itls"]):
            return server, code, result
    raise AssertionError("events 10 s apart came together")


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not strict JSON")


def load(
    respond: Respond, count: int = 1, max_concurrency: int | None = None, timeout_s: float = PATIENCE_S
) -> LoadResult:
    with serving(respond) as server:
        target = make_target(server.url, "", 0, [])
        wire = target.wire_request("/generate", b"{}")
        slots = Slots(max_concurrency) if max_concurrency else None
        return run_load(target, [wire] * count, np.zeros(count), slots, timeout_s=timeout_s)


def failure(record: RawRecord) -> str | None:
    return parse_record(record, Flavor.NATIVE, True).failure


# ---- boundaries


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_any_framing_newline_and_split_give_the_same_answer(framing: str, newline: bytes, size: int) -> None:
    body = b"".join(native_event("é " * n, n) for n in range(1, 5)) + DONE
    body = body.replace(b"\n", newline)
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    steps = [Step(0, piece) for piece in pieces]
    outcome = parse_record(
        load(lambda path, body, nth: Reply(steps, framing=framing)).records[0], Flavor.NATIVE, True
    )
    assert outcome.failure is None
    assert outcome.text == "é é é é "
    assert outcome.num_output_tokens == 4


@pytest.fixture
def stale_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close that crossed the request on its way may be seen late by a client that stood still."""
    monkeypatch.setattr("phalanx.bench.connection._STALE_S", 3600.0)


@pytest.mark.usefixtures("stale_at_any_time")
def test_connections_are_reused_and_a_stale_one_is_replaced() -> None:
    reused = load(lambda path, body, nth: steady(2, 0), count=6, max_concurrency=1)
    assert (reused.num_connections, [failure(r) for r in reused.records]) == (1, [None] * 6)
    fresh = load(
        lambda path, body, nth: Reply(steady(2, 0).steps, keep_alive=False), count=6, max_concurrency=1
    )
    assert (fresh.num_connections, [failure(r) for r in fresh.records]) == (6, [None] * 6)

    def close_silently(path: str, body: dict, nth: int) -> Reply:
        # Keep-alive is promised, but the connection closes on the second request before any answer.
        return steady(2, 0) if nth != 1 else Reply([Step(0, b"", "close")], framing="silent")

    stale = load(close_silently, count=3, max_concurrency=1)
    assert [failure(r) for r in stale.records] == [None] * 3
    assert stale.num_connections == 2


# ---- B56: failures on the wire


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (
            Reply(
                [
                    Step(0, native_event("a b c", 3)),
                    Step(1, b'data: {"error": {"message": "out of memory"}}\n\n'),
                    Step(2, DONE),
                ]
            ),
            "error event: out of memory",
        ),
        (json_reply({"error": {"message": "queue full"}}, status=503), "HTTP 503: queue full"),
        (json_reply({"detail": "bad"}, status=422), "HTTP 422: bad"),
        (
            Reply([Step(0, native_event("a", 1)), Step(5, b"", "close")]),
            "connection closed before the response was complete",
        ),
        (Reply([Step(0, native_event("a", 1)), Step(5, b"", "reset")]), "connection reset by the server"),
        (Reply([Step(0, native_event("a", 1))]), "stream ended without [DONE]"),
        (Reply([Step(0, native_event("a", 1))], framing="close"), "stream ended without [DONE]"),
    ],
)
def test_b56_failures_are_excluded_and_printed(
    reply: Reply, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda path, body, nth: reply if nth % 2 else steady(3, 0)) as server:
        code, result = bench(server, tmp_path, "--num-prompts", "8")
    assert code == 0
    assert (result["completed"], result["failed"]) == (4, 4)
    assert result["failures"] == {cause: 4}
    assert result["total_output_tokens"] == 12
    assert f"  4 x {cause}" in capsys.readouterr().out


def test_malformed_http_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            peer.recv(1000)
            peer.sendall(b"SSH-2.0-what\r\n\r\n")
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        target = make_target(None, "127.0.0.1", listener.getsockname()[1], [])
        result = run_load(target, [target.wire_request("/", b"{}")], np.zeros(1), None, timeout_s=PATIENCE_S)
        thread.join()
    assert str(failure(result.records[0])).startswith("malformed HTTP response")


def test_refused_connections_and_timeouts_are_failures() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = make_target(None, "127.0.0.1", unused.getsockname()[1], [])
        result = run_load(target, [b"x"] * 3, np.zeros(3), None)
    assert [failure(record) for record in result.records] == ["connection refused"] * 3
    assert [record.sent for record in result.records] == [None] * 3
    hung = load(lambda path, body, nth: Reply([Step(60_000, DONE)]), count=2, timeout_s=0.2)
    assert [failure(record) for record in hung.records] == ["timeout after 0.2 s"] * 2


@pytest.mark.parametrize("backend", ["sglang-oai", "sglang-oai-chat", "openai"])
def test_a_wrong_backend_is_a_failure_with_its_cause(
    tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The route answers, and its events can be read, but they are those of /generate."""
    with serving(lambda path, body, nth: steady(3, 0)) as server:
        code, result = bench(server, tmp_path, "--num-prompts", "3", "--backend", backend)
    cause = "malformed event: no choices with text (is --backend right?)"
    assert (code, result["completed"], result["failures"]) == (1, 0, {cause: 3})
    assert f"  3 x {cause}" in capsys.readouterr().out


def test_a_result_file_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("before\n")
    with serving(lambda path, body, nth: steady(1, 0)) as server:
        for path, reason in ((tmp_path, "Is a directory"), (kept / "x", "Not a directory")):
            with pytest.raises(BenchError, match=f"--output-file .*: cannot be written: {reason}") as caught:
                bench(server, tmp_path, "--num-prompts", "1", "--output-file", str(path))
            assert caught.value.exit_code == 2
        assert server.num_accepted == 0
        # A server that is not there leaves no empty file, and what is in a file stays.
        with pytest.raises(BenchError, match="not ready"):
            argv = ["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0.01"]
            bench(server, tmp_path, "--num-prompts", "1", "--output-file", str(tmp_path / "new"), *argv)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "before\n"


def test_a_disk_that_fills_up_meanwhile_costs_the_file_not_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(path: str, body: dict, nth: int) -> Reply:
        (tmp_path / "full").mkdir(exist_ok=True)
        return steady(1, 0)

    with serving(respond) as server, pytest.raises(BenchError, match="cannot write") as caught:
        bench(server, tmp_path, "--num-prompts", "1", "--output-file", str(tmp_path / "full"))
    assert caught.value.exit_code == 1
    out = capsys.readouterr().out
    assert "Successful requests:                     1 " in out
    assert json.loads(out.splitlines()[-1])["completed"] == 1


def test_all_failed_exits_1_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda path, body, nth: json_reply({"error": "no"}, status=500)) as server:
        code, result = bench(server, tmp_path, "--num-prompts", "3")
        with pytest.raises(BenchError, match="warm-up failed: HTTP 500: no"):
            bench(server, tmp_path, "--num-prompts", "3", "--warmup-requests", "2")
    assert (code, result["completed"], result["mean_ttft_ms"]) == (1, 0, None)
    out = capsys.readouterr().out
    assert "Mean TTFT (ms):                          n/a" in out
    assert "  3 x HTTP 500: no" in out


# ---- the whole run

LABELS = """
Backend|Traffic request rate|Max request concurrency|Successful requests|Benchmark duration (s)
Total input tokens
Total input text tokens|Total generated tokens|Total generated tokens (retokenized)|Request throughput (req/s)
Input token throughput (tok/s)|Output token throughput (tok/s)|Peak output token throughput (tok/s)
Peak concurrent requests|Total token throughput (tok/s)|Concurrency
Mean E2E Latency (ms)|Median E2E Latency (ms)|P90 E2E Latency (ms)|P95 E2E Latency (ms)|P99 E2E Latency (ms)
Max E2E Latency (ms)
Mean TTFT (ms)|Median TTFT (ms)|P90 TTFT (ms)|P95 TTFT (ms)|P99 TTFT (ms)|Max TTFT (ms)
Mean TPOT (ms)|Median TPOT (ms)|P90 TPOT (ms)|P95 TPOT (ms)|P99 TPOT (ms)|Max TPOT (ms)
Mean ITL (ms)|Median ITL (ms)|P90 ITL (ms)|P95 ITL (ms)|P99 ITL (ms)|Max ITL (ms)
"""


def test_table_has_sglangs_labels_in_order_and_one_json_line_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--num-prompts", "5", "--tag", "t", "--warmup-requests", "3")
    server, code, result = bench_in_pieces(lambda interval_ms: steady(3, interval_ms), 2, tmp_path, *argv)
    num_warmups = len(server.requests) - 5
    before, *runs = capsys.readouterr().out.split("============ Serving Benchmark Result ============\n")
    lines = runs[-1].splitlines()
    assert before == "" and code == 0
    assert num_warmups == 3
    assert lines[-2] == "=" * 50
    figures = json.loads(lines.pop())
    assert figures == {name: result[name] for name in figures} and figures["completed"] == 5
    rows = [line.split(":")[0] for line in lines if ":" in line]
    expected = [label for line in LABELS.strip().splitlines() for label in line.split("|")]
    assert rows[: len(expected)] == expected
    assert "Successful requests:                     5         " in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert (result["tag"], result["request_rate"], result["completed"]) == ("t", "inf", 5)
    assert result["server_info"]["version"] == "fake"
    assert (result["output_lens"], result["errors"]) == ([3] * 5, [""] * 5)
    assert result["generated_texts"] == ["w w w "] * 5


def test_sent_bodies_are_what_the_command_line_says(tmp_path: Path) -> None:
    with serving(lambda path, body, nth: steady(1, 0)) as server:
        argv = ["--num-prompts", "3", "--tokenize-prompt", "--temperature", "0.5", "--flush-cache"]
        argv += ["--header", "X-One=1", "X-Two=2", "--extra-request-body", '{"rid": "r"}']
        bench(server, tmp_path, *argv)
    (flush, _), *sent = server.requests
    assert flush == "/flush_cache"
    assert [path for path, _ in sent] == ["/generate"] * 3
    assert all(isinstance(body["input_ids"], list) and body["rid"] == "r" for _, body in sent)
    assert {body["sampling_params"]["temperature"] for _, body in sent} == {0.5}
    assert all(b"\r\nX-One: 1\r\nX-Two: 2" in head for head in server.heads)


def test_chat_route_counts_no_role_chunk(tmp_path: Path) -> None:
    events = [
        chat_event({"role": "assistant", "content": ""}),
        chat_event({"content": "a "}, {"completion_tokens": 1}),
        chat_event({"content": "b c"}, {"completion_tokens": 3}),
        b'data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9}}\n\n',
        DONE,
    ]

    def respond(interval_ms: float) -> Reply:
        return Reply([Step(n * interval_ms, event) for n, event in enumerate(events)])

    argv = ("--num-prompts", "4", "--backend", "sglang-oai-chat", "--served-model-name", "x")
    server, _, result = bench_in_pieces(respond, 2, tmp_path, *argv)
    path, body = server.requests[0]
    assert (path, body["model"]) == ("/v1/chat/completions", "x")
    assert (result["total_output_tokens"], result["total_input_tokens_server"]) == (12, 36)


def test_whole_answers_measure_e2e_only(tmp_path: Path) -> None:
    answer = {"text": "a b", "meta_info": {"completion_tokens": 2, "prompt_tokens": 4}}
    with serving(lambda path, body, nth: json_reply(answer)) as server:
        code, result = bench(server, tmp_path, "--num-prompts", "3", "--disable-stream")
    assert (code, result["completed"], result["total_output_tokens"]) == (0, 3, 6)
    assert result["unmeasured"] == {"ttft": 3, "tpot": 3, "itl": 3}
    assert (result["mean_ttft_ms"], result["ttfts"]) == (None, [None] * 3)
    assert result["mean_e2e_latency_ms"] > 0


def test_max_concurrency_is_kept_and_waiting_for_a_slot_is_not_latency(tmp_path: Path) -> None:
    with serving(lambda path, body, nth: steady(2, 20)) as server:
        _, result = bench(server, tmp_path, "--num-prompts", "12", "--max-concurrency", "3")
        assert server.num_accepted <= 3 + 3  # 3 streams; models, server_info and the ready check
    assert result["peak_requests_in_flight"] == 3
    assert result["connections_opened"] == 3
    # The last of four rounds waited three rounds of 40 ms; its latency does not contain that wait.
    assert result["p99_slot_wait_ms"] >= 100
    assert result["p99_schedule_delay_ms"] >= result["p99_slot_wait_ms"] - 1


def test_poisson_arrivals_are_kept(tmp_path: Path) -> None:
    with serving(lambda path, body, nth: steady(1, 0)) as server:
        _, result = bench(server, tmp_path, "--num-prompts", "40", "--request-rate", "200")
    assert result["completed"] == 40
    # 39 exponential gaps of 5 ms mean, from the seed: the run cannot be shorter than their sum.
    assert result["duration"] > 0.1
    assert result["request_rate"] == 200.0


def test_server_that_never_gets_ready_is_an_error() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        argv = ["--dataset-name", "random", "--port", str(unused.getsockname()[1])]
        args = parser.parse_args([*argv, "--ready-check-timeout-sec", "0.1"])
        with pytest.raises(BenchError, match="not ready"):
            run(args, lambda name: Words())
        args = parser.parse_args([*argv, "--ready-check-timeout-sec", "0"])
        with pytest.raises(BenchError, match="give --model"):
            run(args, lambda name: Words())


# ---- B58, B48: many at once


def test_b58_2000_at_once_without_a_client_cap() -> None:
    """Nobody is answered before all 2000 have asked: with any cap in the client this run would time out."""
    reply = Reply([Step(0, native_event("a", 1)), Step(0, DONE)], hold=2000)
    result = load(lambda path, body, nth: reply, count=2000, timeout_s=600.0)
    assert [failure(record) for record in result.records] == [None] * 2000
    assert result.num_connections == 2000
    assert all(record.sent is not None and record.sent >= record.due for record in result.records)
    assert len(result.ticks) > 0


def test_b48_1000_streams_under_a_soft_limit_of_256_descriptors(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = f"ulimit -Sn 256 && exec {sys.executable} {HERE / 'sse_server.py'} --num-tokens 4 --hold 1000"
    with subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = f"ulimit -Sn 256 && exec {sys.executable} -m phalanx.bench_serving --port {port}"
        client += " --dataset-name random --num-prompts 1000 --random-input-len 4 --random-output-len 4"
        client += f" --tokenizer tiny-llama --warmup-requests 0 --output-file {out}"
        done = subprocess.run(["bash", "-c", client], capture_output=True, text=True, timeout=2 * PATIENCE_S)
        server.communicate("")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["completed"], result["failures"]) == (1000, {})
    assert result["peak_requests_in_flight"] == 1000
    assert "Failed requests:                         0" in done.stdout


def test_b48_a_hard_limit_too_low_is_told_before_the_run() -> None:
    code = (
        "import numpy as np\n"
        "from phalanx.bench.target import make_target\n"
        "from phalanx.bench.fleet import Load, run_fleet\n"
        "from phalanx.bench.backends import Flavor\n"
        "from phalanx.bench.errors import BenchError\n"
        "try:\n"
        "    target = make_target(None, '127.0.0.1', 9, [])\n"
        "    run_fleet(Load(target, [b''] * 500, np.zeros(500), None, Flavor.NATIVE, True), 1)\n"
        "except BenchError as error:\n"
        "    print(error)\n"
    )
    command = f'ulimit -n 256 && exec {sys.executable} -c "$0"'
    done = subprocess.run(["bash", "-c", command, code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "need 564 file descriptors, but the hard limit is 256" in done.stdout, done.stderr


def test_goodput_and_cache_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def respond(path: str, body: dict, nth: int) -> Reply:
        event = native_event("a b", 2, cached_tokens=nth)
        return Reply([Step(300 if nth == 3 else 0, event), Step(300 if nth == 3 else 0, DONE)])

    with serving(respond) as server:
        argv = ["--num-prompts", "4", "--max-concurrency", "1", "--cache-report"]
        _, result = bench(server, tmp_path, *argv, "--goodput", "ttft:299", "e2el:60000")
    assert result["slo_attainment_by_metric"]["ttft"] <= 0.75
    assert result["slo_attainment_by_metric"]["e2el"] == 1.0
    assert result["cache_report"] == {
        "total_prompt_tokens": 20,
        "total_cached_tokens": 6,
        "cache_hit_rate_pct": 30.0,
    }
    out = capsys.readouterr().out
    assert "SLOs (ms):                               ttft:299 e2el:60000" in out
    assert "Cache hit rate:                          30.0%" in out


def test_progress_line() -> None:
    out = io.StringIO()
    progress = Progress(4, out)
    progress(1, 0)
    progress(4, 2)
    progress.close()
    first, second = out.getvalue().strip().split("\r")
    assert "] 1/4, " in first
    assert f"[{'#' * 30}] 4/4, 2 failed, " in second


def test_raw_bytes_past_the_limit_are_parsed_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("phalanx.bench.fleet._MAX_RAW_BYTES", 1000)
    with serving(lambda path, body, nth: steady(5, 0)) as server:
        _, result = bench(server, tmp_path, "--num-prompts", "6", "--max-concurrency", "1")
    assert (result["completed"], result["total_output_tokens"]) == (6, 30)
    assert "answers were parsed during the run" in capsys.readouterr().err


def test_exit_codes_of_the_program(tmp_path: Path) -> None:
    def program(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "phalanx.bench_serving", *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)

    unknown = program("--lora-name", "x")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    no_file = program()
    assert no_file.returncode == 2
    assert no_file.stderr.splitlines()[-1].startswith("bench serving: error: --dataset-name sharegpt needs")


def test_b59_the_printed_figures_are_possible(tmp_path: Path) -> None:
    """Figures from sockets, seen through the same check that guards the printing."""
    result = load(lambda path, body, nth: steady(5, 2), count=50)
    outcomes = [parse_record(record, Flavor.NATIVE, True) for record in result.records]
    ones = np.ones(50, np.int64)
    sent = np.asarray([record.sent for record in result.records], np.float64)
    due = np.asarray([record.due for record in result.records], np.float64)
    metrics = compute_metrics(
        outcomes, Asked(ones, ones, due, sent, np.empty(0)), result.ended - result.began, Words()
    )
    check_possible(metrics)
    assert metrics.ttft.max <= metrics.e2e.max  # type: ignore[operator]
    # All tokens but those that came with the first read: on a busy machine that may hold more than one.
    assert metrics.total_output == 50 * 5
    assert metrics.itl.count == sum(int((o.event_times > o.event_times[0]).sum()) for o in outcomes)


def test_a_server_that_wants_a_key_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    from phalanx.bench_serving import main

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    argv = ["--port", str(server.server_port), "--dataset-name", "random", "--num-prompts", "1"]
    argv += ["--tokenizer", "tiny-llama", "--output-file", str(tmp_path / "out.jsonl")]
    assert main(argv) == 1
    server.shutdown()
    server.server_close()
    assert "wants a key (HTTP 401)" in capsys.readouterr().err
