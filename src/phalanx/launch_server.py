"""`python -m phalanx.launch_server`: SGLang's command line, the same as `phalanx serve`."""

from __future__ import annotations

import sys

from phalanx.runtime.launch import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m phalanx.launch_server"))
