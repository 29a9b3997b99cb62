"""Imports point one way. The rule is the table below; docs/architecture.md explains it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "phalanx"

LOW = {"core", "config", "kernels", "kvcache", "attention", "layers", "models", "sampling", "engine"}
HOST = {"core", "config", "scheduler", "text", "messages"}
ALLOWED = {
    "core": set(),
    "config": {"core"},
    "kernels": {"core"},
    "kvcache": {"core", "config"},
    "attention": {"core", "config", "kernels", "kvcache"},
    "layers": {"core", "config", "kernels"},
    "models": {"core", "config", "kernels", "kvcache", "attention", "layers"},
    "sampling": {"core", "config", "kernels"},
    "engine": LOW,
    "scheduler": {"core", "config", "kvcache.allocator"},
    "text": {"core", "config"},
    "messages": {"core", "config"},
    "runtime": LOW | HOST,
    "server": {"core", "config", "text", "messages", "runtime"},
    "bench": set(),
    "microbench": LOW | HOST | {"runtime"},
    "top": LOW | HOST | {"runtime", "bench", "microbench"},
}
NO_TORCH = [
    "phalanx",
    "phalanx.cli",
    "phalanx.core.step",
    "phalanx.config.resolve",
    "phalanx.scheduler.scheduler",
    "phalanx.kvcache.allocator",
    "phalanx.text.output",
    "phalanx.messages",
    "phalanx.runtime.launch",
    "phalanx.runtime.channels",
    "phalanx.server.app",
    "phalanx.bench_serving",
    "phalanx.bench_sweep",
    "phalanx.bench_compare",
]


def _room(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else "top"


def _imported(path: Path) -> set[str]:
    """Modules of this package that a file imports anywhere in it, lazily or not, without the prefix."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
            if node.module == "phalanx":
                names = [f"phalanx.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("phalanx.") for name in names if name.startswith("phalanx.")}
    return found


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    room = _room(path)
    for module in _imported(path):
        target = module.split(".")[0]
        fits = target == room or any(
            module == allowed or module.startswith(allowed + ".") for allowed in ALLOWED[room]
        )
        top_level = room == "top" and "." not in module
        assert fits or top_level, f"{path.relative_to(SRC)} ({room}) imports phalanx.{module}"


def test_every_room_is_in_the_table() -> None:
    rooms = {p.name for p in SRC.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms == set(ALLOWED) - {"top"}


def test_host_side_runs_without_torch() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {NO_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_public_surface() -> None:
    import phalanx

    for name in phalanx.__all__:
        assert getattr(phalanx, name) is not None
