"""Input sets, contenders and clocks of the KV-index benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.kernels import StepPrepBuffers, create_kv_indices, step_prep

SHORT = (16, 150)  # tokens of a short row
NUM_SETS = 4  # input sets that take turns
CALLS_PER_GRAPH = 20
SLOW_LIMIT_S = 2.0  # calls that cannot be captured are repeated for about this long

Call = Callable[["Problem"], Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One input set; shapes as in `create_kv_indices`, plus what `step_prep` needs for the same lengths.

    source: [entries] int32, what the memcpy copies to out. seq_lens_before: the lengths one token earlier.
    """

    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    indptr: torch.Tensor
    out: torch.Tensor
    source: torch.Tensor
    num_live: torch.Tensor
    seq_lens_before: torch.Tensor
    seq_lens: torch.Tensor
    granted: torch.Tensor
    buffers: StepPrepBuffers
    page_size: int

    @property
    def entries(self) -> int:
        """Number of KV indices."""
        return self.out.shape[0]

    def memcpy(self) -> None:
        """Copy `source` to `out`, less a tail of under 4 KiB.

        A copy of an odd number of entries takes a slower path, 26 instead of 18 us for 8.5 million of them on
        an H200, which would flatter the kernels.
        """
        even = self.entries // 1024 * 1024 or self.entries
        self.out[:even].copy_(self.source[:even])

    def reset(self) -> None:
        """Undo the lengths that `step_prep` advanced."""
        self.seq_lens.copy_(self.seq_lens_before)


def make_problem(
    batch: int, context: int, kind: str, page_size: int, device: torch.device, seed: int
) -> Problem:
    """Random slots, rows in random order, lengths "full", "uniform" or "short"."""
    gen = torch.Generator(device=device).manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen, dtype=torch.int32, device=device)

    low, high = {"full": (context, context), "uniform": (1, context), "short": SHORT}[kind]
    lens = draw(min(low, context), min(high, context) + 1, batch)
    rows = torch.randperm(batch, generator=gen, device=device) + 1
    counts = (lens + (page_size - 1)) // page_size
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, out=indptr[1:])
    total = int(indptr[-1])
    before = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    before[rows] = lens - 1
    return Problem(
        table=draw(0, 2**31 - 1, batch + 1, context),
        rows=rows.int(),
        lens=lens,
        indptr=indptr,
        out=torch.empty(total, dtype=torch.int32, device=device),
        source=draw(0, 2**31 - 1, total),
        num_live=torch.tensor([batch], dtype=torch.int32, device=device),
        seq_lens_before=before,
        seq_lens=before.clone(),
        granted=draw(1, (2**31 - 1) // page_size, batch + 1, max(2, 32 // page_size)),
        buffers=StepPrepBuffers.allocate(batch, total + batch * CALLS_PER_GRAPH, device),
        page_size=page_size,
    )


def contenders(device: torch.device) -> dict[str, Call]:
    """Name -> one call on one input set. On a CPU Triton only runs interpreted, so it is left out."""

    def build(backend: str, *, given: bool) -> Call:
        def call(p: Problem) -> Any:
            indptr = p.indptr if given else None
            return create_kv_indices(
                p.table, p.rows, p.lens, indptr, None, p.out, page_size=p.page_size, backend=backend
            )

        return call

    def prepare(p: Problem) -> None:
        step_prep(p.rows, p.num_live, p.seq_lens, p.table, p.granted, p.buffers, page_size=p.page_size)

    found: dict[str, Call] = {
        "memcpy": Problem.memcpy,
        "naive": build("naive", given=False),
        "torch": build("torch", given=False),
    }
    if device.type == "cuda":
        found["triton"] = build("triton", given=True)
        found["triton + kv_indptr"] = build("triton", given=False)
    found["step_prep"] = prepare
    return found


def verify(name: str, call: Call, problem: Problem) -> None:
    """Run once and compare with the per-request loop. Raises RuntimeError on any difference."""
    p = problem
    p.reset()
    p.out.fill_(-1)
    result = call(p)
    if name == "memcpy":
        return
    indptr, want = create_kv_indices(p.table, p.rows, p.lens, page_size=p.page_size, backend="naive")
    got = p.buffers.kv_indices[: p.entries] if name == "step_prep" else p.out  # type: ignore[index]
    got_indptr = p.buffers.kv_indptr if name == "step_prep" else result[0]
    if not (torch.equal(got, want) and torch.equal(got_indptr, indptr)):
        raise RuntimeError(f"{name} differs from the per-request loop")


def graph_us(call: Call, problems: list[Problem], repeats: int) -> float:
    """Median device time of one call, from replays of a graph of many; no launch gaps. In microseconds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS_PER_GRAPH):
            call(problems[index % len(problems)])
    times = []
    for _ in range(repeats + 2):
        for p in problems:
            p.reset()
        times.append(_events_us(graph.replay) / CALLS_PER_GRAPH)
    return statistics.median(times[2:])


def events_us(call: Call, problems: list[Problem], repeats: int) -> float:
    """Median time between events around single calls, host gaps included. In microseconds."""
    return _median(lambda p: _events_us(lambda: call(p)), problems, repeats)


def host_us(call: Call, problems: list[Problem], repeats: int) -> float:
    """Median host time until one call returns, the device idle before it. In microseconds."""

    def once(p: Problem) -> float:
        _synchronise(p.out.device)
        start = time.perf_counter()
        call(p)
        return (time.perf_counter() - start) * 1e6

    return _median(once, problems, repeats)


def _median(measure: Callable[[Problem], float], problems: list[Problem], repeats: int) -> float:
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < repeats and (len(times) < 3 or time.perf_counter() - start < SLOW_LIMIT_S):
        p = problems[len(times) % len(problems)]
        p.reset()
        times.append(measure(p))
    _synchronise(problems[0].out.device)
    return statistics.median(times)


def _events_us(work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
