"""Attention backends by name."""

from __future__ import annotations

from phalanx.attention.base import AttentionBackend
from phalanx.config.groups import ModelConfig
from phalanx.core.errors import ConfigError

NAMES = ("torch_native",)


def create_attention(name: str, config: ModelConfig) -> AttentionBackend:
    """Build the backend called `name`. Raises ConfigError for one that does not exist (yet)."""
    if name == "torch_native":
        from phalanx.attention.torch_native import TorchNativeAttention

        return TorchNativeAttention(config)
    raise ConfigError(f"attention backend {name!r} is not available; choose from: {', '.join(NAMES)}")
