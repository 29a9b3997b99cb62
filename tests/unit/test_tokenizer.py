"""Tokenizers from GGUF fields, from model folders, and made-up ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from phalanx.core.errors import ModelError, RequestError
from phalanx.text.gguf_tokenizer import tokenizer_from_fields
from phalanx.text.parts import surround
from phalanx.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit import tiny_tokenizers

DATA = Path(__file__).parent.parent / "data"
CASES = json.loads((DATA / "smollm2_tokens.json").read_text(encoding="utf-8"))["cases"]
TEXTS = [
    "",
    "a",
    " ",
    "  \n\n x",
    "It's 12345+678 = 13023!\r\n\tSUPER'S",
    "naïve é 世界 👩‍👩‍👧 ½ ٣٤ Ⅷ",
    "don't DON'T  end  ",
]


def fields(pre: str = "gpt-2", **extra: Any) -> dict[str, Any]:
    """GGUF fields of the tiny byte-level tokenizer."""
    tree = json.loads(tiny_tokenizers.byte_level()._backend.to_str())
    tokens = sorted(tree["model"]["vocab"], key=tree["model"]["vocab"].get)
    added = {t["content"]: 3 if t["special"] else 4 for t in tree["added_tokens"]}
    tokens += [token for token in added if token not in tree["model"]["vocab"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [added.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tree["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    } | {f"tokenizer.{name}": value for name, value in extra.items()}


def from_fields(pre: str = "gpt-2", **extra: Any) -> Tokenizer:
    return Tokenizer(tokenizer_from_fields(fields(pre, **extra), "x.gguf"))


# --- GGUF


@pytest.mark.smollm2
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:12])
def test_smollm2_ids_equal_llama_cpp(case: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizers.smollm2()
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.smollm2
def test_smollm2_facts() -> None:
    tokenizer = tiny_tokenizers.smollm2()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.encode("") == []
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.decode([1, 19556, 2]) == "Hello"


def test_gguf_equals_the_tokenizer_it_was_made_from() -> None:
    original, rebuilt = tiny_tokenizers.byte_level(), from_fields()
    for text in [*TEXTS, "<s>x<tool>y</s>世界人"]:
        assert rebuilt.encode(text) == original.encode(text)
    assert rebuilt.special_ids == original.special_ids
    assert rebuilt.eos_token_ids == original.eos_token_ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 1234 it's", ["a", "Ġ1234", "Ġit", "'s"]),
        ("default", "a 1234", ["a", "Ġ1234"]),
        ("smollm", "a 1234 it's", ["a", "Ġ", "1", "2", "3", "4", "Ġit", "'s"]),
        ("llama-bpe", "a 1234 IT'S\n\n b", ["a", "Ġ", "123", "4", "ĠIT", "'S", "ĊĊ", "Ġb"]),
        ("qwen2", "a 1234 IT'S\n\n b", ["a", "Ġ", "1", "2", "3", "4", "ĠIT", "'S", "ĊĊ", "Ġb"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, pieces: list[str]) -> None:
    backend = from_fields(pre)._backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_llama_bpe_takes_whole_words_and_adds_bos() -> None:
    values = fields("llama-bpe")
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "xyzzy"]  # no merge leads to it
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 1]
    tokenizer = Tokenizer(tokenizer_from_fields(values, "x.gguf"))
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("xyzzy") == [bos, len(values["tokenizer.ggml.tokens"]) - 1]
    assert tokenizer.encode("xyzzy", add_special_tokens=False) == [len(values["tokenizer.ggml.tokens"]) - 1]
    assert tokenizer.encode("") == [bos]


def test_qwen2_composes_characters() -> None:
    assert from_fields("qwen2").encode("e\u0301") == from_fields("qwen2").encode("é")
    assert from_fields("gpt-2").encode("e\u0301") != from_fields("gpt-2").encode("é")


def test_bos_and_eos_flags() -> None:
    bos, eos = fields()["tokenizer.ggml.bos_token_id"], fields()["tokenizer.ggml.eos_token_id"]
    plain = from_fields().encode("x")
    both = from_fields(**{"ggml.add_bos_token": True, "ggml.add_eos_token": True})
    assert both.encode("x") == [bos, *plain, eos]
    assert both.encode("x", add_special_tokens=False) == plain
    assert from_fields("llama-bpe", **{"ggml.add_bos_token": False}).encode("x") == plain


def test_end_of_turn_ends_too() -> None:
    tool = fields()["tokenizer.ggml.tokens"].index("<tool>")
    eos = fields()["tokenizer.ggml.eos_token_id"]
    assert from_fields(**{"ggml.eot_token_id": tool}).eos_token_ids == (eos, tool)
    assert from_fields(**{"ggml.eot_token_id": eos}).eos_token_ids == (eos,)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ggml.model": "t5"}, "'t5' is not supported"),
        ({"ggml.model": "llama"}, "0 scores"),
        ({"ggml.pre": "tekken"}, "'tekken' is not supported"),
        ({"ggml.model": None}, "holds no tokenizer"),
        ({"ggml.tokens": []}, "holds no tokenizer"),
        ({"ggml.tokens": ["a", "b", "a"]}, "'a' is in the vocabulary twice"),
        ({"ggml.merges": ["q qqq"]}, "merges do not fit"),
        ({"ggml.merges": ["q\nz qqq"]}, "merges do not fit"),
        ({"ggml.merges": ["abc"]}, "merges do not fit"),
        ({"ggml.eos_token_id": 10**6}, "eos_token_id 1000000 is outside"),
    ],
)
def test_gguf_refusals(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:
        from_fields(**change)
    assert "\n" not in str(error.value) and "x.gguf" in str(error.value)


def sentencepiece_fields(**extra: Any) -> dict[str, Any]:
    data = json.loads((DATA / "sentencepiece_bpe.json").read_text(encoding="utf-8"))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.scores": data["scores"],
        "tokenizer.ggml.token_type": data["kinds"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.{name}": value for name, value in extra.items()}


def test_sentencepiece_ids_equal_sentencepiece() -> None:
    tokenizer = Tokenizer(tokenizer_from_fields(sentencepiece_fields(), "x.gguf"))
    assert tokenizer.table is not None and tokenizer.table.is_byte is not None
    for case in json.loads((DATA / "sentencepiece_bpe.json").read_text(encoding="utf-8"))["cases"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert tokenizer.encode(case["text"]) == [1, *case["ids"]]
        assert tokenizer.decode([1, *case["ids"], 2]) == case["text"].replace("▁", " ")


def test_sentencepiece_special_tokens_and_prefix() -> None:
    tokenizer = Tokenizer(tokenizer_from_fields(sentencepiece_fields(), "x.gguf"))
    assert tokenizer.special_ids == {0, 1, 2} and tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("<s>a</s>", add_special_tokens=False) == [1, *tokenizer.encode("a")[1:], 2]
    bare = sentencepiece_fields(**{"ggml.add_space_prefix": False, "ggml.add_bos_token": False})
    without = Tokenizer(tokenizer_from_fields(bare, "x.gguf"))
    assert without.encode(" a") == tokenizer.encode("a")[1:]
    assert without.decode(without.encode(" a")) == " a"
    assert without.encode("a") == [without._backend.token_to_id("a")]


def test_a_written_gguf_file(tmp_path: Path) -> None:
    values = fields("smollm")
    writer = gguf.GGUFWriter(str(tmp_path / "tiny.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(values["tokenizer.ggml.tokens"])
    writer.add_token_types(values["tokenizer.ggml.token_type"])
    writer.add_token_merges(values["tokenizer.ggml.merges"])
    writer.add_eos_token_id(values["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template("{{ messages[0].content }}{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(str(tmp_path / "tiny.gguf"), vocab_size=512)
    assert tokenizer.vocab_size == 512
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("a 12") == from_fields("smollm").encode("a 12")
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x</s>"


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        load_tokenizer(str(tmp_path / "absent.gguf"))
    for name, content in (("text.gguf", b"{}" * 100), ("empty.gguf", b""), ("cut.gguf", b"GGUF\x03\0\0\0")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=r"is not a GGUF file|cannot read|cut short") as error:
            load_tokenizer(str(tmp_path / name))
        assert "\n" not in str(error.value)


# --- Folders


def folder(path: Path, **files: Any) -> Path:
    """A model folder with the tiny byte-level tokenizer and these JSON files."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(tiny_tokenizers.byte_level()._backend.to_str(), encoding="utf-8")
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_folder_equals_transformers(tmp_path: Path) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": True,
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    path = folder(tmp_path / "model", tokenizer_config=config)
    ours, theirs = load_tokenizer(str(path)), PreTrainedTokenizerFast.from_pretrained(str(path))
    for text in [*TEXTS, "<s>x<tool>y</s>"]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.bos_token_id == theirs.bos_token_id and ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_ids == frozenset(theirs.all_special_ids)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, return_dict=False)


def test_clean_up_never_touches_the_text(tmp_path: Path) -> None:
    path = folder(tmp_path, tokenizer_config={"clean_up_tokenization_spaces": True})
    tokenizer = load_tokenizer(str(path))
    text = "a , b . c ! do n't  it 's"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("in_file", [True, False])
def test_what_folders_add_is_what_tokenizer_json_adds(tmp_path: Path, in_file: bool) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": not in_file, "add_eos_token": True}
    path = folder(tmp_path, tokenizer_config=config)
    if in_file:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        surround(backend, ("<s>", backend.token_to_id("<s>")), None)
        backend.save(str(path / "tokenizer.json"))
    ours, theirs = load_tokenizer(str(path)), PreTrainedTokenizerFast.from_pretrained(str(path))
    assert ours.encode("x") == theirs("x")["input_ids"]
    assert len(ours.encode("x")) == 1 + in_file
    assert len(ours.encode("x", add_special_tokens=False)) == 1


def test_special_tokens_map_and_added_tokens_of_the_config(tmp_path: Path) -> None:
    size = tiny_tokenizers.byte_level().vocab_size
    added = {
        str(size): {"content": "<new>", "special": True},
        str(size + 1): {"content": "<word>", "special": False},
    }
    path = folder(tmp_path, special_tokens_map={"eos_token": "</s>", "additional_special_tokens": ["<tool>"]})
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eos_token_ids == tiny_tokenizers.byte_level().eos_token_ids
    assert tokenizer.encode("<tool>")[0] in tokenizer.special_ids
    path = folder(tmp_path, tokenizer_config={"added_tokens_decoder": added, "pad_token": "<tool>"})
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("<new><word>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<word>"
    assert tokenizer.eos_token_ids == ()  # the map is an older folder's
    assert tokenizer.encode("<tool>")[0] in tokenizer.special_ids
    path = folder(tmp_path, tokenizer_config={"added_tokens_decoder": {str(size + 7): {"content": "<new>"}}})
    with pytest.raises(ModelError, match="<new>"):
        load_tokenizer(str(path))


def test_where_a_folder_keeps_its_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    path = folder(tmp_path, chat_template={"chat_template": "json"})
    assert load_tokenizer(str(path)).render_chat(messages) == "json"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    assert (
        load_tokenizer(str(folder(path, tokenizer_config={"chat_template": named}))).render_chat(messages)
        == "named"
    )
    (path / "chat_template.jinja").write_text("jinja", encoding="utf-8")
    assert load_tokenizer(str(path)).render_chat(messages) == "jinja"
    assert load_tokenizer(str(path), chat_template="{{ 'mine' }}").render_chat(messages) == "mine"


def test_truncation_of_the_file_is_ignored(tmp_path: Path) -> None:
    path = folder(tmp_path)
    tree = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    tree["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (path / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    assert len(load_tokenizer(str(path)).encode("a1b2c3d4e5")) > 3


def test_folder_refusals(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"tokenizer\.model alone"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not a readable tokenizer") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)
    shutil.rmtree(tmp_path)
    folder(tmp_path, tokenizer_config=[1])
    with pytest.raises(ModelError, match="must hold a JSON object"):
        load_tokenizer(str(tmp_path))


TOKEN = {"content": "<new>", "special": True}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"added_tokens_decoder": [TOKEN]}, "must be an object"),
        ({"added_tokens_decoder": "text"}, "must be an object"),
        ({"added_tokens_decoder": 5}, "must be an object"),
        ({"added_tokens_decoder": {"x": TOKEN}}, "key 'x'"),
        ({"added_tokens_decoder": {"1.5": TOKEN}}, "key '1.5'"),
        ({"added_tokens_decoder": {"9" * 5000: TOKEN}}, "key '99"),
        ({"added_tokens_decoder": {"7": {"special": True}}}, "no text for id 7"),
        ({"added_tokens_decoder": {"7": {"content": 5}}}, "no text for id 7"),
        ({"added_tokens_decoder": {"7": {"content": ["a"]}}}, "no text for id 7"),
        ({"added_tokens_decoder": {"7": "text"}}, "no text for id 7"),
        ({"added_tokens_decoder": {"7": {"content": "\ud800"}}}, "not readable"),
    ],
)
def test_damaged_added_tokens_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folder(tmp_path, tokenizer_config=config)
    with pytest.raises(ModelError) as error:
        load_tokenizer(str(tmp_path))
    line = str(error.value)
    assert words in line and "tokenizer_config.json" in line and "\n" not in line and len(line) < 400


def test_flags_of_added_tokens_may_be_of_any_type(tmp_path: Path) -> None:
    size = load_tokenizer(str(folder(tmp_path))).vocab_size
    token = {"content": "<new>", "special": None, "lstrip": 0, "normalized": "yes"}
    folder(tmp_path, tokenizer_config={"added_tokens_decoder": {str(size): token}})
    assert load_tokenizer(str(tmp_path)).encode("<new>")[-1] == size


def test_damaged_templates(tmp_path: Path) -> None:
    named = [{"name": []}, {"name": {}, "template": "x"}, 5, {"template": "y"}]
    path = folder(tmp_path, tokenizer_config={"chat_template": named})
    assert load_tokenizer(str(path)).chat_template is None
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: not readable"):
        load_tokenizer(str(path))


def test_json_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "tokenizer_config.json").write_text('{"a":' + "[" * 200_000)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not readable"):
        load_tokenizer(str(path))


# --- Dummy


@pytest.mark.parametrize("vocab_size", [1, 2, 26, 27, 1000, 20000])
def test_dummy_ids_are_distinct_printable_and_come_back(vocab_size: int) -> None:
    tokenizer = load_tokenizer("dummy", vocab_size=vocab_size)
    assert tokenizer.vocab_size == vocab_size
    texts = [tokenizer.id_to_token(i) for i in range(vocab_size)]
    assert len(set(texts)) == vocab_size
    assert all(text.isascii() and text.strip() for text in texts)
    ids = list(range(vocab_size))[::-1]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert all(0 <= i < vocab_size for i in tokenizer.encode("Unknown words, 世界!\n\n and more"))
    assert len(tokenizer.encode("Unknown words, 世界!\n\n and more")) == 5


def test_dummy_chat_and_refusals() -> None:
    tokenizer = load_tokenizer("dummy", vocab_size=500)
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "a b"}])) == 4
    with pytest.raises(ModelError, match="vocabulary"):
        load_tokenizer("dummy")
    with pytest.raises(ModelError, match="at least one id"):
        load_tokenizer("dummy", vocab_size=0)


# --- All


@pytest.mark.fuzz
@given(text=st.text(max_size=40))
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.id_to_bytes(i) for i in ids) == text.encode()
    assert all(type(i) is int for i in ids)


def test_encode_batch_equals_encode() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_text_that_is_no_unicode_is_a_400() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    with pytest.raises(RequestError, match="surrogate") as error:
        tokenizer.encode("a\ud800b")
    assert error.value.status == 400
    with pytest.raises(RequestError, match="surrogate"):
        from_fields(**{"chat_template": "{{ messages[0].content }}"}).apply_chat_template(
            [{"role": "user", "content": "\udfff"}]
        )
    with pytest.raises(RequestError, match="must be a string"):
        tokenizer.encode_batch(["a", 5])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="must be a string"):
        tokenizer.encode_batch(["a", ("a", "pair")])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_decode_refuses_ids_outside_the_vocabulary(bad: int) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    with pytest.raises(RequestError, match=str(bad)) as error:
        tokenizer.decode([1, bad])
    assert error.value.status == 400
    with pytest.raises(RequestError, match=str(bad)):
        tokenizer.id_to_bytes(bad)


def test_decode_takes_arrays() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    ids = tokenizer.encode("hello 世界")
    assert tokenizer.decode(np.array(ids, np.int32)) == "hello 世界"
    assert tokenizer.decode([]) == ""


def test_bytes_of_ids_without_a_table() -> None:
    tokenizer = tiny_tokenizers.wordpiece()
    i = tokenizer.encode("dog")[0]
    assert tokenizer.id_to_bytes(i) == tokenizer.id_to_token(i).encode()


def test_splits_are_those_of_the_published_patterns() -> None:
    """Qwen2 differs from Llama 3 in its digits alone."""
    llama, qwen = from_fields("llama-bpe")._backend, from_fields("qwen2")._backend
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    for text in TEXTS:
        pieces = [piece for piece, _ in llama.pre_tokenizer.pre_tokenize_str(text)]
        split = (
            [part for piece in pieces for part, _ in digits.pre_tokenize_str(piece)]
            if text.isascii()
            else None
        )
        if split is not None:
            assert [piece for piece, _ in qwen.pre_tokenizer.pre_tokenize_str(text)] == split
