"""The `phalanx` command: serve, generate, pull, top, profile, bench.

Nothing slow is imported before `guarded` runs, so that Ctrl-C is one line from the first moment on.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterable

from phalanx.core.version import VERSION

# bench name -> (module, one line of help); each module has add_arguments(parser) and run(args) -> int.
_BENCHES = {
    "serving": ("phalanx.bench_serving", "load a server over HTTP and print SGLang's table"),
    "sweep": ("phalanx.bench_sweep", "a list of rates or concurrencies: the knee, and report.html"),
    "compare": ("phalanx.bench_compare", "two results or two servers: ratios with confidence intervals"),
    "host": ("phalanx.microbench.host", "the scheduler's cost per step against a null engine"),
    "front": ("phalanx.microbench.front", "API workers and sockets before a null engine, by CPU second"),
    "offline": ("phalanx.microbench.offline", "throughput of LLM.generate, without HTTP"),
    "kv-indices": ("phalanx.microbench.kv_indices", "the KV-index kernels beside a memcpy"),
}
_COMMANDS = {
    "serve": "serve a model over HTTP",
    "generate": "generate text in this process, without a server",
    "pull": "bring a model into the cache folder",
    "top": "watch a server in the terminal",
    "profile": "trace some steps of the engine: where their time goes",
    "bench": "benchmarks: " + ", ".join(_BENCHES),
}


def _usage() -> str:
    lines = [f"  {name:<10} {text}" for name, text in _COMMANDS.items()]
    return "usage: phalanx [--version] COMMAND ...\n\ncommands:\n" + "\n".join(lines) + "\n"


def _show(usage: str, asked: bool) -> int:
    """Print the usage; where nobody asked for it, that is a refusal."""
    try:
        print(usage, file=sys.stdout if asked else sys.stderr)
    except OSError as error:
        return _cannot_write(error)
    return 0 if asked else 2


def _unknown(prog: str, name: str, known: Iterable[str]) -> int:
    """Refuse a command that does not exist, in one line."""
    print(
        f"{prog}: error: no command {name!r}; there are {', '.join(known)} (see {prog} --help)",
        file=sys.stderr,
    )
    return 2


def _bench(argv: list[str]) -> int:
    asked = argv[:1] in (["-h"], ["--help"])
    if argv and argv[0] not in _BENCHES and not asked:
        return _unknown("phalanx bench", argv[0], _BENCHES)
    if not argv or asked:
        lines = "\n".join(f"  {name:<12} {text}" for name, (_, text) in _BENCHES.items())
        return _show(f"usage: phalanx bench NAME ...\n\nbenchmarks:\n{lines}", asked)
    module = importlib.import_module(_BENCHES[argv[0]][0])
    return _run(module, f"phalanx bench {argv[0]}", argv[1:])


def _run(module: object, prog: str, argv: list[str]) -> int:
    """Run a module's add_arguments/run pair; a PhalanxError becomes one line and exit code 2.

    So does a full disk, with exit code 1; a reader that has left (`| head`) has seen enough: no line.
    """
    from phalanx.config.cli import OneLineParser
    from phalanx.core.errors import PhalanxError

    parser = OneLineParser(prog, module.__doc__)
    module.add_arguments(parser)  # type: ignore[attr-defined]
    args = parser.parse_args(argv)
    try:
        code = int(module.run(args))  # type: ignore[attr-defined]
        sys.stdout.flush()  # here, where an error can still be told
        return code
    except PhalanxError as error:
        print(f"phalanx: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("phalanx: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        return _cannot_write(error)


def _cannot_write(error: OSError) -> int:
    _discard_output()
    if error.errno != errno.EPIPE:
        print(f"phalanx: error: cannot write: {error.strerror}", file=sys.stderr)
    return 1


def _discard_output() -> None:
    """Let what is left in the buffer of standard output go nowhere, or Python would fail on it at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stand-in for it has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guarded(command: Callable[[], int]) -> int:
    """Run a command: Ctrl-C is one line and 130, and what it has printed is written here or told of."""
    code = 0
    try:
        code = command()
    except KeyboardInterrupt:
        print("phalanx: interrupted", file=sys.stderr)
        code = 130
    finally:  # argparse leaves with SystemExit after its help
        try:
            sys.stdout.flush()
        except OSError as error:
            code = code or _cannot_write(error)
    return code


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `phalanx` command. Returns the exit code."""
    return guarded(lambda: _dispatch(sys.argv[1:] if argv is None else argv))


def _dispatch(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command == "serve":
        from phalanx.runtime.launch import main as serve

        return serve(rest)
    if command == "generate":
        return _run(importlib.import_module("phalanx.runtime.generate"), "phalanx generate", rest)
    if command == "pull":
        return _run(importlib.import_module("phalanx.models.pull"), "phalanx pull", rest)
    if command == "top":
        return _run(importlib.import_module("phalanx.top"), "phalanx top", rest)
    if command == "profile":
        return _run(importlib.import_module("phalanx.microbench.profile"), "phalanx profile", rest)
    if command == "bench":
        return _bench(rest)
    if command in ("-V", "--version"):
        print(VERSION)
        return 0
    asked = command in ("-h", "--help")
    if command and not asked:
        return _unknown("phalanx", command, _COMMANDS)
    return _show(_usage(), asked)
