"""Ten prompts for tests of real text."""

from __future__ import annotations

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small",
    "def fibonacci(n):\n",
    "2 + 2 =",
    "Water boils at",
    "The three primary colours are red,",
    "In 1969, the first human",
    "A, B, C, D,",
    "La capitale de l'Italie est",
    "She opened the door and",
]
