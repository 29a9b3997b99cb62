"""Phalanx: an LLM serving engine for very wide batches."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.core.errors import ConfigError, EngineError, ModelError, PhalanxError, RequestError
    from phalanx.core.request import LogprobParams
    from phalanx.core.sampling_params import SamplingParams
    from phalanx.runtime.llm import LLM

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

_MODULES = {"LLM": "runtime.llm", "LogprobParams": "core.request", "SamplingParams": "core.sampling_params"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use: LLM brings torch, others NumPy; the command line starts without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"phalanx.{_MODULES.get(name, 'core.errors')}")
    return getattr(module, name)
