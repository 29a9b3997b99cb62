"""Where the time of a step goes, read from a chrome trace of torch.profiler.

On CUDA by the names of the kernels, which is all that a captured graph leaves; on a CPU by the named ranges
of `named_ranges`, each less those inside it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.microbench.named_ranges import (
    APPLY,
    ENGINE,
    ENTER,
    LAUNCH,
    PLAN,
    PREFIX,
    READ,
    REPLAY,
    STEP,
    UPLOAD,
)

PREP, ATTENTION, GEMM, ELEMENTWISE = "prep", "attention", "gemm", "elementwise"
SAMPLING, COPIES, OTHER, IDLE = "sampling", "copies", "other", "idle"
GROUPS = (PREP, ATTENTION, GEMM, ELEMENTWISE, SAMPLING, COPIES, OTHER, IDLE)

# Parts of kernel names -> group; the first that fits. This package's kernels are named after what they do.
_KERNELS = (
    (ATTENTION, ("attend_", "merge_", "find_rows", "rank_rows")),
    (ATTENTION, ("BatchPrefill", "BatchDecode", "PagedKV", "flash_fwd")),
    (SAMPLING, ("reduce_chunks", "choose_tokens")),
    (ELEMENTWISE, ("norm_rows", "rotate_heads", "rope_heads", "silu_mul", "scatter_tokens")),
    (PREP, ("prepare_lanes", "copy_rows", "scan_blocks", "index", "gather", "scatter", "CatArray")),
    (PREP, ("searchsorted", "DeviceScan")),
    (GEMM, ("gemm", "nvjet", "cutlass", "splitK", "gemv", "cublas")),
)
_RANGES = {
    "gemm": GEMM,
    "attention": ATTENTION,
    "norm": ELEMENTWISE,
    "rope": ELEMENTWISE,
    "kv store": ELEMENTWISE,
    "activation": ELEMENTWISE,
    "sampling": SAMPLING,
    "step_prep": PREP,
    UPLOAD: PREP,
    ENTER: PREP,
    "embedding": PREP,
}
_STEP_KERNEL = "prepare_lanes"  # the first launch of a step with decode rows
HOST = (PLAN, LAUNCH, UPLOAD, ENTER, REPLAY, READ, APPLY, OTHER)
_INSIDE_LAUNCH = (UPLOAD, ENTER, REPLAY)


@dataclass(frozen=True, slots=True)
class Event:
    """A stretch of time. start, end: microseconds. thread: of a range; None for work of the device."""

    start: float
    end: float
    name: str
    thread: int | None = None


@dataclass(slots=True)
class Breakdown:
    """One step on average, in milliseconds.

    step_ms: from a step's start to the next one's. groups_ms: adds up to step_ms, by `GROUPS`, of which
    ELEMENTWISE is norms, RoPE, the KV store and the activation. between_ms: nothing runs between a step's
    last work and the next one's first; part of idle. names_ms: device kernels
    or ranges, the longest first. host_ms: the loop's thread by `HOST`; UPLOAD, ENTER and REPLAY are
    parts of LAUNCH. READ is waiting for the device. num_steps: whole steps that were measured.
    """

    num_steps: int
    step_ms: float
    groups_ms: dict[str, float]
    between_ms: float
    names_ms: dict[str, float]
    host_ms: dict[str, float] = field(default_factory=dict)


def read_trace(path: Path) -> tuple[list[Event], list[Event]]:
    """Work of the device and this package's named ranges, each by start. path: .json or .json.gz."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        events = json.load(file)["traceEvents"]
    work, ranges = [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        start, category = float(event["ts"]), str(event.get("cat", ""))
        end = start + float(event["dur"])
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append(Event(start, end, event["name"]))
        elif category == "user_annotation" and event["name"].startswith(PREFIX):
            ranges.append(Event(start, end, event["name"].removeprefix(PREFIX), int(event["tid"])))
    return sorted(work, key=_order), sorted(ranges, key=_order)


def _order(event: Event) -> tuple[float, float]:
    return event.start, -event.end  # what contains comes before what it contains


def breakdown(work: list[Event], ranges: list[Event]) -> Breakdown:
    """A step by where its time goes: of the device if it did any work, else of the CPU engine's thread.

    Raises ConfigError if the trace holds no whole step.
    """
    found = _of_device(work) if work else _of_engine_thread(ranges)
    found.host_ms = _of_host(ranges)
    return found


def _of_device(work: list[Event]) -> Breakdown:
    starts = [i for i, event in enumerate(work) if _STEP_KERNEL in event.name]
    # The first one follows an idle pipeline; the last one may be cut off.
    num_steps = len(starts) - 2
    if num_steps < 1:
        raise ConfigError("the trace holds no whole step; ask for more --steps")
    first, last = starts[1], starts[-1]
    inside = work[first:last]
    groups, names = Counter[str](), Counter[str]()
    for event in inside:
        groups[group_of_kernel(event.name)] += _us(event)
        names[event.name[:60]] += _us(event)
    span = work[last].start - work[first].start
    idle = max(0.0, span - busy(inside))
    # Kernels of two streams may overlap (copies, log-probabilities): shares are then of what ran.
    scale = (span - idle) / max(sum(groups.values()), 1e-9)
    return Breakdown(
        num_steps=num_steps,
        step_ms=span / num_steps / 1e3,
        groups_ms=_per_step({g: groups[g] * scale for g in GROUPS if g != IDLE} | {IDLE: idle}, num_steps),
        between_ms=sum(_gap_before(work, i) for i in starts[2:]) / num_steps / 1e3,
        names_ms=_per_step(dict(names.most_common(12)), num_steps),
    )


def _of_engine_thread(ranges: list[Event]) -> Breakdown:
    runs = [event for event in ranges if event.name == ENGINE]
    num_steps = len(runs) - 2  # as on a device
    if num_steps < 1:
        raise ConfigError("the trace holds no whole step; ask for more --steps")
    first, last = runs[1], runs[-1]
    inside = [e for e in ranges if e.thread == first.thread and first.start <= e.start < last.start]
    names = self_times(inside)
    span = last.start - first.start
    idle = span - sum(_us(run) for run in runs[1:-1])
    groups: Counter[str] = Counter({IDLE: idle})
    for name, us in names.items():
        groups[_RANGES.get(name, OTHER)] += us
    return Breakdown(
        num_steps=num_steps,
        step_ms=span / num_steps / 1e3,
        groups_ms=_per_step({group: groups[group] for group in GROUPS}, num_steps),
        between_ms=idle / num_steps / 1e3,
        names_ms=_per_step(dict(names.most_common(12)), num_steps),
    )


def _of_host(ranges: list[Event]) -> dict[str, float]:
    steps = [event for event in ranges if event.name == STEP]
    if not steps:
        return {}
    inside = [event for event in ranges if event.thread == steps[0].thread]
    whole: Counter[str] = Counter()
    for event in inside:
        whole[event.name] += _us(event)
    rest = whole[STEP] - sum(whole[name] for name in (PLAN, LAUNCH, READ, APPLY))
    found = {name: whole[name] for name in HOST if name in whole} | {OTHER: rest}
    return _per_step(found, len(steps))


def host_busy_ms(host_ms: dict[str, float]) -> float:
    """Milliseconds of a step in which the loop's thread does something else than waiting for the device."""
    return sum(ms for name, ms in host_ms.items() if name not in (READ, *_INSIDE_LAUNCH))


def group_of_kernel(name: str) -> str:
    """The group of a device kernel, copy or fill, by its name."""
    if name.startswith(("Memcpy", "Memset")):
        return COPIES
    return next((group for group, parts in _KERNELS if any(part in name for part in parts)), OTHER)


def self_times(ranges: list[Event]) -> Counter[str]:
    """Microseconds by name, each range less those inside it. ranges: of one thread, in order."""
    found: Counter[str] = Counter()
    open_ranges: list[Event] = []
    for event in ranges:
        while open_ranges and open_ranges[-1].end <= event.start:
            open_ranges.pop()
        found[event.name] += _us(event)
        if open_ranges:
            found[open_ranges[-1].name] -= _us(event)
        open_ranges.append(event)
    return found


def busy(work: list[Event]) -> float:
    """Microseconds in which at least one of them runs. work: by start."""
    total = reached = 0.0
    for event in work:
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return total


def _gap_before(work: list[Event], index: int) -> float:
    """Microseconds from the last kernel before this one to it; copies and fills count as nothing."""
    previous = index - 1
    while previous > 0 and group_of_kernel(work[previous].name) == COPIES:
        previous -= 1
    return max(0.0, work[index].start - work[previous].end)


def _us(event: Event) -> float:
    return event.end - event.start


def _per_step(us: dict[str, float], num_steps: int) -> dict[str, Any]:
    return {name: value / num_steps / 1e3 for name, value in us.items()}
