"""An engine without a model, behind the real channel: it says what a script tells it to.

Run as a program it is an engine process that can be killed; in a thread, tests steer it.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from phalanx.core.request import EngineRequest
from phalanx.core.step import Finish, StepOutputs, TokenLogprobs
from phalanx.messages import Abort, Control, ControlReply, EngineReady, Submit
from phalanx.runtime.channels import EngineChannel, EngineEnd

PAGE_SIZE, TOTAL_PAGES = 16, 64
Reply = Callable[[EngineRequest], list[int]]


def count_up(request: EngineRequest) -> list[int]:
    """Without a script: tokens 'a', 'b', ... of a byte tokenizer."""
    return [97 + i % 26 for i in range(request.max_new_tokens)]


def logprob_of(token: int) -> float:
    """A value that tests can compute too."""
    return -(token % 16) / 8


@dataclass
class Running:
    request: EngineRequest
    tokens: list[int]
    position: int = 0
    prompt_is_told: bool = False


@dataclass
class FakeEngine:
    """Serves `channel` until stopped.

    reply: request -> the tokens the model "samples"; past their end it goes on with token 97.
    budget: tokens each stream may get; None is no limit. refuse: what `Scheduler.add` would refuse.
    """

    channel: EngineEnd
    num_workers: int = 1
    reply: Reply = count_up
    refuse: Callable[[EngineRequest], tuple[int, str] | None] = lambda request: None
    budget: int | None = None
    step_s: float = 0.0
    info: dict = field(default_factory=dict)
    seen: list[EngineRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    running: dict[int, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stopping = threading.Event()
        self.step_id = 0
        self.num_tokens = 0

    def announce(self) -> None:
        for worker in range(self.num_workers):
            self.channel.send(worker, EngineReady(self.info))

    def run(self) -> None:
        while not self.stopping.is_set():
            for worker, message in self.channel.recv(0 if self.has_work() else 5):
                self.handle(worker, message)
            if self.has_work():
                self.channel.send_outputs(self.step())
                if self.step_s:
                    time.sleep(self.step_s)

    def has_work(self) -> bool:
        return any(self.budget is None or r.position < self.budget for r in self.running.values())

    def handle(self, worker: int, message: object) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                self.add(request)
        elif isinstance(message, Abort):
            for stream_id in message.stream_ids:
                self.aborted.append(stream_id)
                if self.running.pop(stream_id, None) is not None:
                    self.channel.send_outputs(one_row(stream_id, Finish.ABORT))
        elif isinstance(message, Control):
            ok = message.op != "flush_cache" or not self.running
            data = self.stats() if message.op == "stats" else {}
            self.channel.send(worker, ControlReply(message.id, ok, data))

    def add(self, request: EngineRequest) -> None:
        self.seen.append(request)
        refusal = self.refuse(request)
        if refusal is not None:
            outputs = one_row(request.stream_id, Finish.ABORT, ((request.stream_id, *refusal),))
            self.channel.send_outputs(outputs)
        else:
            self.running[request.stream_id] = Running(request, list(self.reply(request)))

    def stats(self) -> dict[str, int]:
        held = len(self.running)
        return {
            "running": held,
            "queued": 0,
            "page_size": PAGE_SIZE,
            "pages_total": TOTAL_PAGES,
            "pages_free": TOTAL_PAGES - held,
            "pages_held": held,
            "pages_cached": 0,
            "requests_total": len(self.seen),
            "prompt_tokens_total": sum(len(r.input_ids) for r in self.seen),
            "generated_tokens_total": self.num_tokens,
        }

    def step(self) -> StepOutputs:
        rows, tokens, finish, logprobs, prompt_logprobs = [], [], [], [], []
        for stream_id, r in list(self.running.items()):
            if self.budget is not None and r.position >= self.budget:
                continue
            limit = r.request.max_new_tokens
            token = r.tokens[r.position] if r.position < len(r.tokens) else 97
            end = Finish.LENGTH if r.position + 1 >= limit else Finish.NONE
            if token < 0:
                end = Finish.ERROR
            elif token in r.request.stop_ids and r.position + 1 >= r.request.sampling.min_new_tokens:
                end = Finish.STOP
            if limit == 0:
                token, end = -1, Finish.LENGTH
            if r.request.logprobs is not None:
                if token >= 0:
                    logprobs.append((len(rows), token, r.request))
                if not r.prompt_is_told and r.request.logprobs.prompt_start >= 0:
                    start = max(1, r.request.logprobs.prompt_start)
                    prompt_logprobs += [(len(rows), int(t), r.request) for t in r.request.input_ids[start:]]
            r.prompt_is_told = True
            rows.append(stream_id)
            tokens.append(max(token, -1))
            finish.append(end)
            r.position += 1
            self.num_tokens += token >= 0
            if end:
                del self.running[stream_id]
        self.step_id += 1
        errors = tuple((s, 500, "not finite") for s, f in zip(rows, finish, strict=True) if f == Finish.ERROR)
        return StepOutputs(
            self.step_id,
            np.array(rows, np.int64),
            np.array(tokens, np.int32),
            np.array(finish, np.uint8),
            token_logprobs(logprobs),
            token_logprobs(prompt_logprobs),
            errors,
        )


def one_row(stream_id: int, finish: Finish, errors: tuple = ()) -> StepOutputs:
    row = np.array([stream_id], np.int64), np.array([-1], np.int32), np.array([finish], np.uint8)
    return StepOutputs(-1, *row, errors=errors)


def token_logprobs(positions: list[tuple[int, int, EngineRequest]]) -> TokenLogprobs | None:
    """top-k of token t are t, t+1, ...; asked-for ids get their own value."""
    if not positions:
        return None
    top = [[t + j for j in range(r.logprobs.top_k)] for _, t, r in positions]
    asked = [list(r.logprobs.token_ids) for _, _, r in positions]

    def csr(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        flat = [i for row in rows for i in row]
        indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        return indptr, np.array(flat, np.int32), np.array([logprob_of(i) for i in flat], np.float32)

    return TokenLogprobs(
        np.array([row for row, _, _ in positions], np.int32),
        np.array([t for _, t, _ in positions], np.int32),
        np.array([logprob_of(t) for _, t, _ in positions], np.float32),
        *csr(top),
        *csr(asked),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ipc-dir", required=True)
    parser.add_argument("--budget", type=int, required=True)
    args = parser.parse_args()
    engine = FakeEngine(EngineChannel(args.ipc_dir, 1), budget=args.budget, info={"pid": os.getpid()})
    engine.announce()
    engine.run()


if __name__ == "__main__":
    sys.exit(main())
