"""Local conversation files: a JSON array, as ShareGPT's, or JSON lines; of `sharegpt` and `custom` alike."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from phalanx.bench.errors import BenchError

if TYPE_CHECKING:
    from phalanx.bench.datasets import TokenizerLike

_NAMES = ("conversations", "conversation")


def load_conversations(path: str) -> list[tuple[str, str]]:
    """Read (first prompt, first answer) of every conversation with at least two turns.

    A conversation is an object with a list `conversations` (or `conversation`) of turns whose text is in
    `value` (or, in `custom` files, `content`).

    Args:
        path: a JSON array of conversations, or JSONL: one conversation a line.

    Raises:
        BenchError: exit code 2; the file cannot be read or does not have this form.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise BenchError(f"--dataset-path {path}: {error.strerror}", exit_code=2) from None
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    if raw.lstrip().startswith(b"["):
        items = _load(path, raw, "")
    else:
        lines = enumerate(raw.splitlines(), 1)
        items = [_load(path, line, f" line {number}") for number, line in lines if line.strip()]
    pairs = [_first_turns(path, item, number) for number, item in enumerate(items, 1)]
    if not any(name in item for item in items for name in _NAMES):
        raise BenchError(
            f"--dataset-path {path}: neither a JSON array of conversations nor one conversation a line: "
            'nothing in it has a list "conversations"',
            exit_code=2,
        )
    return [pair for pair in pairs if pair is not None]


def conversation_requests(
    args: argparse.Namespace, pairs: list[tuple[str, str]], tokenizer: TokenizerLike
) -> list[tuple[str, int, int]]:
    """Return (prompt text, its tokens, output tokens) of at most `args.num_prompts` conversations.

    As in SGLang's client: the answer's length is the output length unless --sharegpt-output-len fixes it;
    prompts or outputs under 2 tokens are skipped, and so is what exceeds --sharegpt-context-len.
    """
    rows: list[tuple[str, int, int]] = []
    for prompt, answer in pairs:
        if len(rows) == args.num_prompts:
            break
        text = _templated(prompt, tokenizer) if args.apply_chat_template else prompt
        prompt_len = len(tokenizer.encode(text, add_special_tokens=True))
        output_len = args.sharegpt_output_len or len(tokenizer.encode(answer, add_special_tokens=True))
        too_long = args.sharegpt_context_len and prompt_len + output_len > args.sharegpt_context_len
        if prompt_len >= 2 and output_len >= 2 and not too_long:
            rows.append((text, prompt_len, output_len))
    return rows


def _templated(prompt: str, tokenizer: TokenizerLike) -> str:
    """Apply the chat template, without the BOS that the server's own encoding adds again."""
    text = tokenizer.render_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)
    added = tokenizer.encode("", add_special_tokens=True)
    if added:
        text = text.removeprefix(tokenizer.decode(added[:1], skip_special_tokens=False))
    return text


def _load(path: str, raw: bytes, where: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BenchError(f"--dataset-path {path}{where}: not JSON: {error}", exit_code=2) from None


def _first_turns(path: str, item: Any, number: int) -> tuple[str, str] | None:
    try:
        turns: Any = next((item[name] for name in _NAMES if name in item), [])
        if len(turns) < 2:
            return None
        texts = [turn["content"] if "content" in turn else turn["value"] for turn in turns[:2]]
    except (AttributeError, TypeError, KeyError):
        raise BenchError(
            f"--dataset-path {path}: entry {number} is not a conversation", exit_code=2
        ) from None
    if not all(isinstance(text, str) for text in texts):
        raise BenchError(f"--dataset-path {path}: entry {number} has a turn without text", exit_code=2)
    return texts[0], texts[1]
