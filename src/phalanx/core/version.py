"""The version, where a source tree that is not installed finds it too."""

from __future__ import annotations

VERSION = "0.1.0"
