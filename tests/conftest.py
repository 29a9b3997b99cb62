"""Shared fixtures and hypothesis profiles."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# As the engine process does (runtime.process.tame_libraries), before any test loads torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_SLOW_OK = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fast", max_examples=40, deadline=None, suppress_health_check=_SLOW_OK)
settings.register_profile("fuzz", max_examples=5000, deadline=None, suppress_health_check=_SLOW_OK)
settings.load_profile(os.environ.get("PHALANX_PROFILE", "fast"))
