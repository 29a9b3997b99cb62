"""What the user types -> where the model lies."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from phalanx.core.errors import ConfigError, ModelError
from phalanx.models.configs import load_model_config
from phalanx.models.dummy import BUILTIN_CONFIGS
from phalanx.models.pull import PULLED_MODELS
from phalanx.models.source import resolve_source
from tests.models.tiny import save_tiny, save_tiny_gguf, tiny_model


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_tiny(tmp_path / "folder", tiny_model("llama"))


@pytest.fixture
def gguf_path(tmp_path) -> Path:
    return save_tiny_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))


def refusal(model: str | Path, **options: str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_source(str(model), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder_of_safetensors(folder):
    for load_format in ("auto", "safetensors"):
        source = resolve_source(str(folder), load_format=load_format)
        assert (source.name, source.load_format, source.revision) == (str(folder), "safetensors", None)
        assert source.path == source.tokenizer_path == str(folder)  # a tokenizer is not looked for here
    assert "holds no .gguf file" in refusal(folder, load_format="gguf")
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_relative_and_home_paths(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert resolve_source("folder").path == str(folder)
    assert resolve_source("./folder/").path == str(folder)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_source("~/folder").path == str(folder)


def test_gguf_file(gguf_path):
    for load_format in ("auto", "gguf"):
        source = resolve_source(str(gguf_path), load_format=load_format)
        assert source.load_format == "gguf" and source.path == source.tokenizer_path == str(gguf_path)
    assert "holds no safetensors" in refusal(gguf_path, load_format="safetensors")
    assert load_model_config(resolve_source(str(gguf_path), load_format="dummy")).num_q_heads == 6


def test_folder_with_one_gguf(gguf_path, tmp_path):
    home = gguf_path.parent
    source = resolve_source(str(home))
    assert source.load_format == "gguf" and source.path == source.tokenizer_path == str(gguf_path)
    (home / "config.json").write_text("{}")
    assert resolve_source(str(home)).load_format == "gguf"
    (home / "other.gguf").write_bytes(gguf_path.read_bytes())
    assert "2 .gguf files" in refusal(home)


def test_folder_with_both_prefers_safetensors(folder, gguf_path):
    (folder / "x.gguf").write_bytes(gguf_path.read_bytes())
    assert resolve_source(str(folder)).load_format == "safetensors"
    assert resolve_source(str(folder), load_format="gguf").path == str(folder / "x.gguf")


def test_paths_that_are_no_model(tmp_path, folder):
    assert "not a model folder" in refusal(tmp_path / "folder" / "..")
    assert "no file or folder" in refusal(tmp_path / "nothing")
    assert "no file or folder" in refusal(tmp_path / "nothing.gguf")
    assert "no file or folder" in refusal("nothing.gguf")
    assert "name the folder" in refusal(folder / "model.safetensors")
    (tmp_path / "fake.gguf").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "not a GGUF file" in refusal(tmp_path / "fake.gguf")
    assert "no name" in refusal("")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    assert "no weights" in refusal(bare)


def test_dummy(tmp_path, folder):
    for name in BUILTIN_CONFIGS:
        source = resolve_source(name, load_format="dummy")
        assert (source.load_format, source.path, source.tokenizer_path) == ("dummy", name, "dummy")
        assert "--load-format dummy" in refusal(name)
    assert resolve_source(
        "tiny-llama", load_format="dummy", tokenizer_path=str(folder)
    ).tokenizer_path == str(folder)
    config_only = tmp_path / "config-only"
    config_only.mkdir()
    (config_only / "config.json").write_text((folder / "config.json").read_text())
    source = resolve_source(str(config_only), load_format="dummy")
    assert (source.load_format, source.path, source.tokenizer_path) == (
        "dummy",
        str(config_only),
        str(config_only),
    )
    assert load_model_config(source) == load_model_config(resolve_source(str(folder)))


def test_pulled_models(tmp_path, monkeypatch, gguf_path):
    assert "phalanx pull smollm2" in refusal("smollm2", cache_dir=str(tmp_path))
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    assert "not here yet" in refusal("smollm2")
    (tmp_path / "cache").mkdir()
    file = tmp_path / "cache" / PULLED_MODELS["smollm2"].file_name
    file.write_bytes(b"GGUF")
    assert "damaged" in refusal("smollm2")
    with file.open("r+b") as grown:
        grown.truncate(PULLED_MODELS["smollm2"].file_bytes)
    source = resolve_source("smollm2", tokenizer_path=str(gguf_path))
    assert (source.load_format, source.path, source.tokenizer_path) == ("gguf", str(file), str(gguf_path))
    assert resolve_source("smollm2").tokenizer_path == str(file)
    assert resolve_source("tiny-llama", load_format="dummy", tokenizer_path="smollm2").tokenizer_path == str(
        file
    )


def test_tokenizer_paths(folder, gguf_path, tmp_path):
    def tokenizer(path: str | Path) -> str:
        return resolve_source(str(folder), tokenizer_path=str(path)).tokenizer_path

    assert tokenizer("dummy") == "dummy"
    assert tokenizer(gguf_path) == str(gguf_path)
    assert "no tokenizer at" in refusal(folder, tokenizer_path=str(tmp_path / "nothing"))
    assert "not a .gguf file" in refusal(folder, tokenizer_path=str(folder / "config.json"))


def test_options_that_contradict(folder):
    with pytest.raises(ConfigError, match="revision"):
        resolve_source(str(folder), revision="main")
    with pytest.raises(ConfigError, match="revision"):
        resolve_source("tiny-llama", load_format="dummy", revision="main")
    with pytest.raises(ConfigError, match="'pt'"):
        resolve_source(str(folder), load_format="pt")


def test_hub(folder, monkeypatch):
    calls = []

    def download(repo_id, *, revision, cache_dir, allow_patterns):
        calls.append((repo_id, revision, cache_dir, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_source("org/model-1.0", revision="v2", cache_dir="/cache")
    assert (source.name, source.load_format, source.path) == ("org/model-1.0", "safetensors", str(folder))
    assert source.revision == "v2"
    assert calls[0][:3] == ("org/model-1.0", "v2", Path("/cache"))
    assert {"config.json", "model*.safetensors", "model.safetensors.index.json"} <= set(calls[0][3])
    assert resolve_source("org/model", load_format="dummy", tokenizer_path="org/tok").tokenizer_path == str(
        folder
    )
    assert "model*.safetensors" not in calls[1][3] and "config.json" in calls[1][3]
    assert calls[2][0] == "org/tok" and calls[2][2] is None


def test_a_mistyped_shape_or_tokenizer_is_told_the_names():
    with pytest.raises(ModelError, match=r"smolm2 is no path and no name known here \(smollm2, .*tiny-llama"):
        resolve_source("smolm2", load_format="dummy")  # as `bench serving --tokenizer` asks


def test_hub_failures_are_one_line(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "could not be had from the hub" in refusal("org/no-such-model-anywhere")
    mistyped = refusal("smolm2")
    assert "smollm2, " in mistyped and "llama-3.2-1b" in mistyped and "\n" not in mistyped


def test_a_config_that_is_no_json(folder, gguf_path):
    (folder / "config.json").write_bytes(gguf_path.read_bytes())
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        load_model_config(resolve_source(str(folder)))
