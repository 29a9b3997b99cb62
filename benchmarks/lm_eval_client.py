"""lm-eval's API model against Phalanx, its scores beside those of transformers.

    python benchmarks/lm_eval_client.py --lm-eval-python VENV/bin/python

VENV has `pip install "lm-eval[api]"`; neither model nor tokenizer is loaded there. Two small tasks are
written to a folder: multiple choice (echo and logprobs of the prompt) and text up to a stop string. lm-eval
asks /v1/completions for both, with /tokenizer_info and /tokenize for its tokens; every log-probability and
text that it logs is compared with transformers' in this process, in float32. Prints the texts and one JSON
line last. Exit code 1 when a log-probability differs by more than 1e-3, or a text at all.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # tests.models.tiny

CHOICES = [
    ("The capital of France is", [" Paris", " London", " a river", " blue"]),
    ("The opposite of hot is", [" cold", " warm", " red", " Tuesday"]),
    ("Two plus two equals", [" four", " five", " seven", " nine"]),
    ("The sun rises in the", [" east", " west", " sea of glass", " kitchen"]),
    ("Water freezes at zero degrees", [" Celsius", " Kelvin", " of freedom", " north"]),
    ("A baby dog is called a", [" puppy", " kitten", " calf", " lamb"]),
    ("The first month of the year is", [" January", " June", " December", " Monday"]),
    ("Bees make", [" honey", " milk", " wool", " iron"]),
]
TEXTS = ["A, B, C, D, E,", "1, 2, 3, 4, 5,", "Monday, Tuesday, Wednesday,", "Once upon a time, there was a"]
UNTIL, MAX_TOKENS = ["\n", "."], 24
CHOICE_TASK = """task: phalanx_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
UNTIL_TASK = """task: phalanx_until
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: ""
generation_kwargs: {until: %s, max_gen_toks: %d, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def write_tasks(folder: Path) -> None:
    rows = [{"question": q, "choices": c} for q, c in CHOICES]
    (folder / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "until.jsonl").write_text("".join(json.dumps({"question": t}) + "\n" for t in TEXTS))
    (folder / "choice.yaml").write_text(CHOICE_TASK % (folder / "choice.jsonl"))
    (folder / "until.yaml").write_text(UNTIL_TASK % (folder / "until.jsonl", json.dumps(UNTIL), MAX_TOKENS))


def run_lm_eval(args: argparse.Namespace, folder: Path, port: int) -> dict[str, list[dict]]:
    """Both tasks; returns what was logged of each sample, by task."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    model_args = (
        f"model={args.model},base_url={url},num_concurrent={args.num_concurrent},tokenizer_backend=auto"
    )
    command = [
        args.lm_eval_python,
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        model_args,
    ]
    command += ["--batch_size", str(args.batch_size), "--tasks", "phalanx_choice,phalanx_until"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(
            f"lm-eval failed: {done.stderr[-9000:]}\nserver: {(folder / 'log').read_text()[-3000:]}"
        )
    samples = {}
    for name in ("phalanx_choice", "phalanx_until"):
        (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        samples[name] = sorted(rows, key=lambda row: row["doc_id"])
    return samples


class Reference:
    """The same weights run by transformers; generation never stops by itself."""

    def __init__(self, model: str) -> None:
        import torch
        from tests.models.tiny import hf_from_source

        from phalanx.models.configs import load_model_config
        from phalanx.models.source import resolve_source
        from phalanx.text.tokenizer import load_tokenizer

        source = resolve_source(model)
        self._torch = torch
        self._tokenizer = load_tokenizer(source.tokenizer_path)
        self._model = hf_from_source(source, load_model_config(source))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        torch = self._torch
        prompt, ids = self._encode(context), self._encode(context + continuation)
        with torch.no_grad():
            logprobs = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
        steps = range(len(prompt) - 1, len(ids) - 1)
        total = sum(float(logprobs[i, ids[i + 1]]) for i in steps)
        return total, all(int(logprobs[i].argmax()) == ids[i + 1] for i in steps)

    def text_until(self, prompt: str) -> str:
        ids = self._torch.tensor([self._encode(prompt)])
        with self._torch.no_grad():
            out = self._model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
        text = self._tokenizer.decode(out[0, ids.shape[1] :].tolist())
        return min((text.split(stop)[0] for stop in UNTIL), key=len)


def compare(samples: dict[str, list[dict]], reference: Reference) -> dict:
    worst, num_scores, wrong = 0.0, 0, []
    for sample, (question, choices) in zip(samples["phalanx_choice"], CHOICES, strict=True):
        for response, choice in zip(sample["filtered_resps"], choices, strict=True):
            score, is_greedy = float(response[0]), str(response[1]) == "True"
            expected, greedy = reference.loglikelihood(question, choice)
            worst, num_scores = max(worst, abs(score - expected)), num_scores + 1
            if is_greedy != greedy or abs(score - expected) > 1e-3:
                wrong.append((question, choice, score, expected, is_greedy, greedy))
    for sample, prompt in zip(samples["phalanx_until"], TEXTS, strict=True):
        text, expected = sample["resps"][0][0], reference.text_until(prompt)
        print(f"{prompt!r} -> {text!r}")
        if text != expected:
            wrong.append((prompt, text, expected))
    accuracy = sum(row["acc"] for row in samples["phalanx_choice"]) / len(CHOICES)
    return {
        "scores": num_scores,
        "worst_logprob_difference": worst,
        "texts": len(TEXTS),
        "accuracy": accuracy,
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lm-eval-python", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-concurrent", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    args = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "phalanx.launch_server", "--model", args.model, "--port", str(port)]
    command += ["--dtype", "float32", "--max-total-tokens", "8192", "--context-length", "2048"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_ready(server, port, folder / "log")
            samples = run_lm_eval(args, folder, port)
        finally:
            server.terminate()
            server.wait(60)
    result = compare(samples, Reference(args.model))
    print(f"log-probabilities: {result['scores']}, off by at most {result['worst_logprob_difference']:.2e}")
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


def wait_ready(server: subprocess.Popen, port: int, log: Path, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server is not ready: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
