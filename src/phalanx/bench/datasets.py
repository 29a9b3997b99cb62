"""Prompts and lengths. Everything is drawn from the seed or read from a local file; nothing is downloaded.

Lengths and their order of drawing are SGLang's, so that the same seed gives the same lengths as its client.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from phalanx.bench.conversations import conversation_requests, load_conversations
from phalanx.bench.errors import BenchError


class TokenizerLike(Protocol):
    """What the benchmark needs of a tokenizer.

    Attributes:
        vocab_size: ids are in [0, vocab_size).
        special_ids: ids that random prompts must not contain.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def special_ids(self) -> Any:
        """Ids of special tokens (any iterable of int)."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return token ids; with special tokens, what a server makes of the text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`."""

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Return the prompt text of a conversation, by the model's chat template."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a dataset.

    Attributes:
        prompt: text, or token ids.
        prompt_len: tokens a server sees: the re-encoded length of a text, special tokens included.
        asked_len: tokens that were asked for; re-encoding text made of random tokens changes the number.
        output_len: tokens to generate.
    """

    prompt: str | list[int]
    prompt_len: int
    asked_len: int
    output_len: int


def load_requests(args: argparse.Namespace, tokenizer: TokenizerLike) -> list[BenchRequest]:
    """Return the requests that the command line asks for; fewer only where a local file has fewer.

    Uses `np.random.RandomState(seed)` and `random.Random(seed)` in SGLang's order.

    Raises:
        BenchError: a file that cannot be read, or that yields no request.
    """
    return request_source(args, tokenizer)[0]


def request_source(
    args: argparse.Namespace, tokenizer: TokenizerLike
) -> tuple[list[BenchRequest], np.random.RandomState]:
    """As `load_requests`; also return the generator, which goes on to draw the arrival times."""
    rng, shuffler = np.random.RandomState(args.seed), random.Random(args.seed)
    if args.dataset_name in ("sharegpt", "custom"):
        pairs = load_conversations(args.dataset_path)
        shuffler.shuffle(pairs)
        rows = conversation_requests(args, pairs, tokenizer)
        requests = [BenchRequest(text, length, length, output) for text, length, output in rows]
    elif args.dataset_name == "generated-shared-prefix":
        requests = _shared_prefix_requests(args, tokenizer, rng)
        if not args.gsp_ordered:
            shuffler.shuffle(requests)
    else:
        requests = _random_requests(args, tokenizer, rng, shuffler)
    if not requests:
        raise BenchError(f"{args.dataset_path} yields no usable request", exit_code=2)
    return requests, rng


def draw_lengths(rng: np.random.RandomState, longest: int, ratio: float, num: int) -> np.ndarray:
    """Draw [num] int64 lengths, uniform in [max(1, int(longest * ratio)), longest]."""
    return rng.randint(max(int(longest * ratio), 1), longest + 1, size=num)


def draw_lengths_vllm(rng: np.random.RandomState, middle: int, ratio: float, num: int) -> np.ndarray:
    """Draw [num] int64 lengths >= 1, uniform in [floor(middle * (1 - ratio)), ceil(middle * (1 + ratio))].

    Source: vLLM's `--random-range-ratio`. The bounds are its own, the generator is not.
    """
    low, high = math.floor(middle * (1 - ratio)), math.ceil(middle * (1 + ratio))
    return rng.randint(max(low, 1), high + 1, size=num)


def _random_requests(
    args: argparse.Namespace, tokenizer: TokenizerLike, rng: np.random.RandomState, shuffler: random.Random
) -> list[BenchRequest]:
    num, ratio = args.num_prompts, args.random_range_ratio
    draw = draw_lengths_vllm if args.vllm_random_range else draw_lengths
    asked = draw(rng, args.random_input_len, ratio, num)
    outputs = draw(rng, args.random_output_len, ratio, num)
    as_ids = bool(args.tokenize_prompt)
    lengths = asked if as_ids else np.maximum(asked - _num_special(tokenizer), 1)
    if args.dataset_name == "random-ids":
        prompts = _counting_ids(tokenizer, rng, lengths)
    elif args.dataset_path:
        pairs = load_conversations(args.dataset_path)
        shuffler.shuffle(pairs)
        prompts = _ids_of_texts([text for text, _ in pairs], tokenizer, lengths)
    else:
        prompts = _uniform_ids(tokenizer, rng, lengths)
    triples = zip(prompts, asked.tolist(), outputs.tolist(), strict=False)
    return [_request(ids, length, output, tokenizer, as_ids) for ids, length, output in triples]


def _request(
    ids: list[int], asked_len: int, output_len: int, tokenizer: TokenizerLike, as_ids: bool
) -> BenchRequest:
    if as_ids:
        return BenchRequest(ids, len(ids), asked_len, output_len)
    text = tokenizer.decode(ids)
    return BenchRequest(text, len(tokenizer.encode(text, add_special_tokens=True)), asked_len, output_len)


def _counting_ids(
    tokenizer: TokenizerLike, rng: np.random.RandomState, lengths: np.ndarray
) -> list[list[int]]:
    """SGLang's random-ids: consecutive ids from a random offset, wrapping at the vocabulary's end."""
    size = tokenizer.vocab_size
    offsets = rng.randint(0, size, size=len(lengths))
    return [
        ((offset + row + np.arange(length)) % size).tolist()
        for row, (offset, length) in enumerate(zip(offsets, lengths, strict=True))
    ]


def _uniform_ids(
    tokenizer: TokenizerLike, rng: np.random.RandomState, lengths: np.ndarray
) -> list[list[int]]:
    """Ids drawn uniformly from the vocabulary, specials left out: where SGLang would download ShareGPT."""
    plain = _plain_ids(tokenizer)
    drawn = plain[rng.randint(0, len(plain), size=int(lengths.sum()))]
    return [part.tolist() for part in np.split(drawn, np.cumsum(lengths)[:-1])]


def _ids_of_texts(texts: list[str], tokenizer: TokenizerLike, lengths: np.ndarray) -> list[list[int]]:
    """Cut each text's ids to the asked length, or repeat them up to it; at most one prompt per text."""
    prompts: list[list[int]] = []
    for text in texts:
        if len(prompts) == len(lengths):
            break
        ids = tokenizer.encode(text, add_special_tokens=True)
        if ids:
            length = int(lengths[len(prompts)])
            prompts.append((ids * -(-length // len(ids)))[:length])
    return prompts


def _shared_prefix_requests(
    args: argparse.Namespace, tokenizer: TokenizerLike, rng: np.random.RandomState
) -> list[BenchRequest]:
    groups, per_group, ratio = args.gsp_num_groups, args.gsp_prompts_per_group, args.gsp_range_ratio
    prefix_lens = draw_lengths(rng, args.gsp_system_prompt_len, ratio, groups)
    question_lens = draw_lengths(rng, args.gsp_question_len, ratio, groups * per_group)
    output_lens = draw_lengths(rng, args.gsp_output_len, ratio, groups * per_group)
    prefixes = _uniform_ids(tokenizer, rng, prefix_lens)
    questions = _uniform_ids(tokenizer, rng, question_lens)
    requests = []
    for row, (question, output) in enumerate(zip(questions, output_lens.tolist(), strict=True)):
        prefix = prefixes[row // per_group]
        asked = len(prefix) + len(question)
        if args.tokenize_prompt:
            requests.append(BenchRequest(prefix + question, asked, asked, output))
            continue
        text = f"{tokenizer.decode(prefix)}\n\n{tokenizer.decode(question)}"
        length = len(tokenizer.encode(text, add_special_tokens=True))
        requests.append(BenchRequest(text, length, asked, output))
    return requests


def _plain_ids(tokenizer: TokenizerLike) -> np.ndarray:
    special = np.fromiter((int(i) for i in tokenizer.special_ids), np.int64)
    return np.setdiff1d(np.arange(tokenizer.vocab_size), special)


def _num_special(tokenizer: TokenizerLike) -> int:
    """Number of tokens a server adds to every text (a BOS, usually)."""
    return len(tokenizer.encode("", add_special_tokens=True))
