"""`phalanx top`: figures from two answers of /metrics, and one clear line where there is no server."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from phalanx.cli import main
from phalanx.top import frame, scrape
from phalanx.top_figures import Scrape, figures, quantiles


def histogram(name: str, counts: dict[str, int], total: float, labels: str = "") -> str:
    lines = [f'{name}_bucket{{{labels}le="{bound}"}} {count}' for bound, count in counts.items()]
    inside = labels.rstrip(",")
    end = f"{{{inside}}}" if inside else ""
    return "\n".join([*lines, f"{name}_sum{end} {total}", f"{name}_count{end} {counts['+Inf']}"]) + "\n"


BEFORE = 'phalanx:engine_up{model_name="m"} 1\nsglang:num_running_reqs{model_name="m"} 9\n' + "".join(
    (
        "sglang:generation_tokens_total 1000\nsglang:prompt_tokens_total 50\nphalanx:steps_total 10\n",
        "phalanx:step_rows_total 90\nphalanx:gpu_idle_seconds_total 5\n",
        histogram("phalanx:step_time_seconds", {"0.01": 10, "0.1": 10, "+Inf": 10}, 0.1),
        histogram("sglang:inter_token_latency_seconds", {"0.01": 500, "0.1": 500, "+Inf": 500}, 5.0),
    )
)
NOW = 'phalanx:engine_up{model_name="m"} 1\nsglang:num_running_reqs{model_name="m"} 12\n' + "".join(
    (
        "sglang:num_queue_reqs 3\nsglang:max_running_requests 48\n",
        "sglang:num_used_tokens 100\nsglang:max_total_num_tokens 400\n",
        "sglang:generation_tokens_total 1800\nsglang:prompt_tokens_total 70\nphalanx:steps_total 30\n",
        "phalanx:step_rows_total 330\nphalanx:gpu_idle_seconds_total 5.5\n",
        histogram("phalanx:step_time_seconds", {"0.01": 20, "0.1": 30, "+Inf": 30}, 1.1),
        histogram("sglang:inter_token_latency_seconds", {"0.01": 500, "0.1": 598, "+Inf": 600}, 9.0),
        'phalanx:api_worker_streams{worker="0"} 7\nphalanx:api_worker_streams{worker="1"} 5\n',
        histogram("phalanx:event_loop_lag_seconds", {"0.001": 9, "+Inf": 10}, 1, 'worker="0",'),
        'phalanx:aborted_requests_total{cause="disconnect"} 4\n',
        'phalanx:aborted_requests_total{cause="pause"} 0\n',
        'sglang:http_responses_total{endpoint="/a",status_code="200"} 8\n',
        'sglang:http_responses_total{endpoint="/a",status_code="400"} 2\n',
        'sglang:http_responses_total{endpoint="/b",status_code="503"} 1\n',
        'sglang:http_responses_total{endpoint="/health",status_code="503"} 600\n',
    )
)


def test_figures() -> None:
    before, now = Scrape(BEFORE, 100.0), Scrape(NOW, 102.0)
    got = figures(now, before, before)
    assert got.model == "m" and got.engine_up and not got.paused
    assert (got.running, got.queued, got.max_running) == (12, 3, 48)
    assert (got.used_tokens, got.max_tokens) == (100, 400)
    assert (got.tokens_out, got.tokens_in, got.steps, got.rows_per_step) == (400, 10, 10, 12)
    assert got.step_s == pytest.approx(0.05) and got.idle_share == 0.25
    assert got.step.count == 20 and got.step.p50_s == pytest.approx(0.01)
    itl = got.latencies["between tokens"]
    assert itl.count == 100 and itl.p50_s is not None and 0.01 < itl.p50_s < 0.1
    assert itl.p99_s == 0.1  # beyond the last bound: that bound
    assert got.latencies["whole request"].count == 0 and got.between_steps_s is None
    assert [(number, streams) for number, streams, _ in got.workers] == [("0", 7), ("1", 5)]
    assert got.workers[0][2].count == 10 and got.workers[1][2].count == 0
    assert got.causes == {"disconnect": 4} and got.errors == 3


def test_a_server_that_was_started_anew_has_no_negative_figures() -> None:
    late, early = Scrape(NOW, 100.0), Scrape(BEFORE, 102.0)
    got = figures(early, late, late)
    assert got.tokens_out is None and got.step_s is None and got.step.count == 0
    assert got.latencies["between tokens"].p50_s is None


def test_labels_and_escapes() -> None:
    text = 'a{x="1",m="q\\"\\\\\\n}"} 1\na{x="2"} 2.5e1\nb +Inf\n# HELP a b\n'
    found = Scrape(text, 0.0)
    assert found.get("a") == 26 and found.get("a", x="1") == 1 and found.get("a", x="3") is None
    assert found.labels("a", "m") == ['q"\\\n}'] and found.get("b") == float("inf")
    assert quantiles(found, found, "none").count == 0


@pytest.mark.parametrize(
    "text", [NOW, "sglang:num_running_reqs 1\n", "phalanx:engine_up 0\nphalanx:paused 1\n"]
)
def test_a_frame_of_whatever_is_told(text: str) -> None:
    found = Scrape(text, 1.0)
    out = io.StringIO()
    Console(file=out, width=100).print(frame("http://x", figures(found, found, found), 3.0))
    shown = out.getvalue()
    assert "running" in shown and "time to first token" in shown and "last 3 s" in shown
    if text == NOW:
        assert "25.0 %" in shown and "disconnect 4" in shown and "HTTP errors: 3" in shown
    if "engine_up 0" in text:
        assert "the engine does not answer" in shown


class Answers(http.server.BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("is_healthy", [True, False])
def test_an_engine_in_a_long_step_is_told_from_a_dead_one(
    is_healthy: bool, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: Answers) -> None:
        self.send_response(503 if self.path == "/health" and not is_healthy else 200)
        self.end_headers()
        self.wfile.write(b"phalanx:engine_up 0\n")

    monkeypatch.setattr(Answers, "do_GET", answer)
    found = scrape(url, None)
    out = io.StringIO()
    Console(file=out, width=100).print(frame(url, figures(found, found, found), 3.0))
    assert ("is in a long step" in out.getvalue()) == is_healthy
    assert ("does not answer" in out.getvalue()) != is_healthy


@pytest.mark.parametrize(
    "status, body, says",
    [
        (401, b"", "wants a key"),
        (404, b"", "answered 404"),
        (200, b"<html>hello</html>", "nothing that is known"),
        (200, b"\xff\xfe", "no server answers"),
    ],
)
def test_what_is_no_server_is_told_in_one_line(
    url: str,
    status: int,
    body: bytes,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(Answers, "status", status)
    monkeypatch.setattr(Answers, "body", body)
    assert main(["top", "--url", url, "--once"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("phalanx: error: ") and says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--url", "localhost:30000"], "must begin with http"),
        (["--interval", "0"], "--interval"),
        (["--interval", "nan"], "--interval"),
    ],
)
def test_flags_that_cannot_be(flags: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["top", "--once", *flags]) == 2
    assert says in capsys.readouterr().err
