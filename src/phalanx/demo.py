"""`make demo`: bring a real model, serve it, chat with it, benchmark it, stop it.

Every step is a command that a user would type; the demo prints each before it runs it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

_READY_S = 120
_QUESTION = "Why is the sky blue? Answer in two sentences."


def _say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def _command(*words: str) -> list[str]:
    _say("$ phalanx " + shlex.join(words))
    return [sys.executable, "-m", "phalanx", *words]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"demo: the server ended with code {server.returncode}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"demo: the server was not ready after {_READY_S} s")


def _chat(port: int) -> None:
    """Ask one question and print the answer as it arrives."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": _QUESTION}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 120,
    }
    _say(f"POST /v1/chat/completions: {_QUESTION}")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"demo: {response.status} {response.read().decode()}")
    text = ""
    for line in response:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise SystemExit(f"demo: {event['error']['message']}")
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            text += piece
            print(piece, end="", flush=True)
    print()
    if not text.strip():
        raise SystemExit("demo: the answer was empty")


def main() -> int:
    """Run the demo. Returns 0 if everything worked and no process is left behind."""
    print("Phalanx demo: a model, a server, a question, a benchmark. Two to five minutes on two cores.")
    subprocess.run(_command("pull", "smollm2"), check=True)
    port = _free_port()
    server = subprocess.Popen(_command("serve", "--model", "smollm2", "--port", str(port)))
    try:
        _wait_until_ready(server, port)
        _chat(port)
        bench = "bench serving --backend sglang --tokenizer smollm2 --dataset-name random --num-prompts 200"
        bench += f" --random-input-len 20 --random-output-len 128 --port {port} --output-file {os.devnull}"
        subprocess.run(_command(*bench.split()), check=True)
    finally:
        _say("stopping the server")
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            code = server.wait()
    if code != 0:
        raise SystemExit(f"demo: the server ended with code {code}")
    _say("done: the server has stopped. Next: source .venv/bin/activate && phalanx serve --model smollm2")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    except subprocess.CalledProcessError as error:
        sys.exit(f"demo: {shlex.join(error.cmd)} ended with code {error.returncode}")
