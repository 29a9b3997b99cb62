"""The seed's workload over HTTP: `phalanx serve` and `phalanx bench serving` on one host, on cores apart.

usage: python benchmarks/gpu/http_serving.py OUTPUT_FOLDER [--models llama-3-8b,qwen3-0.6b]
           [--modes seed,graphs] [--repeats 3] [--client-cores 6] [--num-prompts 5000] [--serve "FLAGS"]

Dummy bf16 weights, 5000 prompts of 1-32 tokens in (as text) and 1-128 out, streamed, 4096 running. "seed" is
the command line of SGLang's PR #1262, "graphs" the same without --disable-cuda-graph. Each run's JSON line is
added to OUTPUT_FOLDER/http_serving.jsonl with the CPU share of the engine and of every API worker in the run;
what stands there is not run again. Ends with a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from common import add, median_and_range, read

SEED_FLAGS = (
    "--trust-remote-code --context-length 4096 --max-running-requests 4096 --tensor-parallel-size 1 "
    "--chunked-prefill-size -1 --disable-radix-cache"
)
MODES = {"seed": f"{SEED_FLAGS} --disable-cuda-graph", "graphs": SEED_FLAGS}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped as well
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="llama-3-8b,qwen3-0.6b")
    parser.add_argument("--modes", default="seed,graphs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=5000)
    parser.add_argument(
        "--client-cores", type=int, default=6, help="the last ones; the server has the others"
    )
    parser.add_argument("--serve", default="", help="more flags for the server")
    parser.add_argument("--bench", default="", help="more flags for the client")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--start-up-s", type=float, default=180)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.folder / "http_serving.jsonl"
    is_whole = True
    for model in args.models.split(","):
        for mode in args.modes.split(","):
            done = sum(r["model"] == model and r["mode"] == mode for r in read(results))
            if done < args.repeats:
                is_whole &= measure(model, mode, args.repeats - done, results, args)
    print_table(read(results))
    return int(not is_whole)


def measure(model: str, mode: str, repeats: int, results: Path, args: argparse.Namespace) -> bool:
    """Start a server, run the client `repeats` times after a short run, end the server."""
    cores = sorted(os.sched_getaffinity(0))
    client_cores = set(cores[-args.client_cores :])
    server_cores = set(cores[: -args.client_cores]) or set(cores)
    flags = f"--model {model} --load-format dummy {MODES[mode]} --port {args.port} {args.serve}"
    command = [sys.executable, "-m", "phalanx.launch_server", *shlex.split(flags)]
    log_path = args.folder / f"http_serving-{model}-{mode}.log"
    started = time.monotonic()
    with log_path.open("a") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, server_cores)
        )
        try:
            wait_ready(server, args)
            ready_s = time.monotonic() - started
            client(model, 200, None, client_cores, args)
            for _ in range(repeats):
                record = one_run(server.pid, model, args, client_cores)
                record |= {"model": model, "mode": mode, "ready_s": round(ready_s, 1)}
                record["server_cores"] = len(server_cores)
                add(results, record)
                print(f"{model} {mode}: {record['request_throughput']:.1f} req/s", flush=True)
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"{model} {mode}: {error}", *log_path.read_text().splitlines()[-12:], sep="\n")
            return False
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    return True


def wait_ready(server: subprocess.Popen[bytes], args: argparse.Namespace) -> None:
    deadline = time.monotonic() + args.start_up_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with code {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{args.port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready in {args.start_up_s:g} s")


def client(
    model: str, num_prompts: int, output: Path | None, cores: set[int], args: argparse.Namespace
) -> None:
    flags = (
        f"--backend sglang --base-url http://127.0.0.1:{args.port} --tokenizer {model} --dataset-name random "
        f"--num-prompts {num_prompts} --random-input-len 32 --random-output-len 128 {args.bench}"
    )
    command = [sys.executable, "-m", "phalanx.bench_serving", *shlex.split(flags)]
    if output is not None:
        command += ["--output-file", str(output)]
    with (args.folder / "http_serving-client.log").open("a") as log:
        subprocess.run(
            command,
            stdout=log,
            stderr=log,
            check=True,
            timeout=240,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )


def one_run(launcher: int, model: str, args: argparse.Namespace, cores: set[int]) -> dict[str, Any]:
    """The client's JSON line, and the CPU seconds that each of the server's processes took in the run."""
    output = args.folder / "http_serving-run.jsonl"
    output.unlink(missing_ok=True)
    before = cpu_seconds(launcher)
    client(model, args.num_prompts, output, cores, args)
    after = cpu_seconds(launcher)
    record: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    # Outside the run the server is idle, so its CPU seconds are the run's, whose length the client knows.
    record["server_cpu_share"] = {
        name: round((after[name] - before[name]) / record["duration"], 3) for name in after if name in before
    }
    return record


def cpu_seconds(launcher: int) -> dict[str, float]:
    """CPU seconds so far of the launcher's children: "engine", "worker 0", ..."""
    found, workers = {}, 0
    for stat in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda p: int(p.parent.name)):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
            words = (stat.parent / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if int(fields[1]) != launcher:
            continue
        name = "engine"
        if "engine_process" not in words:
            name, workers = f"worker {workers}", workers + 1
        found[name] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


def print_table(records: list[dict[str, Any]]) -> None:
    print(
        "model | mode | req/s, median (range) | runs | TTFT P50/P99, ms | ITL P50/P99, ms | engine | workers"
    )
    for key in dict.fromkeys((r["model"], r["mode"]) for r in records):
        runs = [r for r in records if (r["model"], r["mode"]) == key]
        rates = [r["request_throughput"] for r in runs]
        middle = sorted(runs, key=lambda r: r["request_throughput"])[len(runs) // 2]
        share = middle["server_cpu_share"]
        workers = "+".join(f"{value:.2f}" for name, value in share.items() if name != "engine")
        medians = [
            f"{middle[f'median_{name}_ms']:.0f}/{middle[f'p99_{name}_ms']:.0f}" for name in ("ttft", "itl")
        ]
        rate = median_and_range(rates, ".1f")
        print(
            f"{key[0]} | {key[1]} | {rate} | {len(runs)} | "
            f"{' | '.join(medians)} | {share.get('engine', float('nan')):.2f} | {workers}"
        )


if __name__ == "__main__":
    sys.exit(main())
