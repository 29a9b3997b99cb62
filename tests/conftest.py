"""Shared fixtures and hypothesis profiles."""

from __future__ import annotations

import os
import signal

import httpx
from hypothesis import HealthCheck, settings

# As the engine process does (runtime.process.tame_libraries), before any test loads torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts pytest in the background lets it ignore Ctrl-C, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# httpx gives up after 5 s; a machine that stands still for as long must fail no test.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 120.0)

_SLOW_OK = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fast", max_examples=40, deadline=None, suppress_health_check=_SLOW_OK)
settings.register_profile("fuzz", max_examples=5000, deadline=None, suppress_health_check=_SLOW_OK)
settings.load_profile(os.environ.get("PHALANX_PROFILE", "fast"))
