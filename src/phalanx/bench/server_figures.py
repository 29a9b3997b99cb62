"""What a server says of itself in GET /server_info, as far as a report shows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of the server; None for what it does not give.

    Attributes:
        accept_length: mean number of tokens accepted per step of speculative decoding (SGLang).
        host_mean_ms, host_p99_ms: host time between two steps of the engine.
        kv_indices_backend: what builds the page lists of attention.
    """

    accept_length: float | None = None
    host_mean_ms: float | None = None
    host_p99_ms: float | None = None
    kv_indices_backend: str | None = None

    def fields(self) -> dict[str, Any]:
        """Return the JSON line's fields besides `accept_length`, which is SGLang's."""
        between = {"mean": self.host_mean_ms, "p99": self.host_p99_ms}
        given = any(value is not None for value in between.values())
        return {
            "host_time_between_steps_ms": between if given else None,
            "kv_indices_backend": self.kv_indices_backend,
        }


def read_server_figures(info: dict[str, Any] | None) -> ServerFigures:
    """Find the figures in an answer of /server_info, at its top or in the first of its `internal_states`.

    What is missing or has another type is None: a server may say what it likes.
    """
    info = info or {}
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    between = info.get("host_time_between_steps_ms", first.get("host_time_between_steps_ms"))
    between = between if isinstance(between, dict) else {}
    backend = info.get("kv_indices_backend", first.get("kv_indices_backend"))
    return ServerFigures(
        accept_length=_number(first.get("avg_spec_accept_length")),
        host_mean_ms=_number(between.get("mean")),
        host_p99_ms=_number(between.get("p99")),
        kv_indices_backend=backend if isinstance(backend, str) else None,
    )


def _number(value: Any) -> float | None:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    return number if math.isfinite(number) else None
