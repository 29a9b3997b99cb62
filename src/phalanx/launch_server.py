"""`python -m phalanx.launch_server`: SGLang's command line, the same as `phalanx serve`."""

from __future__ import annotations

import sys

from phalanx.cli import guarded


def main() -> int:
    """Serve. Returns the exit code."""
    from phalanx.runtime.launch import main as serve

    return serve(prog="python -m phalanx.launch_server")


if __name__ == "__main__":
    sys.exit(guarded(main))
