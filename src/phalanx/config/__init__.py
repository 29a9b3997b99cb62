"""Frozen settings. `resolve` turns human wishes plus hardware into settled facts, once."""
