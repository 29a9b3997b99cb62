"""Phalanx: an LLM serving engine for very wide batches."""

from __future__ import annotations

from typing import Any

from phalanx.core.errors import ConfigError, EngineError, ModelError, PhalanxError, RequestError
from phalanx.core.request import LogprobParams
from phalanx.core.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "ConfigError",
    "EngineError",
    "LogprobParams",
    "ModelError",
    "PhalanxError",
    "RequestError",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    """Load LLM on first use: it brings torch, which the command line and the API workers never need."""
    if name == "LLM":
        from phalanx.runtime.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
