"""Steps of a running engine: steady decode, steps with arrivals, and the model's linear layers alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import HBM_BYTES_PER_S, median_us
from traces import trace


@dataclass(frozen=True)
class Window:
    """Which decode steps are measured, and of what.

    first, last: steps after the one in which the last prompt entered, from 2 on, the last one included;
    num_traced more follow.
    """

    num_requests: int = 4096
    prompt_len: int = 32
    output_len: int = 256
    first: int = 64
    last: int = 192
    num_traced: int = 16


def fitting_output_len(window: Window, pool_tokens: int, page_size: int) -> int:
    """The window's, or the longest whose pages the pool holds for all requests at once."""
    pages = pool_tokens // page_size // window.num_requests
    return min(window.output_len, pages * page_size - window.prompt_len)


def steady_decode(llm: Any, window: Window, run: int = 0) -> dict[str, Any]:
    """All requests decoding: milliseconds of a step over the window's steps, then a trace.

    Prompts enter in several steps, so the first requests are ahead of the last ones. Where outputs are too
    short for the window, it ends early enough that no request ends in a step that is measured or traced.

    Raises:
        ValueError: there is no such window, or the outputs end before it.
        RuntimeError: a step was not of all requests.
    """
    if window.first < 2:
        raise ValueError(f"the first step must be 2 or later, not {window.first}: one is in flight before it")
    worker, count = llm._worker, window.num_requests
    pool_tokens, page_size = llm.info["max_total_num_tokens"], llm.settings.cache.page_size
    output_len = fitting_output_len(window, pool_tokens, page_size)
    rng = np.random.default_rng(1 + run)
    ids = rng.integers(0, llm.settings.model.vocab_size, (count, window.prompt_len)).astype(np.int32)
    _submit(llm, ids, [output_len] * count)
    num_entering = 0
    while worker.scheduler.num_queued or worker.scheduler._partial is not None:
        worker.step()
        num_entering += 1
    last = min(window.last, output_len - num_entering - window.num_traced)
    if last < window.first:
        raise ValueError(
            f"outputs of {output_len}, entering in {num_entering} steps, end before step {window.first}"
            f" and {window.num_traced} traced ones; the pool holds {pool_tokens} tokens"
        )
    for _ in range(window.first - 2):
        worker.step()
    context = mean_context(worker)
    worker.step()  # the run-ahead loop reads a step late: one must be in flight when the clock starts
    host = HostTimes(worker)
    step_ms = _step_ms(worker, last - window.first + 1)
    context = (context + mean_context(worker)) / 2
    times = host.summary()
    traced = trace(worker, window.num_traced)
    host.stop()
    if host.decode_rows != {count}:
        raise RuntimeError(f"measured steps had {sorted(host.decode_rows)} decode rows, not always {count}")
    _end(worker, count)
    config = llm.settings.model
    kv_bytes = 2 * 2 * config.num_kv_heads * config.head_dim * config.num_layers * count
    return {
        "output_len": output_len,
        "num_entering_steps": num_entering,
        "first_step": window.first,
        "last_step": last,
        "num_traced": window.num_traced,
        "step_ms": step_ms,
        "mean_context": context,
        "kv_ms": context * kv_bytes / HBM_BYTES_PER_S * 1e3,
        **times,
        **traced,
    }


def mixed_steps(
    llm: Any, num_requests: int = 12000, first: int = 100, num_steps: int = 30, num_traced: int = 16
) -> dict[str, Any]:
    """The offline workload with more requests: all rows decode, and as many prompts enter as outputs end."""
    from phalanx.microbench.offline import draw_workload

    worker = llm._worker
    prompts, lens = draw_workload(num_requests, 32, 128, 0.0, llm.settings.model.vocab_size, 7)
    _submit(llm, prompts, lens)
    for _ in range(first):
        worker.step()
    host = HostTimes(worker)
    before = worker.scheduler.num_queued
    step_ms = _step_ms(worker, num_steps)
    arrivals = (before - worker.scheduler.num_queued) / num_steps
    host.stop()
    traced = trace(worker, num_traced)
    _end(worker, num_requests)
    return {"arrivals_per_step": arrivals, "step_ms": step_ms, **host.summary(), **traced}


def _submit(llm: Any, prompts: Sequence[np.ndarray] | np.ndarray, output_lens: list[int]) -> None:
    from phalanx.core.sampling_params import SamplingParams

    for i, (ids, n) in enumerate(zip(prompts, output_lens, strict=True)):
        params = SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True)
        for request in llm._settler.settle(range(i, i + 1), ids, params, None):
            llm._worker.add(request)


def _step_ms(worker: Any, num_steps: int) -> float:
    start = time.perf_counter()
    for _ in range(num_steps):
        worker.step()
    return (time.perf_counter() - start) / num_steps * 1e3


def _end(worker: Any, num_requests: int) -> None:
    worker.abort(range(num_requests))
    worker.pending_outputs()
    while worker.busy:
        worker.step()


def mean_context(worker: Any) -> float:
    """Tokens that the rows in use hold on average; waits for the device."""
    lens = worker._engine._rows.seq_lens
    return float(lens[worker.scheduler.table.used_rows()].float().mean())


def linears_ms(llm: Any, num_tokens: int = 4096, repeats: int = 12) -> float:
    """Median device ms of the model's linear layers alone, in one CUDA graph, on random input."""
    import torch

    engine, config = llm._worker._engine, llm.settings.model
    model, logits = engine._model, engine._logits[:num_tokens]
    widths = config.hidden_size, config.num_q_heads * config.head_dim, config.intermediate_size
    with torch.inference_mode():
        hidden, heads, wide = (
            torch.randn(num_tokens, width, dtype=logits.dtype, device=logits.device) for width in widths
        )

        def run() -> None:
            for layer in model.layers:
                layer.attention.qkv(hidden)
                layer.attention.out(heads)
                layer.mlp.gate_up(hidden)
                layer.mlp.down(wide)
            model.head.into(hidden, logits)

        return median_us([run], repeats) / 1e3


class HostTimes:
    """Host time of planning, launching and applying, taken around the worker's own calls.

    decode_rows: how many rows the plans since then decode.
    """

    def __init__(self, worker: Any) -> None:
        self._undo: list[tuple[Any, str]] = []
        self._seconds: dict[str, list[float]] = {}
        self.decode_rows: set[int] = set()
        for owner, name in (
            (worker.scheduler, "plan"),
            (worker._engine, "launch"),
            (worker.scheduler, "apply"),
        ):
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        real, seconds = getattr(owner, name), self._seconds.setdefault(name, [])

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                result = real(*args)
            finally:
                seconds.append(time.perf_counter() - start)
            if name == "plan":
                self.decode_rows.add(0 if result is None else len(result.decode_rows))
            return result

        setattr(owner, name, timed)
        self._undo.append((owner, name))

    def stop(self) -> None:
        for owner, name in self._undo:
            delattr(owner, name)

    def summary(self) -> dict[str, float]:
        return {f"host_{name}_ms": float(np.median(s)) * 1e3 for name, s in self._seconds.items()}
