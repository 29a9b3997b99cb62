"""Attention backends by name."""

from __future__ import annotations

import logging

import torch

from phalanx.attention.base import AttentionBackend
from phalanx.config.groups import ModelConfig
from phalanx.core.errors import ConfigError
from phalanx.kernels.checks import numba_problem

logger = logging.getLogger(__name__)

NAMES = ("numba", "torch_native", "triton", "flashinfer")


_CPU = torch.device("cpu")


def create_attention(name: str, config: ModelConfig, device: torch.device = _CPU) -> AttentionBackend:
    """Build the backend called `name`. Raises ConfigError for one that does not exist or cannot be loaded.

    numba gives way to torch_native, with a line in the log, where it cannot be imported.
    """
    if name == "numba":
        problem = numba_problem(torch.float32)
        if problem is None and device.type == "cpu":
            from phalanx.attention.numba import NumbaAttention

            return NumbaAttention(config)
        logger.warning("attention backend torch_native instead of numba: %s", problem or f"device {device}")
        name = "torch_native"
    if name == "torch_native":
        from phalanx.attention.torch_native import TorchNativeAttention

        return TorchNativeAttention(config)
    if name == "triton":
        from phalanx.attention.triton import TritonAttention

        return TritonAttention(config)
    if name == "flashinfer":
        from phalanx.attention.flashinfer import FlashInferAttention

        try:
            return FlashInferAttention(config, device)
        except ImportError as error:
            raise ConfigError(f"attention backend flashinfer cannot be loaded: {error}") from error
    raise ConfigError(f"attention backend {name!r} does not exist; choose from: {', '.join(NAMES)}")
