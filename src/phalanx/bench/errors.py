"""The one error of the load client (this package imports nothing from the rest, so it has its own)."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot run, or its result cannot be trusted. The message is one line for the terminal.

    Attributes:
        exit_code: 2 for a command line or input file that cannot be honoured, 1 for everything later.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
