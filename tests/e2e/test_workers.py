"""Several API workers on one port, real processes, an engine without a model."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_harness import PATIENCE_S, wait_until
from tests.e2e.serving import Server, running

FLAGS = ("--load-format", "dummy", "--device", "null", "--max-running-requests", "256", "--api-workers", "2")
STEP_MS = 10
ENDLESS = 4000  # tokens: as many as the context holds, and 40 s or more; whoever asks for them ends them


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("workers") / "log"
    with running(log, *FLAGS, "--null-step-ms", str(STEP_MS), model="tiny-llama") as server:
        yield server


@pytest.fixture
def clients(server: Server) -> Iterator[list[httpx.Client]]:
    """One client per worker."""
    workers = server.workers()
    assert sorted(workers) == [0, 1]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server.client_of(workers[slot])) for slot in (0, 1)]


def body(num_tokens: int, **fields: object) -> dict[str, object]:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": 7}
    return {"input_ids": [5, 6, 7], "sampling_params": sampling, **fields}


class Stream:
    """A streamed /generate, read in a thread."""

    def __init__(self, client: httpx.Client, num_tokens: int, **fields: object) -> None:
        self.events: list[dict] = []
        self.error: Exception | None = None
        self.is_done = False
        self._body = body(num_tokens, stream=True, **fields)
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(client,), daemon=True)
        self._thread.start()

    def _read(self, client: httpx.Client) -> None:
        try:
            with client.stream("POST", "/generate", json=self._body) as reply:
                for line in reply.iter_lines():
                    if line == "data: [DONE]":
                        self.is_done = True
                    elif line:
                        self.events.append(json.loads(line.removeprefix("data: ")))
                        self._first.set()
        except httpx.HTTPError as error:
            self.error = error
        self._first.set()

    def wait_started(self) -> Stream:
        assert self._first.wait(PATIENCE_S) and self.events, self.error
        return self

    def wait_ended(self) -> Stream:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self

    @property
    def ids(self) -> list[int]:
        return self.events[-1]["output_ids"]

    @property
    def finish(self) -> dict | None:
        return self.events[-1]["meta_info"]["finish_reason"]


def test_both_workers_answer_the_same(server: Server, clients: list[httpx.Client]) -> None:
    first, second = (client.post("/generate", json=body(20)).json()["output_ids"] for client in clients)
    assert first == second and len(first) == 20
    infos = [client.get("/server_info").json() for client in clients]
    assert [info["api_workers"] for info in infos] == [2, 2]
    assert infos[0]["startup_time"] == infos[1]["startup_time"]
    assert (
        infos[0]["internal_states"][0]["requests_total"] == infos[1]["internal_states"][0]["requests_total"]
    )
    created = [client.get("/v1/models").json()["data"][0]["created"] for client in clients]
    assert created[0] == created[1]
    server.assert_live()


def test_a_name_in_use_is_refused_by_either_worker(clients: list[httpx.Client], server: Server) -> None:
    here, there = clients
    with server.client_of(server.workers()[0]) as same:
        # Held, so that it has not ended before the others have asked.
        assert there.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        running = Stream(here, 50, rid="mine")
        wait_until(lambda: server.stats()["queued"] == 1, "it to be there")
        for client in (there, same):
            for is_stream in (False, True):
                reply = client.post("/generate", json=body(4, rid="mine", stream=is_stream))
                assert reply.status_code == 400, reply.text
                assert "'mine' is in use" in reply.json()["error"]["message"]
        assert there.post("/continue_generation").status_code == 200
    assert there.post("/generate", json=body(4, rid="other")).status_code == 200
    running.wait_ended()
    assert running.is_done and len(running.ids) == 50
    for client in (there, here):
        reply = client.post("/generate", json=body(4, rid="mine"))
        assert reply.status_code == 200 and reply.json()["meta_info"]["id"] == "mine"
    server.assert_live()


def test_two_prompts_of_one_name_are_refused(clients: list[httpx.Client]) -> None:
    reply = clients[0].post("/generate", json={**body(2), "input_ids": [[5], [6]], "rid": ["a", "a"]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "rid"
    reply = clients[0].post("/generate", json={**body(2), "input_ids": [[5], [6]], "rid": ["a", "b"]})
    assert [one["meta_info"]["id"] for one in reply.json()] == ["a", "b"]


def test_abort_and_reuse_through_the_other_worker(clients: list[httpx.Client], server: Server) -> None:
    here, there = clients
    for _ in range(5):
        running = Stream(here, ENDLESS, rid="job").wait_started()
        assert there.post("/abort_request", json={"rid": "job"}).status_code == 200
        running.wait_ended()
        assert running.finish["type"] == "abort" and len(running.ids) < ENDLESS
        wait_until(lambda: there.post("/generate", json=body(1, rid="job")).status_code == 200, "a free name")
    several = [Stream(client, ENDLESS).wait_started() for client in clients]
    with server.client_of(server.workers()[0]) as third:
        assert third.post("/abort_request", json={"abort_all": True}).status_code == 200
    assert [s.wait_ended().finish["type"] for s in several] == ["abort", "abort"]
    server.assert_live()


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_pause_holds_for_all_workers(clients: list[httpx.Client], server: Server, mode: str) -> None:
    here, there = clients
    with server.client_of(server.workers()[1]) as third:
        before = Stream(here, 600).wait_started()
        reply = third.post("/pause_generation", json={"mode": mode})
        assert reply.status_code == 200 and reply.json()["status"] == "ok"
        during = Stream(there, 5)
        wait_until(lambda: server.stats()["queued"] == 1, "a queued request")
        stats = server.stats()
        assert stats["paused"] and stats["running"] == (mode == "in_place")
        assert [third.get(path).status_code for path in ("/health", "/v1/models")] == [200, 200]
        assert third.post("/flush_cache").status_code == 400
        if mode == "abort":
            before.wait_ended()
            assert before.finish["type"] == "abort"
        assert third.get("/health").status_code == 200 and not during.events
        assert server.stats()["generated_tokens_total"] == stats["generated_tokens_total"]
        assert third.post("/continue_generation").status_code == 200
    reference = Stream(there, 600) if mode == "in_place" else None
    during.wait_ended()
    assert during.is_done and len(during.ids) == 5
    before.wait_ended()
    if reference is not None:
        assert before.finish == {"type": "length", "length": 600}
        assert before.ids == reference.wait_ended().ids
    server.assert_live()


@pytest.mark.parametrize("mode", ["retract", "nonsense", 5])
def test_other_modes_are_refused_by_name(clients: list[httpx.Client], mode: object) -> None:
    reply = clients[0].post("/pause_generation", json={"mode": mode})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "mode"
    assert clients[1].post("/generate", json=body(2)).status_code == 200


def test_pause_without_a_body_aborts(clients: list[httpx.Client], server: Server) -> None:
    running = Stream(clients[0], ENDLESS).wait_started()
    assert clients[1].post("/pause_generation").status_code == 200
    assert running.wait_ended().finish["type"] == "abort"
    assert clients[1].post("/continue_generation").status_code == 200
    server.assert_live()


def test_a_killed_worker_is_replaced_and_others_go_on(server: Server) -> None:
    workers = server.workers()
    with server.client_of(workers[0]) as doomed, server.client_of(workers[1]) as other:
        with httpx.Client(base_url=server.url) as plain:
            lost = Stream(doomed, ENDLESS, rid="lost").wait_started()
            more = [
                threading.Thread(target=_until_cut, args=(server, workers[0], body(ENDLESS, stream=True)))
                for _ in range(5)
            ]
            for thread in more:
                thread.start()
            wait_until(lambda: server.stats()["running"] == 6, "all to run")
            health = Health(server)
            kept = Stream(other, 400, rid="kept").wait_started()
            workers[0].kill()
            lost.wait_ended()
            assert lost.error is not None and not lost.is_done
            for thread in more:
                thread.join(PATIENCE_S)
            wait_until(
                lambda: plain.get("/server_info").json()["internal_states"][0]["running"] <= 1, "aborts"
            )
            assert kept.wait_ended().is_done and len(kept.ids) == 400
            wait_until(
                lambda: 0 in server.workers() and server.workers()[0].pid != workers[0].pid, "a successor"
            )
    with server.client_of(server.workers()[0]) as client:
        assert health.stop() == {200}
        assert client.post("/generate", json=body(5, rid="lost")).json()["meta_info"]["id"] == "lost"
        # It hears of what concerns all workers, and is heard.
        with server.client_of(server.workers()[1]) as other:
            running = Stream(client, ENDLESS, rid="new").wait_started()
            assert other.post("/generate", json=body(1, rid="new")).status_code == 400
            assert other.post("/abort_request", json={"rid": "new"}).status_code == 200
            assert running.wait_ended().finish["type"] == "abort"
    server.assert_live()
    assert server.process.poll() is None


def test_a_worker_that_is_told_to_stop_finishes_and_is_replaced(server: Server) -> None:
    worker = server.workers()[1]
    with server.client_of(worker) as client:
        running = Stream(client, 200).wait_started()
        health = Health(server)
        worker.terminate()
        assert running.wait_ended().is_done and len(running.ids) == 200
    wait_until(lambda: server.workers().get(1, worker).pid != worker.pid, "a successor")
    with server.client_of(server.workers()[1]) as client:
        assert len(client.post("/generate", json=body(5)).json()["output_ids"]) == 5
    assert health.stop() == {200}
    server.assert_live()


class Health(threading.Thread):
    """Asks for /health again and again, on a new connection each time."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._url = f"{server.url}/health"
        self._stopping = threading.Event()
        self._seen: set[int] = set()
        self.start()

    def run(self) -> None:
        while not self._stopping.wait(0.02):
            with contextlib.suppress(httpx.HTTPError):  # it may hit the one that is killed
                self._seen.add(httpx.get(self._url).status_code)

    def stop(self) -> set[int]:
        """The status codes seen."""
        self._stopping.set()
        self.join(PATIENCE_S)
        return self._seen


def _until_cut(server: Server, worker: object, request: dict[str, object]) -> None:
    with server.client_of(worker) as client, contextlib.suppress(httpx.HTTPError):  # type: ignore[arg-type]
        client.post("/generate", json=request)


def test_start_up_says_how_many_and_why(tmp_path: Path) -> None:
    flags = [flag for flag in FLAGS if flag not in ("--api-workers", "2")]
    with running(tmp_path / "log", *flags, "--tokenizer-worker-num", "3", model="tiny-llama") as server:
        assert sorted(server.workers()) == [0, 1, 2]
    with running(tmp_path / "log2", *flags, model="tiny-llama") as server:
        count = len(server.workers())
        assert f"api_workers = {count} (" in server.log.read_text()
