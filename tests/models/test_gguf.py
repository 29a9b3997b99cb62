"""GGUF: header, names, row order, quantised blocks, rotary scaling, damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.groups import ModelConfig, ModelSource, RopeConfig
from phalanx.core.errors import ModelError
from phalanx.core.gguf_header import open_gguf
from phalanx.models.configs import load_model_config
from phalanx.models.gguf_file import read_tensor, unpermute
from phalanx.models.source import resolve_source
from phalanx.models.weights import iter_weights
from tests.models.tiny import FAMILIES, gguf_name, interleave, save_tiny_gguf, tiny_model, transformers_gguf

# Rows of whole Q8_0 blocks.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def source_of(path: Path) -> ModelSource:
    return ModelSource(name="m", load_format="gguf", path=str(path), tokenizer_path=str(path))


def load(path: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    source = source_of(path)
    config = load_model_config(source)
    return config, dict(iter_weights(source, config, progress=False))


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_float_round_trip(tmp_path, family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    config, weights = load(save_tiny_gguf(tmp_path / "m.gguf", model))
    expected = model.state_dict()
    if tied:
        del expected["lm_head.weight"]
    assert weights.keys() == expected.keys()
    for name, values in weights.items():
        assert torch.equal(values, expected[name]), name
        values.add_(1)  # its own memory: the map is read-only
    assert config.architecture == ("LlamaForCausalLM" if family == "mistral" else type(model).__name__)
    assert config.tie_word_embeddings == tied and config.dtype == "float32"
    assert config.quantization is None
    assert config.attention_bias == (family == "qwen2") and config.qk_norm == (family == "qwen3")
    assert config.head_dim == (16 if family == "qwen3" else 8) and config.num_kv_heads == 2
    assert config.rms_norm_eps == 1e-5 and config.rope == RopeConfig() and config.sliding_window is None
    assert config.vocab_size == 160 and config.max_position_embeddings == 512
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1


def test_biases_of_llama_are_reordered_too(tmp_path):
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    config, weights = load(save_tiny_gguf(tmp_path / "m.gguf", model))
    assert config.attention_bias and config.attention_out_bias and config.mlp_bias
    for name, values in model.state_dict().items():
        assert torch.equal(weights[name], values), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("quantization", "tolerance", "dtype"),
    [
        (GGMLQuantizationType.F16, 1e-3, "float16"),
        (GGMLQuantizationType.BF16, 8e-3, "bfloat16"),
        (GGMLQuantizationType.Q8_0, 8e-3, "bfloat16"),
        (GGMLQuantizationType.Q4_1, 8e-2, "bfloat16"),
    ],
)
def test_quantised_round_trip(tmp_path, family, quantization, tolerance, dtype):
    model = tiny_model(family, **WIDE)
    config, weights = load(save_tiny_gguf(tmp_path / "m.gguf", model, quantization=quantization))
    assert config.dtype == dtype
    assert config.quantization == (None if quantization.name in ("F16", "BF16") else quantization.name)
    for name, values in model.state_dict().items():
        assert weights[name].dtype == torch.float32 and weights[name].shape == values.shape
        error = (weights[name] - values).abs().max() / values.abs().max()
        assert error < tolerance, name
        assert (error > 0) == (values.ndim == 2), name


def test_transformers_reads_the_same(tmp_path):
    """Pins the row order of `save_tiny_gguf` itself to somebody else's reader."""
    model = tiny_model("llama", **WIDE)
    path = save_tiny_gguf(tmp_path / "m.gguf", model, quantization=GGMLQuantizationType.Q8_0)
    config, weights = load(path)
    theirs = transformers_gguf(path, config)
    assert theirs.keys() == weights.keys()
    for name, values in weights.items():
        assert torch.equal(values, torch.as_tensor(theirs[name])), name


@pytest.mark.smollm2
def test_smollm2_is_what_the_gguf_package_reads():
    try:
        source = resolve_source("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    config = load_model_config(source)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (9, 3, 64, 30)
    assert config.eos_token_ids == (2,) and config.tie_word_embeddings and config.rope.theta == 100000.0
    reader = gguf.GGUFReader(source.path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    weights = dict(iter_weights(source, config, progress=False))
    assert theirs.keys() == {gguf_name(name) for name in weights}
    heads = {"attn_q": 9, "attn_k": 3}
    for name, values in weights.items():
        if name.startswith("model.layers.") and not name.startswith(("model.layers.0.", "model.layers.29.")):
            continue  # for time
        raw = theirs[gguf_name(name)]
        part = gguf_name(name).split(".")[-2]
        ours = interleave(values.numpy(), heads[part]) if part in heads else values.numpy()
        assert np.array_equal(gguf.quants.dequantize(raw.data, raw.tensor_type), ours), name


def test_unpermute_turns_interleaved_pairs_into_halves():
    rows = np.arange(12, dtype=np.float32)  # two heads of six rows
    assert unpermute(rows, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    matrix = np.repeat(rows[:, None], 3, axis=1)
    assert unpermute(matrix, 2)[:, 1].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """From transformers' inverse frequencies, with and without the scaling."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.double().numpy()).astype(np.float32)


@pytest.mark.parametrize(("head_dim", "factor"), [(64, 32.0), (128, 8.0)])
def test_llama31_scaling_from_its_tensor(tmp_path, head_dim, factor):
    model = tiny_model(
        "llama", head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    divisors = llama3_divisors(head_dim, 5e5, factor)

    def written(factors: np.ndarray) -> Path:
        return save_tiny_gguf(
            tmp_path / "m.gguf",
            model,
            metadata={"llama.attention.key_length": head_dim, "llama.attention.value_length": head_dim},
            extra_tensors={"rope_freqs.weight": factors.astype(np.float32)},
        )

    config, weights = load(written(divisors))
    assert config.rope.kind == "llama3" and config.rope.factor == pytest.approx(factor, rel=1e-5)
    assert (config.rope.low_freq_factor, config.rope.high_freq_factor) == (1.0, 4.0)
    assert config.rope.original_max_position == 8192 and config.rope.theta == 5e5
    assert len(weights) == len(model.state_dict())
    assert load(written(np.ones(head_dim // 2)))[0].rope == RopeConfig(theta=5e5)
    bent = divisors.copy()
    bent[head_dim // 4] *= 1.01
    assert "rope_freqs" in refusal(written(bent))
    assert "rope_freqs" in refusal(written(divisors[:-1]))


def test_metadata_variants(tmp_path):
    model = tiny_model("llama")

    def write(**metadata: Any) -> Path:
        return save_tiny_gguf(
            tmp_path / "m.gguf", model, metadata={key.replace("__", "."): v for key, v in metadata.items()}
        )

    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    assert load(write(**linear))[0].rope == RopeConfig(kind="linear", factor=4.0)
    assert load(write(llama__rope__scale_linear=2.0))[0].rope == RopeConfig(kind="linear", factor=2.0)
    assert load(write(llama__rope__scaling__type="none"))[0].rope == RopeConfig()
    assert "'yarn'" in refusal(write(llama__rope__scaling__type="yarn"))
    assert load(write(llama__attention__sliding_window=64))[0].sliding_window == 64
    assert load(write(tokenizer__ggml__eot_token_id=9))[0].eos_token_ids == (2, 9)
    assert "eot_token_id" in refusal(write(tokenizer__ggml__eot_token_id=160))
    assert "mixture" in refusal(write(llama__expert_count=8))
    assert "split" in refusal(write(split__count=2))
    assert "part of the head" in refusal(write(llama__rope__dimension_count=4))


def test_refusals(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "gemma" in refusal(path) and "qwen3" in refusal(path)
    save_tiny_gguf(
        path, tiny_model("llama"), extra_tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    )
    assert "blk.0.attn_sinks.weight" in refusal(path)
    path.write_bytes(b"")
    assert "m.gguf" in refusal(path)
    path.write_bytes(b'{"architectures": []}')
    assert "not a GGUF file" in refusal(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3))
    assert "big-endian" in refusal(path)
    assert "missing.gguf" in refusal(tmp_path / "missing.gguf")


def test_a_type_without_dequantiser_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 8), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight has type I32"):
        read_tensor(file, file.tensors["blk.0.attn_q.weight"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    save_tiny_gguf(path, tiny_model("qwen2", num_hidden_layers=1, vocab_size=32))
    return path.read_bytes()


@pytest.mark.fuzz
@given(data=st.data())
def test_damaged_files_are_refused(whole, tmp_path_factory, data):
    """Cut short: always refused. With bytes changed in the header: read or refused, nothing else."""
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 33))])  # up to 32 bytes are padding
        with pytest.raises(ModelError):
            load(path)
        return
    damaged = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        config, weights = load(path)
    except ModelError:
        return
    assert weights["model.embed_tokens.weight"].shape == (config.vocab_size, config.hidden_size)
