"""/start_profile and /stop_profile on a real server: what is traced, and what is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import TINY, TINY_ON_CPU, Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = (*TINY_ON_CPU, "--max-total-tokens", "2048", "--context-length", "512")
    with running(log, *flags, model=TINY) as server:
        yield server


def post(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return (
        httpx.post(server.url + path, json=body, timeout=120)
        if body
        else httpx.post(server.url + path, timeout=120)
    )


def generate(server: Server, num_tokens: int) -> None:
    params = {"max_new_tokens": num_tokens, "ignore_eos": True}
    assert post(server, "/generate", {"input_ids": [5, 6, 7], "sampling_params": params}).status_code == 200


def events(folder: Path, prefix: str = "") -> list[dict[str, Any]]:
    (path,) = folder.glob(f"{prefix}*.trace.json.gz")
    trace: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return trace


def count(trace: list[dict[str, Any]], name: str) -> int:
    return sum(event.get("name") == name for event in trace)


def refusal(reply: httpx.Response, param: str | None) -> str:
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    return str(reply.json()["error"]["message"])


def test_a_trace_from_start_to_stop(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert (
        post(server, "/start_profile", {"output_dir": str(folder), "activities": ["CPU"]}).status_code == 200
    )
    generate(server, 9)
    assert "already" in refusal(post(server, "/start_profile", {"output_dir": str(folder)}), None)
    assert post(server, "/stop_profile").status_code == 200
    trace = events(folder)
    assert (
        count(trace, "aten::embedding") == 9
    )  # one prompt, of which the first token comes, and 8 more steps
    assert "no profile" in refusal(post(server, "/stop_profile"), None)
    server.assert_live()


def test_num_steps_end_it(server: Server, tmp_path: Path) -> None:
    """Twice as many steps are twice as many calls of the model, and those after the last are not traced."""
    calls = []
    for steps in (4, 8):
        body = {"output_dir": str(tmp_path), "num_steps": steps, "profile_prefix": f"run{steps}"}
        assert post(server, "/start_profile", body).status_code == 200
        generate(server, 40)
        calls.append(count(events(tmp_path, f"run{steps}"), "aten::embedding"))
        assert post(server, "/stop_profile").status_code == 200  # it has ended by itself: no error, once
        refusal(post(server, "/stop_profile"), None)
    assert 0 < calls[0] < 40 and calls[1] == 2 * calls[0]


def test_start_step(server: Server, tmp_path: Path) -> None:
    far = {"output_dir": str(tmp_path), "start_step": 10**9}
    assert post(server, "/start_profile", far).status_code == 200
    generate(server, 5)
    assert "not reached" in refusal(post(server, "/stop_profile"), None)
    assert list(tmp_path.iterdir()) == []


def test_with_stack_and_shapes(server: Server, tmp_path: Path) -> None:
    body = {
        "output_dir": str(tmp_path),
        "record_shapes": True,
        "with_stack": True,
        "activities": ["CPU", "GPU"],
    }
    assert post(server, "/start_profile", body).status_code == 200
    generate(server, 3)
    assert post(server, "/stop_profile").status_code == 200
    assert any("Input Dims" in event.get("args", {}) for event in events(tmp_path))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"output_dir": "/proc/none"}, "output_dir"),
        ({"output_dir": "/dev/null"}, "output_dir"),
        ({"output_dir": "a\0b"}, "output_dir"),
        ({"output_dir": 5}, "output_dir"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 10**6}, "num_steps"),
        ({"num_steps": "5"}, "num_steps"),
        ({"num_steps": 2**70}, "num_steps"),
        ({"start_step": -(2**70)}, "start_step"),
        ({"start_step": -1}, "start_step"),
        ({"activities": ["CUDA_PROFILER"]}, "activities"),
        ({"activities": ["GPU"]}, "activities"),
        ({"activities": "CPU"}, "activities"),
        ({"profile_prefix": "../x"}, "profile_prefix"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"profile_stages": ["decode"]}, "profile_stages"),
        ({"merge_profiles": True}, "merge_profiles"),
    ],
    ids=str,
)
def test_refused(server: Server, body: dict[str, Any], param: str) -> None:
    message = refusal(post(server, "/start_profile", body), param)
    assert "/proc" not in message and "Traceback" not in message
    refusal(post(server, "/stop_profile"), None)


def test_idle_and_unfinished_profiles_do_no_harm(server: Server, tmp_path: Path) -> None:
    assert httpx.get(f"{server.url}/start_profile", timeout=60).status_code == 200  # SGLang takes GET too
    assert httpx.get(f"{server.url}/stop_profile", timeout=60).status_code == 200
    assert post(server, "/start_profile", {"output_dir": str(tmp_path)}).status_code == 200
    server.assert_live()
