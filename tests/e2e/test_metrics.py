"""GET /metrics of real servers: what is counted, for all API workers, whichever answers."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client import parser

from tests.e2e.server_harness import PATIENCE_S, make_settings, wait_until, write_byte_tokenizer
from tests.e2e.server_harness import Server as HarnessServer
from tests.e2e.server_harness import running as harness_running
from tests.e2e.serving import Server, running

FLAGS = ("--load-format", "dummy", "--device", "null", "--max-running-requests", "64", "--api-workers", "2")
STEP_MS = 10
ENDLESS = 4000  # tokens: as many as the context holds, and 40 s or more; whoever asks for them ends them
ROOT = Path(__file__).parents[2]
MODEL = "tiny-llama"
Sample = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("metrics") / "log"
    with running(log, *FLAGS, "--null-step-ms", str(STEP_MS), model=MODEL) as server:
        yield server


@pytest.fixture
def clients(server: Server) -> Iterator[list[httpx.Client]]:
    workers = server.workers()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server.client_of(workers[slot])) for slot in (0, 1)]


class Metrics:
    """One answer of /metrics, read by Prometheus' own library."""

    def __init__(self, text: str) -> None:
        self.families = {f.name: f for f in parser.text_string_to_metric_families(text)}
        self.samples: Sample = {}
        for family in self.families.values():
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                key = sample.name, frozenset(labels.items())
                assert key not in self.samples, key
                self.samples[key] = sample.value

    def get(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]


def metrics_of(client: httpx.Client, engine_up: int = 1) -> Metrics:
    """Asks again if the engine did not answer in the time that a worker waits for it."""
    answers: list[Metrics] = []

    def is_whole() -> bool:
        reply = client.get("/metrics")
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        answers.append(Metrics(reply.text))
        return answers[-1].get("phalanx:engine_up") == engine_up

    wait_until(is_whole, "the engine's figures")
    return answers[-1]


def generate(client: httpx.Client, num_tokens: int, **fields: object) -> httpx.Response:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": 7}
    return client.post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling, **fields})


COUNTED = (
    "sglang:num_requests_total",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:time_to_first_token_seconds_count",
    "sglang:inter_token_latency_seconds_count",
    "sglang:e2e_request_latency_seconds_count",
    "sglang:queue_time_seconds_count",
    "phalanx:step_rows_total",
)


def test_all_workers_count_together(server: Server, clients: list[httpx.Client]) -> None:
    before = metrics_of(clients[0])
    for client, count in zip(clients, (2, 3), strict=True):
        for is_stream in (False, True)[: count - 1] * 2:
            assert generate(client, 10, stream=is_stream).status_code == 200
    num = 2 + 4

    def grown(name: str) -> float:
        return metrics_of(clients[1]).get(name) - before.get(name)

    wait_until(lambda: grown("sglang:e2e_request_latency_seconds_count") == num, "both workers' figures")
    expected = (num, 3 * num, 10 * num, num, 9 * num, num, num, 10 * num)
    for client in clients:
        now = metrics_of(client)
        assert tuple(now.get(name) - before.get(name) for name in COUNTED) == expected
        ended = "phalanx:finished_requests_total"
        assert now.get(ended, reason="length") - before.get(ended, reason="length") == num
        route = {"endpoint": "/generate", "status_code": "200"}
        assert now.get("sglang:http_responses_total", **route) >= num
        assert now.get("sglang:num_running_reqs") == now.get("sglang:num_queue_reqs") == 0
        pages = [now.get("phalanx:kv_pages", state=state) for state in ("free", "cached", "held")]
        assert pages[1:] == [0, 0] and pages[0] * 16 == now.get("sglang:max_total_num_tokens")


def test_latencies_are_those_of_the_steps(clients: list[httpx.Client]) -> None:
    """The null engine's steps last 10 ms: sums of latencies are not below that, nor above what was waited."""
    before = metrics_of(clients[0])
    began_s = time.monotonic()
    assert generate(clients[0], 50, stream=True).status_code == 200
    asked_s = time.monotonic() - began_s
    now = metrics_of(clients[0])

    def grown(name: str) -> float:
        return now.get(name) - before.get(name)

    assert grown("phalanx:step_time_seconds_sum") >= 50 * STEP_MS / 1e3 * 0.9
    # From the request's coming to its first token, and on to its last; the end is noted just after that.
    parts = grown("sglang:time_to_first_token_seconds_sum") + grown("sglang:inter_token_latency_seconds_sum")
    whole = grown("sglang:e2e_request_latency_seconds_sum")
    assert 50 * STEP_MS / 1e3 * 0.9 <= parts <= whole + 1e-6 <= asked_s + 2e-6
    for phase in ("plan", "launch", "wait", "apply", "send"):
        assert now.get("phalanx:host_time_seconds_count", phase=phase) >= 50
    assert grown("phalanx:host_time_between_steps_seconds_count") >= 48
    assert now.get("phalanx:gpu_idle_seconds_total") >= 0
    for component in ("engine", "api_worker_0", "api_worker_1"):
        assert 0.05 < now.get("sglang:process_cpu_seconds_total", component=component) < 600


def test_gauges_while_it_runs(server: Server, clients: list[httpx.Client]) -> None:
    with contextlib.ExitStack() as stack:
        threads = []
        for i in range(8):
            client = stack.enter_context(httpx.Client(base_url=server.url))
            threads.append(
                threading.Thread(target=generate, args=(client, ENDLESS), kwargs={"stream": i % 2 == 0})
            )
            threads[-1].start()
        wait_until(lambda: metrics_of(clients[0]).get("sglang:num_running_reqs") == 8, "all to run")
        now = metrics_of(clients[1])
        assert now.get("phalanx:batch_occupancy") == 8 / 64
        assert now.get("sglang:token_usage") > 0 and now.get("sglang:num_used_tokens") >= 8 * 4
        assert now.get("sglang:http_requests_active") >= 8
        streams = [metrics_of(clients[0]).get("phalanx:api_worker_streams", worker=w) for w in "01"]
        assert sum(streams) == 8
        wait_until(lambda: metrics_of(clients[0]).get("sglang:gen_throughput") > 0, "a rate")
        clients[0].post("/abort_request", json={"abort_all": True})
        for thread in threads:
            thread.join(PATIENCE_S)
    wait_until(lambda: metrics_of(clients[0]).get("sglang:num_running_reqs") == 0, "the end")
    assert metrics_of(clients[0]).get("phalanx:batch_occupancy") == 0


def test_aborts_by_cause(server: Server, clients: list[httpx.Client]) -> None:
    def cause(name: str) -> float:
        return metrics_of(clients[1]).get("phalanx:aborted_requests_total", cause=name)

    def grows(name: str, before: float, by: int = 1) -> None:
        wait_until(lambda: cause(name) == before + by, f"{by} by {name}")

    total = metrics_of(clients[1]).get("sglang:num_aborted_requests_total")
    before = cause("disconnect")
    sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
    ask = {"input_ids": [5], "stream": True, "sampling_params": sampling}
    with httpx.stream("POST", f"{server.url}/generate", json=ask) as reply:
        assert next(reply.iter_raw())
    grows("disconnect", before)
    before = cause("request")
    with httpx.Client(base_url=server.url) as client:
        thread = threading.Thread(target=generate, args=(client, ENDLESS), kwargs={"rid": "gone"})
        thread.start()
        wait_until(lambda: metrics_of(clients[1]).get("sglang:num_running_reqs") == 1, "it to run")
        clients[0].post("/abort_request", json={"rid": "gone"})
        thread.join(PATIENCE_S)
    grows("request", before)
    before = cause("pause")
    with httpx.Client(base_url=server.url) as client:
        thread = threading.Thread(target=generate, args=(client, ENDLESS))
        thread.start()
        wait_until(lambda: metrics_of(clients[1]).get("sglang:num_running_reqs") == 1, "it to run")
        clients[0].post("/pause_generation", json={"mode": "abort"})
        thread.join(PATIENCE_S)
        assert metrics_of(clients[0]).get("phalanx:paused") == 1
        clients[0].post("/continue_generation")
        assert metrics_of(clients[0]).get("phalanx:paused") == 0
    grows("pause", before)
    assert metrics_of(clients[1]).get("sglang:num_aborted_requests_total") == total + 3
    server.assert_live()


def test_a_stop_string_is_no_abort(clients: list[httpx.Client]) -> None:
    before = metrics_of(clients[0])
    text = generate(clients[0], 30).json()["text"]
    sampling = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 7, "stop": [text[3:6]]}
    reply = clients[0].post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling}).json()
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    now = metrics_of(clients[0])
    name = "phalanx:finished_requests_total"
    assert now.get(name, reason="stop") == before.get(name, reason="stop") + 1
    assert now.get("sglang:num_aborted_requests_total") == before.get("sglang:num_aborted_requests_total")


def test_a_killed_workers_figures_stay(server: Server, clients: list[httpx.Client]) -> None:
    assert generate(clients[0], 10).status_code == 200
    before = metrics_of(clients[0])
    worker = server.workers()[0]
    lost = threading.Thread(target=_until_cut, args=(server, worker))
    lost.start()
    wait_until(lambda: metrics_of(clients[1]).get("sglang:num_running_reqs") == 1, "it to run")
    worker.kill()
    lost.join(PATIENCE_S)
    wait_until(lambda: 0 in server.workers() and server.workers()[0].pid != worker.pid, "a successor")
    with server.client_of(server.workers()[0]) as client:
        wait_until(lambda: client.get("/health").status_code == 200, "its health")
        assert generate(client, 10).status_code == 200
        name = "sglang:e2e_request_latency_seconds_count"
        wait_until(lambda: metrics_of(clients[1]).get(name) == before.get(name) + 1, "figures")
        for asked in (client, clients[1]):
            now = metrics_of(asked)
            assert now.get(name) == before.get(name) + 1
            for sample, value in before.samples.items():
                if sample[0].endswith(("_total", "_bucket", "_count", "_sum")):
                    assert now.samples[sample] >= value, sample
            cause = {"name": "phalanx:aborted_requests_total", "cause": "worker_lost"}
            assert now.get(**cause) == before.get(**cause) + 1
            assert now.get("phalanx:api_worker_streams", worker="0") == 0
    server.assert_live()


def _until_cut(server: Server, worker: object) -> None:
    with server.client_of(worker) as client, contextlib.suppress(httpx.HTTPError):  # type: ignore[arg-type]
        generate(client, ENDLESS)


def test_responses_by_route_and_status(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        before = metrics_of(client)
        generate(client, 1)
        generate(client, 0, sampling_params={"top_p": 7})
        client.get("/v1/models/tiny-llama")
        client.get("/v1/models/nobody")
        client.get("/made/up/by/a/client")
        client.get("/generate")
        client.options("/generate")
        for endpoint, status, by in (
            ("/generate", 200, 1),
            ("/generate", 400, 1),
            ("/generate", 405, 1),
            ("/v1/models/{model:path}", 200, 1),
            ("/v1/models/{model:path}", 404, 1),
            ("other", 404, 1),
            ("preflight", 200, 1),
        ):
            key = (
                "sglang:http_responses_total",
                frozenset({("endpoint", endpoint), ("status_code", str(status))}),
            )

            def is_counted(key: tuple = key, by: int = by) -> bool:
                return metrics_of(client).samples.get(key, 0) == before.samples.get(key, 0) + by

            wait_until(is_counted, f"{endpoint} {status}")
        assert not any("made" in str(sample) for sample in metrics_of(client).samples)


def test_every_family_has_a_type_and_a_text(clients: list[httpx.Client]) -> None:
    families = metrics_of(clients[0]).families
    assert len(families) > 30
    for name, family in families.items():
        assert family.type in ("gauge", "counter", "histogram"), name
        assert family.documentation.endswith("."), name
        assert name.startswith(("sglang:", "phalanx:")), name
        assert all(s.labels["model_name"] == MODEL for s in family.samples), name


@pytest.mark.parametrize(
    "path",
    [
        "deploy/grafana/phalanx.json",
        "deploy/prometheus-alerts.yml",
        "docs/metrics.md",
        "src/phalanx/top_figures.py",
        "src/phalanx/server/static/page.js",
    ],
)
def test_what_is_named_exists(clients: list[httpx.Client], path: str) -> None:
    text = (ROOT / path).read_text()
    named = set(re.findall(r"(?:sglang|phalanx):[a-z][a-z0-9_]*", text))
    metrics = metrics_of(clients[0])
    families = {f"{f.name}_total" if f.type == "counter" else f.name for f in metrics.families.values()}
    known = families | {name for name, _ in metrics.samples}
    assert len(named) > 5 and named <= known, named - known
    if path.endswith(".md"):
        rows = set(re.findall(r"^\| `([a-z0-9:_]+)` \| (gauge|counter|histogram) \|", text, re.MULTILINE))
        assert rows == {(name, metrics.families[name.removesuffix("_total")].type) for name in families}


def test_the_board_is_complete_and_the_configuration_is_yaml() -> None:
    board = json.loads((ROOT / "deploy/grafana/phalanx.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set()
    taken = set()
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            assert target["expr"].count("(") == target["expr"].count(")") and target["expr"].count("{") > 0
            used |= set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert used <= variables
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    assert [job["job_name"] for job in config["scrape_configs"]] == ["phalanx"]
    (rules,) = config["rule_files"]
    alerts = yaml.safe_load((ROOT / "deploy" / rules).read_text())
    assert all(rule["expr"] and rule["annotations"]["summary"] for rule in alerts["groups"][0]["rules"])


def top(server: Server, *flags: str) -> list[str]:
    return [sys.executable, "-m", "phalanx", "top", "--url", server.url, *flags]


def test_top_prints_one_frame(server: Server, clients: list[httpx.Client]) -> None:
    other = clients[0]
    with httpx.Client(base_url=server.url) as client:
        thread = threading.Thread(target=generate, args=(client, ENDLESS))
        thread.start()
        wait_until(lambda: metrics_of(other).get("sglang:num_running_reqs") == 1, "it to run")
        before = metrics_of(other).get("sglang:generation_tokens_total")
        done = subprocess.run(top(server, "--once"), capture_output=True, text=True, timeout=PATIENCE_S)
        most = metrics_of(other).get("sglang:generation_tokens_total") - before
        other.post("/abort_request", json={"abort_all": True})
        thread.join(PATIENCE_S)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    figures = {" ".join(row[:-1]): row[-1] for row in rows if row}
    assert rows[0] == [MODEL, server.url, "up"]
    assert ["running", "1"] in [row[:2] for row in rows] and figures["queued"] == "0"
    # Its two looks are a second apart, or more.
    assert 0 < float(figures["tokens/s out"]) <= most


def test_top_goes_on_until_it_is_stopped(server: Server, clients: list[httpx.Client]) -> None:
    num_asked = 0

    def answered() -> float:
        nonlocal num_asked
        num_asked += 1
        answers = Metrics(clients[0].get("/metrics").text)
        return answers.get("sglang:http_responses_total", endpoint="/metrics", status_code="200") - num_asked

    before = answered()
    process = subprocess.Popen(
        top(server, "--interval", "0.2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until(lambda: answered() - before > 3, "several frames")  # its first look is not yet one
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and not error.strip(), error
    assert b"tokens/s out" in out


def test_a_request_that_takes_too_long(tmp_path: Path) -> None:
    settings = make_settings(write_byte_tokenizer(tmp_path), request_timeout_s=0.3)
    with (
        harness_running(tmp_path, settings) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert server.engine is not None
        server.engine.budget = 2
        sampling = {"max_new_tokens": 5}
        assert client.post("/generate", json={"text": "x", "sampling_params": sampling}).status_code == 504
        now = metrics_of(client)
        assert now.get("phalanx:aborted_requests_total", cause="timeout") == 1
        assert now.get("sglang:http_responses_total", endpoint="/generate", status_code="504") == 1
        # This engine tells nothing of its times: the page goes without.
        assert "phalanx:step_time_seconds" not in now.families and now.get("phalanx:engine_up") == 1


def test_without_an_engine_the_workers_figures_remain(tmp_path: Path) -> None:
    server = HarnessServer(tmp_path, make_settings(write_byte_tokenizer(tmp_path)))
    try:
        server.wait_status(503)  # loading
        with httpx.Client(base_url=server.url) as client:
            now = metrics_of(client, engine_up=0)
            assert "sglang:num_running_reqs" not in now.families
            assert now.get("sglang:http_responses_total", endpoint="/health", status_code="503") >= 1
    finally:
        server.close()
