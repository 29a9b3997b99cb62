"""From logits to token ids and log-probabilities, vectorised over rows."""
