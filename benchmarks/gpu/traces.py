"""What the device does in a step, from a trace of torch's profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any

# Names of device kernels -> where their time belongs.
GROUPS = (
    ("gemm", ("gemm", "nvjet", "cutlass", "splitk", "cublas")),
    ("attention", ("attend_", "merge_", "find_rows", "rank_rows", "BatchPrefill", "PagedKV")),
    ("sampling", ("reduce_chunks", "choose_tokens")),
    ("prep", ("prepare_lanes", "copy_rows", "scan_blocks", "Memcpy", "Memset", "index")),
    ("elementwise", ("norm_rows", "rotate", "rope", "silu_mul")),
)
Event = tuple[int, int, str]  # begin and end in nanoseconds, name


def trace(worker: Any, num_steps: int) -> dict[str, Any]:
    """Device time of a step by group, and how long the device has nothing to do; without a GPU neither.

    idle_between: from the last kernel of a step to the first of the next, as a share of the step.
    idle: all time in which nothing runs, gaps between the kernels of one step included.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        for _ in range(num_steps):
            worker.step()
        return {"trace": "needs a GPU"}
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(num_steps):
            worker.step()
        worker._engine.close()  # waits; the engine goes on working afterwards
    return summary(
        sorted(
            (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
            for e in prof.profiler.kineto_results.events()
            if e.device_type().name == "CUDA" and "Synchronize" not in e.name()
        )
    )


def summary(events: list[Event]) -> dict[str, Any]:
    """Of events in order: see `trace`."""
    starts = [i for i, event in enumerate(events) if "prepare_lanes" in event[2]]
    num_whole = len(starts) - 2  # the first and the last may be cut
    if num_whole < 1:
        return {"trace": "no whole step in the trace"}
    begin, end = starts[1], starts[-1]
    inside = events[begin:end]
    span = events[end][0] - events[begin][0]
    between = sum(gap_before(events, i) for i in starts[2:])
    by_group: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for first, last, name in inside:
        by_group[group_of(name)] += last - first
        by_name[name[:70]] += last - first
    return {
        "traced_step_ms": span / num_whole / 1e6,
        "idle_between": between / span,
        "idle": 1 - busy(inside) / span,
        "groups_ms": {name: ns / num_whole / 1e6 for name, ns in by_group.most_common()},
        "kernels_ms": {name: ns / num_whole / 1e6 for name, ns in by_name.most_common(14)},
    }


def gap_before(events: list[Event], index: int) -> int:
    """Idle nanoseconds between the last compute kernel before this one and it; copies count as idle."""
    previous = index - 1
    while "Memcpy" in events[previous][2] or "Memset" in events[previous][2]:
        previous -= 1
    return max(0, events[index][0] - events[previous][1])


def busy(events: list[Event]) -> int:
    """Nanoseconds in which at least one of them runs."""
    total, reached = 0, 0
    for first, last, _ in events:
        total += max(0, last - max(first, reached))
        reached = max(reached, last)
    return total


def group_of(name: str) -> str:
    return next((group for group, words in GROUPS if any(word in name for word in words)), "other")
