"""How long Python's cyclic collector stops an API worker and the engine's loop, before and after its tuning.

    python benchmarks/gc_pauses.py [--streams 4096] [--seconds 20]

A real API worker process with real sockets and the null engine in its own process, once with Python's
defaults (collections whenever enough objects were made, nothing frozen), once as served ("tuned"), and once
with the collection that a process without idle time gets every 15 minutes every 5 seconds ("busy"). Every
stream is a streaming /generate of 64 tokens; a finished one is followed by the next on the same connection.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from phalanx.config.cli import build_parser
from phalanx.runtime import collector, engine_process, launch
from phalanx.runtime.models import settle_settings
from phalanx.runtime.run_dir import run_directory
from phalanx.server import __main__ as api_worker
from phalanx.server import housekeeping

_MODE, _OUT = "PHALANX_GC_MODE", "PHALANX_GC_OUT"
_CHILD = "gc_pauses"


class PauseMeter:
    """Times collections through gc.callbacks, in CPU time of the thread: other processes do not count.

    A pause at idle is nobody's wait, and is counted apart.
    """

    def __init__(self) -> None:
        self.figures = {"longest_ms": 0.0, "all_ms": 0.0, "count": 0, "longest_idle_ms": 0.0}
        self.is_idle = False
        self._began_s = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._began_s = now_s
            return
        pause_ms = (now_s - self._began_s) * 1e3
        longest = "longest_idle_ms" if self.is_idle else "longest_ms"
        self.figures[longest] = max(self.figures[longest], pause_ms)
        self.figures["all_ms"] += pause_ms
        self.figures["count"] += 1


def child() -> int:
    """One of the server's processes, with the collections measured that come after its start."""
    meter, is_tuned = PauseMeter(), os.environ[_MODE] != "default"
    if os.environ[_MODE] == "busy":
        collector._AT_LEAST_EVERY_S = 5.0
    is_engine = "--worker-id" not in sys.argv

    def settle_heap() -> None:
        if is_tuned:
            collector.settle_heap()
        meter.start()

    class Collector(collector.IdleCollector):
        def worked(self) -> None:
            if is_tuned:
                super().worked()

        def idle(self) -> None:
            meter.is_idle = True
            if is_tuned:
                super().idle()
            meter.is_idle = False

    for module in (engine_process, api_worker):
        module.settle_heap = settle_heap
    for module in (engine_process, housekeeping):
        module.IdleCollector = Collector
    try:
        return engine_process.main() if is_engine else api_worker.main()
    finally:
        Path(os.environ[_OUT], "engine" if is_engine else "worker").write_text(json.dumps(meter.figures))


def serve(flags: list[str]) -> int:
    """A launcher whose processes are `child`."""
    args = build_parser().parse_args(flags)
    launch._WORKER_MODULE = _CHILD
    with run_directory() as run_dir:
        listener = launch.bind(args.host, args.port)
        launch.setup_logging("warning", "launch")
        return launch.Launcher(settle_settings(args), listener, run_dir, _CHILD).run()


async def load(port: int, num_streams: int, seconds: float) -> int:
    """Keep `num_streams` streams running; returns how many have ended."""
    body = json.dumps(
        {
            "input_ids": list(range(5, 37)),
            "stream": True,
            "sampling_params": {"max_new_tokens": 64, "ignore_eos": True},
        }
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    until, done = time.monotonic() + seconds, 0

    async def one() -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
        while time.monotonic() < until:
            writer.write(head + body)
            await reader.readuntil(b"[DONE]")
            await reader.readuntil(b"0\r\n\r\n")
            done += 1
        writer.close()

    await asyncio.gather(*(one() for _ in range(num_streams)))
    return done


def measure(mode: str, num_streams: int, seconds: float, step_ms: float) -> dict[str, Any]:
    """Run a server in this mode under load."""
    with tempfile.TemporaryDirectory() as out:
        port = launch.bind("127.0.0.1", 0).getsockname()[1]
        flags = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "null", "--port", str(port)]
        flags += ["--max-running-requests", str(num_streams), "--null-step-ms", str(step_ms)]
        flags += ["--api-workers", "1", "--incremental-streaming-output"]
        env = {**os.environ, _MODE: mode, _OUT: out, "PYTHONPATH": str(Path(__file__).parent)}
        server = subprocess.Popen([sys.executable, __file__, "--serve", *flags], env=env)
        try:
            _wait_ready(server, port)
            done = asyncio.run(load(port, num_streams, seconds))
            time.sleep(3)  # idle: the tuned server collects now
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        parts = {name: json.loads(Path(out, name).read_text()) for name in ("worker", "engine")}
    return {"mode": mode, "requests": done, **parts}


def _wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the server did not become ready")


def main() -> int:
    if "--settings" in sys.argv:
        return child()
    if "--serve" in sys.argv:
        return serve(sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=100.0)
    args = parser.parse_args()
    gc.disable()  # the load's own pauses are nobody's business
    print(f"{args.streams} streams, {args.seconds:g} s, a step every {args.step_ms:g} ms at most")
    print(f"{'':16}{'longest ms':>12}{'at idle':>12}{'all ms':>10}{'count':>8}")
    for mode in ("default", "tuned", "busy"):
        result = measure(mode, args.streams, args.seconds, args.step_ms)
        for name in ("worker", "engine"):
            longest, total, count, idle = result[name].values()
            print(f"{mode + ' ' + name:16}{longest:12.1f}{idle:12.1f}{total:10.0f}{count:8}")
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
