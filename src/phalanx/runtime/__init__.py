"""The composition root: worker loop, channels, launch, LLM."""
