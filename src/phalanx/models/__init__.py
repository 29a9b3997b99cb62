"""Models: where they lie, their configuration, their weights, and one decoder for all of them."""
