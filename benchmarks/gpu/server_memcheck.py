"""A small server run under compute-sanitizer: `phalanx serve`, a few requests of every kind, SIGTERM.

usage: python benchmarks/gpu/server_memcheck.py LOG_FOLDER [--tool memcheck] [serve flags...]

Starts the server with a tiny dummy model as a child of compute-sanitizer, which follows it into its
processes, sends requests over HTTP, checks that each is answered as it should be, and stops the server. Exits
with 0 if the sanitizer found nothing, the answers were right and the server ended by itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ERRORS_FOUND = 99
READY_S = 200
SERVE = (
    "--model tiny-llama --load-format dummy --dtype bfloat16 --random-seed 0 --context-length 512 "
    "--max-running-requests 16 --max-total-tokens 4096 --chunked-prefill-size 64"
)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0, "logit_bias": {"5": 4.0}, "min_new_tokens": 3},
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "initcheck", "none"))
    args, flags = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    log = args.folder / f"server-{args.tool}.log"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "phalanx", "serve", *SERVE.split(), *flags, "--port", str(port)]
    if args.tool != "none":
        options = f"--tool {args.tool} --target-processes all --error-exitcode {ERRORS_FOUND}"
        command = ["compute-sanitizer", *options.split(), *command]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        ready_s = wait_ready(url, process)
        answered = exchange(url)
    finally:
        code = stop(process, port)
    summaries = re.findall(r"ERROR SUMMARY: (\d+) error", log.read_text(errors="replace"))
    ok = code == 0 and (args.tool == "none" or (bool(summaries) and set(summaries) == {"0"}))
    record = {
        "tool": args.tool,
        "flags": flags,
        "ready_s": round(ready_s, 1),
        "requests": answered,
        "exit_code": code,
        "errors": [int(n) for n in summaries],
        "ok": ok,
    }
    print(json.dumps(record))
    return 0 if ok else 1


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> float:
    start = time.monotonic()
    while time.monotonic() - start < READY_S:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode} before it was ready")
        try:
            if urllib.request.urlopen(f"{url}/health", timeout=5).status == 200:
                return time.monotonic() - start
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"the server was not ready after {READY_S} s")


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def exchange(url: str) -> int:
    """More requests than rows, of every kind, prompts of one and of many chunks. Returns their number."""

    def one(i: int) -> None:
        sampling = {**SAMPLINGS[i % len(SAMPLINGS)], "max_new_tokens": 1 + i % 20, "ignore_eos": True}
        ids = [3 + (7 * i + j) % 500 for j in range((1, 17, 64, 65, 200)[i % 5])]
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": i % 4 == 0}
        if i % 4 == 0:
            body |= {"logprob_start_len": 0, "top_logprobs_num": 3}
        status, reply = post(url, body)
        assert status == 200, reply
        assert len(reply["output_ids"]) == sampling["max_new_tokens"], reply

    count = 40
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(count)))
    assert post(url, {"input_ids": [10**6]})[0] == 400
    same = [
        post(url, {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 12}})
        for _ in range(2)
    ]
    assert same[0][1]["output_ids"] == same[1][1]["output_ids"]
    deadline = time.monotonic() + 10
    while True:
        with urllib.request.urlopen(f"{url}/server_info", timeout=10) as reply:
            kv = json.load(reply)["kv_cache"]
        if kv["free_pages"] == kv["total_pages"]:
            break
        assert time.monotonic() < deadline, kv
    return count + 3


def stop(process: subprocess.Popen[bytes], port: int) -> int:
    """SIGTERM to the launcher (under the sanitizer its child) and the exit code."""
    if process.poll() is None:
        os.kill(_launcher(process.pid, port), signal.SIGTERM)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return -9


def _launcher(pid: int, port: int) -> int:
    """The process below `pid` that is `phalanx serve`; `pid` itself where there is no sanitizer."""
    import psutil

    for child in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        line = child.cmdline()
        if "serve" in line and str(port) in line and Path(line[0]).name.startswith("python"):
            return child.pid
    return pid


if __name__ == "__main__":
    sys.exit(main())
