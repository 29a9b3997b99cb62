"""Phalanx: an LLM serving engine for very wide batches."""
