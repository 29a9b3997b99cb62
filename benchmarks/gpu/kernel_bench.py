"""Checking kernels against references and timing them: what the parts of model_kernels.py share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import HBM_BYTES_PER_S, median_us

BYTES_PER_US = HBM_BYTES_PER_S / 1e6
L2_BYTES = 200 << 20  # rotate over at least this much, so that nothing is found in the L2 cache
OURS = "triton"

Check = Callable[[], float]
Calls = list[Callable[[], Any]]


@dataclass(frozen=True)
class Model:
    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    qk_norm: bool


LLAMA = Model("llama-3-8b", 32, 8, 128, 4096, 14336, 128256, False)
QWEN = Model("qwen3-0.6b", 16, 8, 128, 1024, 3072, 151936, True)
TINY = Model("tiny", 8, 4, 16, 48, 40, 4200, True)


@dataclass
class Record:
    op: str
    model: str
    case: str
    variant: str
    us: float | None = None
    floor_us: float | None = None
    tflops: float | None = None
    error: float | None = None  # norm of the difference over the norm of the reference
    failed: str | None = None
    skipped: str | None = None  # the variant cannot run here

    def line(self) -> str:
        text = f"{self.op:<14} {self.model:<11} {self.case:<20} {self.variant:<22} "
        if self.failed:
            return text + f"FAILED {self.failed}"
        if self.skipped:
            return text + f"skipped: {self.skipped}"
        text += f"err {self.error:.1e}"
        if self.us is not None:
            text += f" {self.us:9.1f} us"
            text += f" {self.us / self.floor_us:6.2f} x floor" if self.floor_us else ""
        return text + (f" {self.tflops:5.0f} TFLOP/s" if self.tflops else "")


@dataclass
class Bench:
    """rows: numbers of decode rows to measure at. sweep: other configurations than those in service, too."""

    device: str
    rows: list[int]
    mean_len: int
    page_size: int
    sweep: bool
    records: list[Record] = field(default_factory=list)
    broken: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def models(self) -> list[Model]:
        return [LLAMA, QWEN] if self.device == "cuda" else [TINY]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def measure(
        self,
        record: Record,
        prepare: Callable[[], tuple[Check, Calls]],
        num_bytes: float,
        *,
        num_flops: float = 0,
        limit: float = 2e-2,
    ) -> None:
        """Check, then time the calls (each on memory of its own); whatever goes wrong is recorded.

        A variant that is not ours and cannot be run is skipped, then and at the cases that follow: compiling
        it in vain may have taken minutes.
        """
        record.floor_us = num_bytes / BYTES_PER_US
        key = record.op, record.variant
        optional = record.variant.startswith("flashinfer")
        try:
            if key in self.broken:
                record.skipped = self.broken[key]
            else:
                check, calls = prepare()
                record.error = check()
                if not record.error <= limit:
                    record.failed = f"wrong result, error {record.error:.2e}"
                elif self.device == "cuda":
                    record.us = median_us(calls, repeats=20)
                    record.tflops = num_flops / record.us / 1e6
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
            if optional:
                record.skipped = self.broken[key] = text
            elif type(error).__name__ == "OutOfResources":
                record.skipped = text
            else:
                record.failed = text
        self.records.append(record)
        print(record.line(), flush=True)

    def copies(self, num_bytes: float) -> int:
        return max(1, min(256, math.ceil(L2_BYTES / num_bytes))) if self.device == "cuda" else 1


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    if not bool(torch.isfinite(got).all()):
        return math.inf
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def print_comparison(records: list[Record]) -> None:
    """Our kernels as they are in service beside FlashInfer's."""
    ours = {(r.op, r.model, r.case): r for r in records if r.variant == OURS}
    others = [r for r in records if r.variant.startswith("flashinfer")]
    if not others:
        return
    print(f"{'':<46} {'variant':<14} {'its us':>9} {'ours us':>9} {'ours/its':>9}")
    for other in others:
        own = ours.get((other.op, other.model, other.case))
        text = f"{other.op:<14} {other.model:<11} {other.case:<19} {other.variant:<14} "
        if own is not None and own.us and other.us:
            print(text + f"{other.us:9.1f} {own.us:9.1f} {own.us / other.us:9.2f}")
        else:
            print(text + (other.skipped or other.failed or "not timed")[:80])
