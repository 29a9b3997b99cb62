"""Attention backends: `base` is the protocol, `registry` finds one by name."""
