"""One real server for all tests that do not need their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.core.errors import ModelError
from phalanx.models.source import resolve_source
from tests.e2e.serving import Server, running


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The model's name, or a skip with the reason if it has not been pulled."""
    try:
        resolve_source("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    return "smollm2"


@pytest.fixture(scope="session")
def server(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 in fp32 (so that texts are exact), a small pool, chunked prompts."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--dtype", "float32", "--max-total-tokens", "16384", "--context-length", "2048")
    with running(log, *flags, "--random-seed", "0", "--chunked-prefill-size", "256") as server:
        yield server
