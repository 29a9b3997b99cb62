"""Checkpoint metadata -> ModelConfig."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.groups import ModelConfig, ModelSource, RopeConfig
from phalanx.core.errors import ModelError
from phalanx.models.configs import hf_model_config, load_model_config
from phalanx.models.dummy import BUILTIN_CONFIGS
from tests.models.tiny import FAMILIES, save_tiny, tiny_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISSING = object()


def parse(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value is not MISSING}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return hf_model_config(folder)


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        parse(folder, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes(tmp_path, family):
    model = tiny_model(family, tie_word_embeddings=family == "qwen2")
    save_tiny(tmp_path, model)
    config, hf = hf_model_config(tmp_path), model.config
    names = set(model.state_dict())
    assert config == ModelConfig(
        architecture=type(model).__name__,
        vocab_size=160,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=16 if family == "qwen3" else 8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=hf.rope_parameters["rope_theta"]),
        max_position_embeddings=512,
        tie_word_embeddings=family == "qwen2",
        attention_bias="model.layers.0.self_attn.q_proj.bias" in names,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in names,
        eos_token_ids=(2,),
        bos_token_id=1,
        dtype="float32",
    )
    assert config.q_size == model.model.layers[0].self_attn.q_proj.out_features


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases_follow_transformers(tmp_path, family):
    flags = {"attention_bias": True} | ({"mlp_bias": True} if family == "llama" else {})
    model = tiny_model(family, **flags)
    config = hf_model_config(save_tiny(tmp_path, model))
    names = set(model.state_dict())
    for flag, part in [
        (config.attention_bias, "self_attn.v_proj"),
        (config.attention_out_bias, "self_attn.o_proj"),
        (config.mlp_bias, "mlp.down_proj"),
    ]:
        assert flag == (f"model.layers.1.{part}.bias" in names)
    assert config.attention_bias


def test_defaults_are_those_of_transformers(tmp_path):
    config = parse(tmp_path, num_key_value_heads=MISSING)
    assert config.num_kv_heads == 6 and config.max_position_embeddings == 2048
    assert config.rms_norm_eps == 1e-6 and config.rope == RopeConfig() and not config.tie_word_embeddings
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1 and config.dtype == "float32"
    mistral = parse(
        tmp_path, architectures=["MistralForCausalLM"], num_attention_heads=8, num_key_value_heads=None
    )
    assert mistral.num_kv_heads == 8 and mistral.sliding_window == 4096
    qwen3 = parse(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert qwen3.head_dim == 128 and qwen3.eos_token_ids == () and qwen3.bos_token_id is None


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("theta_inside", [False, True])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rope_spellings(tmp_path, spelling, theta_inside, kind):
    scaling: dict[str, Any] = {spelling: kind}
    expected = RopeConfig(theta=50000.0)
    if kind == "linear":
        scaling |= {"factor": 4}
        expected = RopeConfig(theta=50000.0, kind="linear", factor=4.0)
    if kind == "llama3":
        scaling |= LLAMA3
        expected = RopeConfig(theta=50000.0, kind="llama3", factor=8.0, original_max_position=8192)
    if theta_inside:
        changes = {"rope_parameters": {**scaling, "rope_theta": 50000.0}}
    else:
        changes = {"rope_scaling": scaling, "rope_theta": 50000.0}
    assert parse(tmp_path, **changes).rope == expected


def test_rope_edges(tmp_path):
    assert parse(tmp_path, rope_scaling=None, rope_theta=5e5).rope == RopeConfig(theta=5e5)
    # Theta beside rope_parameters counts only where there is none inside.
    assert parse(tmp_path, rope_parameters={"rope_type": "default"}, rope_theta=7e4).rope.theta == 7e4
    assert parse(tmp_path, rope_parameters={"rope_theta": 3e4}, rope_theta=7e4).rope.theta == 3e4
    shorter = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    rope = parse(tmp_path, rope_scaling={"type": "llama3", **shorter}, max_position_embeddings=1024).rope
    assert rope.original_max_position == 1024
    assert "'yarn'" in refusal(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0})
    assert "'dynamic'" in refusal(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4})
    assert "lacks factor" in refusal(tmp_path, rope_scaling={"type": "linear"})
    assert "lacks low_freq_factor" in refusal(tmp_path, rope_scaling={"type": "llama3", "factor": 8.0})
    assert "factor" in refusal(tmp_path, rope_scaling={"type": "linear", "factor": 0})
    assert "not below" in refusal(tmp_path, rope_scaling={"type": "llama3", **LLAMA3, "low_freq_factor": 4.0})
    assert "partial_rotary_factor" in refusal(tmp_path, partial_rotary_factor=0.5)


def test_sliding_windows(tmp_path):
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert parse(tmp_path, **mistral, sliding_window=None).sliding_window is None
    assert parse(tmp_path, **mistral, sliding_window=64).sliding_window == 64
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        qwen: dict[str, Any] = {"architectures": [name], "sliding_window": 32}
        assert parse(tmp_path, **qwen).sliding_window is None
        assert parse(tmp_path, **qwen, use_sliding_window=False).sliding_window is None
        on = {**qwen, "use_sliding_window": True}
        assert parse(tmp_path, **on, max_window_layers=1).sliding_window == 32
        assert parse(tmp_path, **on, max_window_layers=2).sliding_window is None
        mixed = ["full_attention", "sliding_attention"]
        assert parse(tmp_path, **on, max_window_layers=2, layer_types=mixed).sliding_window == 32
        assert parse(tmp_path, **on, layer_types=["full_attention"] * 2).sliding_window is None
        assert parse(tmp_path, **{**on, "sliding_window": None}, max_window_layers=0).sliding_window is None
    assert parse(tmp_path, sliding_window=32).sliding_window is None  # Llama knows no window


def test_end_tokens(tmp_path):
    assert parse(tmp_path, eos_token_id=7).eos_token_ids == (7,)
    assert parse(tmp_path, eos_token_id=[7, 9, 7]).eos_token_ids == (7, 9)
    assert parse(tmp_path, eos_token_id=None).eos_token_ids == ()
    assert parse(tmp_path, generation={"eos_token_id": [5, 6]}, eos_token_id=7).eos_token_ids == (5, 6)
    assert parse(tmp_path, generation={"eos_token_id": 0}, eos_token_id=7).eos_token_ids == (0,)
    assert parse(tmp_path, generation={}, eos_token_id=7).eos_token_ids == (7,)
    assert parse(tmp_path, generation={"bos_token_id": 3}, bos_token_id=None).bos_token_id == 3
    assert "eos_token_id 160" in refusal(tmp_path, eos_token_id=160)


def test_more_end_tokens_than_a_row_has_room_for_are_refused(tmp_path: Path) -> None:
    source = ModelSource(
        name="m", load_format="safetensors", path=str(tmp_path), tokenizer_path=str(tmp_path)
    )
    parse(tmp_path, eos_token_id=[*range(16), 3])
    assert len(load_model_config(source).eos_token_ids) == 16
    parse(tmp_path, generation={"eos_token_id": list(range(17))})
    with pytest.raises(ModelError, match=f"^{tmp_path} has 17 end tokens.*at most 16"):
        load_model_config(source)


def test_dtypes(tmp_path):
    assert parse(tmp_path, torch_dtype="bfloat16").dtype == "bfloat16"
    assert parse(tmp_path, dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert "float8_e4m3fn" in refusal(tmp_path, dtype="float8_e4m3fn")


def test_refusals_name_what_is_wrong(tmp_path):
    unknown = refusal(tmp_path, architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in unknown and "Qwen3ForCausalLM" in unknown
    assert "architecture" in refusal(tmp_path, architectures=MISSING)
    assert "'gelu'" in refusal(tmp_path, hidden_act="gelu")
    assert "awq" in refusal(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    assert "hidden_size" in refusal(tmp_path, hidden_size=MISSING)
    assert "num_hidden_layers" in refusal(tmp_path, num_hidden_layers=0)
    assert "vocab_size" in refusal(tmp_path, vocab_size="many")
    assert "no multiple" in refusal(tmp_path, hidden_size=50)
    assert parse(tmp_path, hidden_size=50, head_dim=8).q_size == 48
    assert "odd" in refusal(tmp_path, head_dim=7)
    assert "evenly" in refusal(tmp_path, num_key_value_heads=4)
    assert "rms_norm_eps" in refusal(tmp_path, rms_norm_eps=0)


def test_unreadable_files(tmp_path):
    def error() -> str:
        with pytest.raises(ModelError) as caught:
            hf_model_config(tmp_path)
        return str(caught.value)

    assert "has no config.json" in error()
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read as JSON" in error()
    (tmp_path / "config.json").write_bytes(b"GGUF\x03\x00\xff\xfe")
    assert "config.json cannot be read as JSON" in error()
    (tmp_path / "config.json").write_text("[]")
    assert "JSON object" in error()
    (tmp_path / "config.json").write_text("[" * 200_000)
    assert "config.json cannot be read as JSON" in error()
    (tmp_path / "config.json").write_text('{"vocab_size": 1' + "0" * 5000 + "}")
    assert "config.json cannot be read as JSON" in error()


@pytest.mark.parametrize("value", [10**400, 2**1024 - 1, 2**31])
@pytest.mark.parametrize(
    "key", ["vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "factor", "bos_token_id"]
)
def test_numbers_beyond_any_use_are_refused_in_a_short_line(tmp_path: Path, key: str, value: int) -> None:
    if value == 2**31 and key in ("rms_norm_eps", "rope_theta", "factor"):  # a float like others
        return
    changes: dict[str, Any] = {key: value}
    if key == "factor":
        changes = {"rope_scaling": {"rope_type": "linear", "factor": value}}
    line = refusal(tmp_path, **changes)
    assert key in line and "\n" not in line and len(line) < 400


def test_an_original_context_beyond_any_use_settles_to_what_json_can_carry(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 1e300}
    assert parse(tmp_path, rope_scaling=scaling).rope.original_max_position == 2**31 - 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
_KEYS = sorted(
    {
        *LLAMA,
        "head_dim",
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "eos_token_id",
        "bos_token_id",
        "dtype",
    }
    | {
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "max_window_layers",
        "attention_bias",
        "hidden_act",
    }
    | {"tie_word_embeddings", "quantization_config", "rms_norm_eps", "max_position_embeddings"}
)


@pytest.mark.fuzz
@given(
    changes=st.dictionaries(st.sampled_from(_KEYS), _JSON, min_size=1, max_size=3),
    scaling=st.none() | st.dictionaries(st.sampled_from([*LLAMA3, "rope_type", "rope_theta"]), _JSON),
    architecture=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"]),
)
def test_any_json_is_parsed_or_refused(tmp_path_factory, changes, scaling, architecture):
    folder = tmp_path_factory.getbasetemp()
    try:
        config = parse(folder, **{"architectures": [architecture], "rope_scaling": scaling, **changes})
    except ModelError:
        return
    assert config.head_dim % 2 == 0 and config.num_q_heads % config.num_kv_heads == 0
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
    assert config.rope.kind in ("default", "linear", "llama3") and config.rope.original_max_position >= 1


def test_builtin_shapes():
    def load(name: str) -> ModelConfig:
        return load_model_config(
            ModelSource(name=name, load_format="dummy", path=name, tokenizer_path="dummy")
        )

    for name in BUILTIN_CONFIGS:
        assert load(name) is BUILTIN_CONFIGS[name]
    assert load("llama-3.2-1b").rope.factor == 32.0
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load("llama-17-1t")


def test_needs_no_torch():
    code = "import sys, phalanx.models.configs, phalanx.models.source; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
