"""A real API worker process on a real port, with a fake engine in this process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from phalanx.config.groups import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ModelSource,
    RopeConfig,
    SchedulerConfig,
    ServerConfig,
    Settings,
)
from phalanx.runtime.channels import EngineChannel
from tests.e2e.fake_engine import FakeEngine

BOS, EOS = 256, 257
PATIENCE_S = 120.0  # for what must come: only a failure takes so long, however slow the machine
VOCAB_SIZE, CONTEXT = 260, 64
MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def write_byte_tokenizer(folder: Path) -> Path:
    """A tokenizer whose id for a byte is that byte, so that tests can spell any text."""
    # GPT-2's names of the bytes: those that print stand for themselves, the others for 256, 257, ...
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {b: chr(b) for b in printing}
    names |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printing)}
    tokenizer = Tokenizer(models.BPE(vocab={names[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_settings(tokenizer_path: Path | str, **server: object) -> Settings:
    server = {"served_model_name": MODEL, "log_level": "warning", **server}
    return Settings(
        source=ModelSource(name=MODEL, load_format="dummy", path=MODEL, tokenizer_path=str(tokenizer_path)),
        model=ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=8,
            rms_norm_eps=1e-5,
            rope=RopeConfig(),
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_ids=(EOS,),
        ),
        cache=CacheConfig(page_size=16, max_total_tokens=1024, mem_fraction_static=0.5, dtype="float32"),
        scheduler=SchedulerConfig(max_running_requests=64, context_length=CONTEXT),
        engine=EngineConfig(
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            overlap=True,
            cuda_graph=False,
            random_seed=42,
        ),
        server=ServerConfig(host="127.0.0.1", port=0, **server),
    )


class Server:
    """One worker process and its engine thread."""

    def __init__(
        self,
        run_dir: Path,
        settings: Settings,
        *,
        in_thread: bool = True,
        worker_id: int = 0,
        ipc_dir: Path | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        ipc_dir = ipc_dir or run_dir
        (run_dir / "settings.json").write_bytes(msgspec.json.encode(settings))
        fd = self.listener.fileno()
        command = [*wrapper, sys.executable, "-m", "phalanx.server"]
        command += ["--settings", str(run_dir / "settings.json"), "--ipc-dir", str(ipc_dir)]
        command += ["--worker-id", str(worker_id), "--fd", str(fd), "--parent-pid", str(os.getpid())]
        self.process = subprocess.Popen(command, pass_fds=(fd,))
        self.engine: FakeEngine | None = None
        self._thread: threading.Thread | None = None
        if in_thread:
            self.engine = FakeEngine(EngineChannel(str(ipc_dir), 1))
            self._thread = threading.Thread(target=self.engine.run, daemon=True)
            self._thread.start()

    def wait_status(self, status: int) -> None:
        """Until GET /health says `status`."""

        def says() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/health").status_code == status
            return False

        wait_until(says, f"/health {status}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        self.listener.close()
        if self.engine is not None and self._thread is not None:
            self.engine.stopping.set()
            self._thread.join(PATIENCE_S)
            self.engine.channel.close()


@contextlib.contextmanager
def running(run_dir: Path, settings: Settings, wrapper: Sequence[str] = ()) -> Iterator[Server]:
    """A server that is ready."""
    server = Server(run_dir, settings, wrapper=wrapper)
    try:
        assert server.engine is not None
        server.engine.announce()
        server.wait_status(200)
        yield server
    finally:
        server.close()


def changed(folder: Path, module: str, **constants: float) -> list[str]:
    """A wrapper for `running`: the worker as it is but for these constants of a module of phalanx.server."""
    script = folder / "changed.py"
    lines = ["import runpy, sys", f"from phalanx.server import {module}"]
    lines += [f"{module}.{name} = {value!r}" for name, value in constants.items()]
    lines += [
        "sys.argv = sys.argv[3:]",
        'runpy.run_module("phalanx.server", run_name="__main__", alter_sys=True)',
    ]
    script.write_text("\n".join(lines))
    return [sys.executable, str(script)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.01)


def sse_events(text: str) -> list[object]:
    """The events of a stream, [DONE] as the string; fails on anything that is no event."""
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events
