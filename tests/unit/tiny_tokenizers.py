"""Small tokenizers, trained or built on the spot, one per family of decoders; and where SmolLM2 lies."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from phalanx.text.detokenizer import Detokenizer
from phalanx.text.parts import TokenizerParts
from phalanx.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "In 1984 prices rose 12.5% from 3 to 4; nobody (not even he) knew why.",
    "Ünïcödé: été, naïve, façade, smörgåsbord. 世界 你好 世界.",
    "def f(x):\n    return x ** 2\n\n\nprint(f(3))\n",
] * 4
MULTI_BYTE = "A 世界 👩‍👩‍👧 é"


@lru_cache
def byte_level() -> Tokenizer:
    """Byte-level BPE of 400 tokens, two special and two plain added tokens (one of them not ASCII)."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<tool>"), AddedToken("世界人")])
    bos, eos = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(
        TokenizerParts(backend=backend, bos_token_id=bos, eos_token_ids=(eos,), special_tokens=special)
    )


@lru_cache
def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """One detokenizer per tokenizer, as in a worker."""
    return Detokenizer(tokenizer)


@lru_cache
def byte_fallback() -> Tokenizer:
    """BPE with byte fallback, in the manner of Llama 2; special <s>, </s>, <unk>."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials + byte_tokens, show_progress=False)
    backend.train_from_iterator(CORPUS[:1] * 4, trainer)
    # The trainer marks the byte tokens special too; in real files they are plain entries of the vocabulary.
    tree = json.loads(backend.to_str())
    tree["added_tokens"] = [t for t in tree["added_tokens"] if t["content"] in specials]
    return Tokenizer(TokenizerParts(backend=tokenizers.Tokenizer.from_str(json.dumps(tree))))


@lru_cache
def metaspace() -> Tokenizer:
    """Unigram with Metaspace, in the manner of T5: its decoder fits no table."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(TokenizerParts(backend=backend))


@lru_cache
def wordpiece() -> Tokenizer:
    """WordPiece, whose decoder joins with spaces and cleans up."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(TokenizerParts(backend=backend))


def smollm2_file() -> Path:
    """The pulled GGUF; skips the test where it was not pulled."""
    cache = os.environ.get("PHALANX_CACHE")
    if cache is None:
        base = os.environ.get("XDG_CACHE_HOME")
        cache = str((Path(base) if base else Path.home() / ".cache") / "phalanx")
    found = sorted(Path(cache).glob("**/SmolLM2-135M-Instruct*.gguf"))
    if not found:
        pytest.skip("SmolLM2 is not there: run `phalanx pull smollm2`")
    return found[0]


@lru_cache
def smollm2() -> Tokenizer:
    """SmolLM2's own tokenizer, from its GGUF file."""
    return load_tokenizer(str(smollm2_file()))
