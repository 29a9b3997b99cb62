"""Weights from safetensors, checks on them, and dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.config.groups import ModelConfig, ModelSource
from phalanx.core.errors import ModelError
from phalanx.models.configs import hf_model_config
from phalanx.models.dummy import BUILTIN_CONFIGS
from phalanx.models.source import resolve_source
from phalanx.models.weights import check_weights, expected_weights, iter_dummy_weights, iter_weights
from tests.models.tiny import FAMILIES, save_tiny, tiny_model

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def load(folder: Path) -> dict[str, torch.Tensor]:
    source = resolve_source(str(folder))
    assert source.load_format == "safetensors"
    return dict(iter_weights(source, hf_model_config(folder), progress=False))


def refusal(folder: Path) -> str:
    """The error, which must come before the first tensor."""
    weights = iter_weights(resolve_source(str(folder)), hf_model_config(folder), progress=False)
    with pytest.raises(ModelError) as caught:
        next(weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite model.safetensors with `changes` (dots as __); None takes a tensor out."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def single(tmp_path) -> Path:
    return save_tiny(tmp_path, tiny_model("llama"))


@pytest.fixture
def sharded(tmp_path) -> Path:
    save_tiny(tmp_path, tiny_model("llama"), max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_size", [None, "60KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path, family, max_shard_size, dtype):
    model = tiny_model(family, dtype=dtype)
    weights = load(save_tiny(tmp_path, model, max_shard_size=max_shard_size))
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, values in weights.items():
        assert values.dtype == dtype and torch.equal(values, expected[name]), name


@pytest.mark.parametrize(
    ("family", "flags"),
    [(family, flags) for family in FAMILIES for flags in ({}, {"tie_word_embeddings": True})]
    + [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_expected_weights_are_the_parameters_of_transformers(tmp_path, family, flags):
    model = tiny_model(family, **flags)
    (tmp_path / "config.json").write_text(
        json.dumps(model.config.to_dict() | {"architectures": [type(model).__name__]})
    )
    parameters = {name: tuple(values.shape) for name, values in model.named_parameters()}
    assert expected_weights(hf_model_config(tmp_path)) == parameters


def test_tied_checkpoint_may_carry_its_head(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    save_tiny(tmp_path, model)
    assert "lm_head.weight" not in load(tmp_path)
    head = torch.full((160, 48), 3.0)
    edit(tmp_path, lm_head__weight=head)
    assert torch.equal(load(tmp_path)["lm_head.weight"], head)
    edit(tmp_path, model__embed_tokens__weight=None)
    assert "model.embed_tokens.weight" not in load(tmp_path)  # the shared matrix, under its other name
    edit(tmp_path, lm_head__weight=None)
    assert "lacks model.embed_tokens.weight" in refusal(tmp_path)
    edit(tmp_path, model__embed_tokens__weight=torch.ones(160, 48), lm_head__weight=torch.ones(8, 48))
    assert "lm_head.weight has shape [8, 48], expected [160, 48]" in refusal(tmp_path)


def test_missing_leftover_and_misshapen_tensors(single):
    norm = torch.ones(48)
    edit(single, model__norm__weight=None)
    assert f"lacks {NORM}" in refusal(single)
    edit(single, model__norm__weight=norm, model__extra__weight=norm.clone())
    assert "model.extra.weight" in refusal(single)
    edit(single, model__extra__weight=None, model__norm__weight=torch.ones(47))
    assert f"{NORM} has shape [47], expected [48]" in refusal(single)
    edit(single, model__norm__weight=norm)
    assert torch.equal(load(single)[NORM], norm)


def test_inv_freq_buffers_are_passed_over(single, tmp_path_factory):
    edit(single, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert len(load(single)) == len(tiny_model("llama").state_dict())
    folder = save_tiny(tmp_path_factory.mktemp("sharded"), tiny_model("llama"), max_shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[0]
    save_file(load_file(shard) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, shard)
    assert len(load(folder)) == len(tiny_model("llama").state_dict())


def test_whole_number_tensors_are_refused(single):
    edit(single, model__norm__weight=torch.ones(48, dtype=torch.int32))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int32"):
        load(single)


def test_many_missing_tensors_are_counted(tmp_path):
    config = BUILTIN_CONFIGS["tiny-llama"]
    expected = expected_weights(config)
    check_weights(expected, config)
    with pytest.raises(ModelError, match=r"lacks .*, .*, .* and 15 more"):
        check_weights({name: expected[name] for name in list(expected)[:2]}, config)
    with pytest.raises(ModelError, match="0 tensors, too few for 2 layers"):
        check_weights({}, config)
    with pytest.raises(ModelError, match=r"holds a, b, c and 1 more"):
        check_weights({**expected, "a": (1,), "b": (1,), "c": (1,), "d": (1,)}, config)


def shard_with(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def test_missing_shard(sharded):
    shard = shard_with(sharded, NORM)
    shard.unlink()
    assert shard.name in refusal(sharded)


def test_index_names_what_its_shard_lacks(sharded):
    shard = shard_with(sharded, NORM)
    tensors = load_file(shard)
    del tensors[NORM]
    save_file(tensors, shard)
    error = refusal(sharded)
    assert NORM in error and shard.name in error


def test_shard_holds_what_the_index_does_not_name(sharded):
    shard = shard_with(sharded, NORM)
    save_file(load_file(shard) | {"stowaway": torch.ones(1)}, shard)
    error = refusal(sharded)
    assert "stowaway" in error and shard.name in error


def test_a_tensor_in_two_shards(sharded):
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    save_file(load_file(first) | {NORM: torch.ones(48)}, first)
    assert NORM in refusal(sharded) and last.is_file()


def test_files_outside_the_index_are_not_read(sharded):
    save_file({"other": torch.ones(1)}, sharded / "consolidated.safetensors")
    assert len(load(sharded)) == len(tiny_model("llama").state_dict())


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_unreadable_index(sharded, text):
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


def test_index_cannot_point_outside_its_folder(sharded):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {NORM: "../evil.safetensors"}}))
    assert "outside" in refusal(sharded)


def test_several_files_without_an_index(sharded):
    (sharded / INDEX).unlink()
    assert "no model.safetensors.index.json" in refusal(sharded)


def test_damaged_file(single):
    path = single / "model.safetensors"
    data = path.read_bytes()
    for damaged in (b"", data[:5], data[:200], data[:-1]):
        path.write_bytes(damaged)
        assert "model.safetensors cannot be read" in refusal(single)


def test_a_bar_on_standard_error_alone(single, capfd):
    weights = iter_weights(resolve_source(str(single)), hf_model_config(single), progress=True)
    assert len(list(weights)) == 21
    assert capfd.readouterr().out == ""


def test_dummy_sources_have_no_weights_to_read():
    source = ModelSource(name="x", load_format="dummy", path="tiny-llama", tokenizer_path="dummy")
    with pytest.raises(ModelError, match="no weights"):
        next(iter_weights(source, BUILTIN_CONFIGS["tiny-llama"], progress=False))


def make_dummy(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(iter_dummy_weights(config, seed=seed, dtype=dtype, device="cpu"))


def test_dummy_weights():
    config = BUILTIN_CONFIGS["tiny-llama"]
    weights = make_dummy(config, 7)
    check_weights({name: tuple(values.shape) for name, values in weights.items()}, config)
    for name, values in weights.items():
        if name.endswith("norm.weight"):
            assert bool((values == 1).all()), name
        else:
            assert abs(float(values.std()) - 0.02) < 0.002 and abs(float(values.mean())) < 0.002, name
    again, other = make_dummy(config, 7), make_dummy(config, 8)
    projection = "model.layers.1.self_attn.q_proj.weight"
    assert all(torch.equal(again[name], values) for name, values in weights.items())
    assert not torch.equal(other[projection], weights[projection])
    assert not torch.equal(weights[projection], weights[projection.replace(".1.", ".0.")])
    assert {values.dtype for values in make_dummy(config, 7, torch.bfloat16).values()} == {torch.bfloat16}


def test_published_sizes():
    billions = {"llama-3-8b": 8.03, "llama-3.2-1b": 1.236, "qwen3-0.6b": 0.596}
    for name, expected in billions.items():
        count = sum(torch.Size(shape).numel() for shape in expected_weights(BUILTIN_CONFIGS[name]).values())
        assert count / 1e9 == pytest.approx(expected, rel=1e-3), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_dummy_weights_are_made_on_the_device():
    config = BUILTIN_CONFIGS["tiny-llama"]
    weights = dict(iter_dummy_weights(config, seed=1, dtype=torch.bfloat16, device="cuda"))
    assert {values.device.type for values in weights.values()} == {"cuda"}
    assert abs(float(weights["model.embed_tokens.weight"].float().std()) - 0.02) < 0.002
