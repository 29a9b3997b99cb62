"""The knee of a sweep: the highest rate (or concurrency) that still meets the --goodput targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Knee:
    """What a sweep found.

    Attributes:
        value: highest value up to which every run of every point met the targets; None if not even the
            lowest did, or nobody gave targets.
        first_bad: the lowest value with a run that missed them: the knee lies below it. None when no value
            that was tried missed them.
        slos_ms: the targets by name; empty without --goodput.
    """

    value: float | None
    first_bad: float | None
    slos_ms: dict[str, float]

    def describe(self, kind: str) -> str:
        """Return one sentence; `kind` is "rate" or "concurrency"."""
        if not self.slos_ms:
            return "Knee: not looked for, there is no --goodput"
        targets = ", ".join(f"{name} <= {slo:g} ms" for name, slo in self.slos_ms.items())
        if self.value is None:
            return f"Knee: none, {kind} {self.first_bad:g}, the lowest tried, misses the targets ({targets})"
        if self.first_bad is None:
            return (
                f"Knee: {kind} {self.value:g} or above: it is the last one tried and meets the targets "
                f"({targets}), so no upper bound was found"
            )
        return f"Knee: {kind} {self.value:g} meets the targets ({targets}), {self.first_bad:g} misses them"


def find_knee(lines: Sequence[dict[str, Any]], attainment: float) -> Knee:
    """Find the knee. A lucky point above a failed one is none.

    Args:
        lines: JSON lines of a sweep, at least one.
        attainment: share of the sent requests of every run that must meet every target, in (0, 1].
    """
    slos_ms = lines[0].get("goodput_slos_ms") or {}
    good = None
    for value in sorted({line["sweep"]["value"] for line in lines}) if slos_ms else []:
        shares = [line.get("slo_attainment", 0.0) for line in lines if line["sweep"]["value"] == value]
        if min(shares) < attainment:
            return Knee(good, value, slos_ms)
        good = value
    return Knee(good, None, slos_ms)
