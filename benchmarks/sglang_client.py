"""The same fixed workload on one scripted server, through SGLang's own client and through ours, in turn.

    python benchmarks/sglang_client.py --sglang-path DIR[:DIR...] --repeats 5

`--sglang-path` is where an unpacked wheel of sglang (no engine needed) and what its client imports are found;
left out, the current environment is asked. Prints the median over the repeats of each figure of both, their
ratio, and one JSON line last. Below them stands the time that the server itself took from reading a request
to writing its first token: what a client reports above it is transport and the client. Exit code 1 when
request or token counts differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# The client takes one constant from a module of the engine that would import the vision stack; nothing of the
# client itself is replaced.
LAUNCH = """
import runpy, sys, types
shim = types.ModuleType("sglang.srt.disaggregation.utils")
shim.FAKE_BOOTSTRAP_HOST = "2.2.2.2"
sys.modules[shim.__name__] = shim
runpy.run_module("sglang.benchmark.serving", run_name="__main__")
"""
COUNTS = ("completed", "total_input_tokens", "total_output_tokens", "total_output_tokens_retokenized")
FIGURES = (
    "duration",
    "request_throughput",
    "output_throughput",
    "concurrency",
    *(
        f"{which}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2e_latency")
        for which in ("mean", "median", "p90", "p95", "p99")
    ),
)


def write_tokenizer(folder: str) -> None:
    """A tokenizer of whitespace-separated words, so that text has a length that nobody can argue about."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"w": 0, **{f"x{i}": i for i in range(1, 1000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w").save_pretrained(folder)


def run_client(command: list[str], out: Path, sglang_path: str, quiet: bool) -> dict:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if sglang_path:
        env["PYTHONPATH"] = sglang_path
    done = subprocess.run(command, env=env, capture_output=quiet, text=True, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"{command[:3]} failed: {(done.stderr or '')[-2000:]}")
    return json.loads(out.read_text().splitlines()[-1])


def server_ttfts(times: list[tuple[float, float]], num_runs: int) -> list[dict]:
    """The server's own TTFT of each run, in ms; every run begins with one warm-up request."""
    runs = np.split(np.diff(np.asarray(times)).ravel() * 1e3, num_runs)
    return [
        {"mean": run[1:].mean(), **{f"p{q}": np.percentile(run[1:], q) for q in (50, 90, 95, 99)}}
        for run in runs
    ]


def measure(args: argparse.Namespace, folder: str) -> tuple[list[dict], list[dict]]:
    """Run both clients in turn; the server's TTFT of each run is in its result as `server_ttft_ms`."""
    times_file = Path(folder) / "times.json"
    server = [sys.executable, str(ROOT / "tests" / "e2e" / "sse_server.py")]
    server += ["--num-tokens", str(args.num_tokens), "--interval-ms", str(args.interval_ms)]
    server += ["--first-ms", str(args.first_ms), "--times-file", str(times_file)]
    in_order = []
    theirs, ours = [], []
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        port = process.stdout.readline().strip()
        common = ["--backend", "sglang", "--host", "127.0.0.1", "--port", port, "--tokenizer", folder]
        common += ["--dataset-name", "random-ids", "--random-input-len", "8", "--random-range-ratio", "1.0"]
        common += ["--random-output-len", str(args.num_tokens), "--num-prompts", str(args.num_prompts)]
        common += ["--max-concurrency", str(args.max_concurrency), "--disable-tqdm"]
        for repeat in range(args.repeats):
            pair = [("-c", LAUNCH, theirs), ("-m", "phalanx.bench_serving", ours)]
            for option, program, results in pair if repeat % 2 == 0 else pair[::-1]:
                out = Path(folder) / f"{len(theirs)}_{len(ours)}.jsonl"
                command = [sys.executable, option, program, *common, "--output-file", str(out)]
                results.append(run_client(command, out, args.sglang_path if results is theirs else "", True))
                in_order.append(results[-1])
        process.communicate("")
    for run, ttft in zip(
        in_order, server_ttfts(json.loads(times_file.read_text()), len(in_order)), strict=True
    ):
        run["server_ttft_ms"] = ttft
    return theirs, ours


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sglang-path", default="")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--interval-ms", type=float, default=50.0)
    parser.add_argument("--first-ms", type=float, default=300.0)
    parser.add_argument("--max-concurrency", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder)
        theirs, ours = measure(args, folder)
    counts = {name: [sorted({run[name] for run in runs}) for runs in (theirs, ours)] for name in COUNTS}
    figures = {
        name: [statistics.median(run[name] for run in runs) for runs in (theirs, ours)] for name in FIGURES
    }
    for name, (a, b) in counts.items():
        print(f"{name:<34} {a!s:>12} {b!s:>12}")
    print(f"{'median of the repeats':<34} {'SGLang':>12} {'Phalanx':>12} {'ratio':>8}")
    for name, (a, b) in figures.items():
        print(f"{name:<34} {a:>12.2f} {b:>12.2f} {b / a:>8.3f}")
    server = {
        name: [statistics.median(run["server_ttft_ms"][name] for run in runs) for runs in (theirs, ours)]
        for name in theirs[0]["server_ttft_ms"]
    }
    print("TTFT by the server itself (request read to first token written), and what the client adds to it")
    for name, (a, b) in server.items():
        client = [figures[f"{'median' if name == 'p50' else name}_ttft_ms"][side] for side in (0, 1)]
        print(f"{name:<34} {a:>12.2f} {b:>12.2f}    added: {client[0] - a:>8.2f} {client[1] - b:>8.2f}")
    same = all(a == b for a, b in counts.values())
    print(json.dumps({"same_counts": same, "counts": counts, "figures": figures, "server_ttft_ms": server}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
