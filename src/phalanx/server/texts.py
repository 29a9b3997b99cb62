"""Many or long texts to ids and back: in a thread and in slices, or beside, so that streams do not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from phalanx.core.errors import RequestError
from phalanx.server.state import BIG_BYTES, ApiWorker
from phalanx.text.detokenizer import Detokenizer
from phalanx.text.tokenizer import Tokenizer

Ids = Sequence[int] | npt.NDArray[Any]
T = TypeVar("T", str, list[int])

_SLICE_SIZE = 65536  # characters or ids: a few milliseconds of work that holds the interpreter's lock
_SLICE_ITEMS = 256
_ITEM_BYTES = 16  # what an item costs however short it is


@dataclass(frozen=True, slots=True)
class PackedIds:
    """Lists of ids that pickle as two arrays: flat [num_ids] int64, ends [num_lists]."""

    flat: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


def pack(lists: Sequence[Sequence[int]]) -> PackedIds | Sequence[Sequence[int]]:
    """The lists packed, or as they are if an id does not fit int64: it is refused later, by its value."""
    ends = np.fromiter(accumulate(map(len, lists)), np.int64, len(lists))
    try:
        return PackedIds(
            np.fromiter(chain.from_iterable(lists), np.int64, int(ends[-1]) if lists else 0), ends
        )
    except OverflowError:
        return lists


def unpack(ids: PackedIds | Sequence[Ids]) -> list[Ids]:
    """Each list as an array, if it was packed."""
    if not isinstance(ids, PackedIds):
        return list(ids)
    starts = [0, *ids.ends.tolist()]
    return [ids.flat[start:end] for start, end in pairwise(starts)]


def _encode(
    texts: Sequence[str], check_length: Callable[[int], None], tokenizer: Tokenizer | None
) -> PackedIds | Sequence[Sequence[int]]:
    assert tokenizer is not None
    return pack(tokenizer.encode_batch(texts, check_length=check_length))


async def encode_texts(worker: ApiWorker, texts: Sequence[str]) -> list[Ids]:
    """The ids of each prompt.

    Raises:
        RequestError: there is no tokenizer, a text is no valid Unicode, or does not fit the context; where
            that can be told before tokenizing, it is.
    """
    tokenizer, check_length = worker.require_tokenizer(), worker.settler.check_length
    check_length(tokenizer.min_ids(max(texts, key=len, default="")), at_least=True)
    size = _size(texts)
    if size > BIG_BYTES:
        job = partial(_encode, list(texts), check_length)
        return unpack(await worker.prepare(size, job))
    ids: list[Ids] = []
    for part in _slices(texts):
        encode = partial(tokenizer.encode_batch, part, check_length=check_length)
        ids += await worker.offload(size, encode)
    return ids


async def as_array(worker: ApiWorker, ids: Ids) -> Ids:
    """Long lists as an array, which later checks take at once: [num_ids], of what type the values have.

    A list that no prompt can be stays as it is, for `Settler.check_prompt` to refuse.
    """
    if not isinstance(ids, list) or not _SLICE_SIZE < len(ids) < worker.settler.context_length:
        return ids

    def convert() -> npt.NDArray[Any]:
        return np.concatenate([np.asarray(ids[i : i + _SLICE_SIZE]) for i in range(0, len(ids), _SLICE_SIZE)])

    try:
        return await worker.offload(len(ids), convert)
    except ValueError:  # lists of ids among them: refused later, with a message
        return ids


async def decode_ids(
    worker: ApiWorker, lists: Sequence[list[int]], *, skip_special_tokens: bool
) -> list[str]:
    """The text of each list of ids.

    Raises:
        RequestError: there is no tokenizer, or an id is outside the vocabulary.
    """
    worker.require_tokenizer()
    assert worker.detokenizer is not None
    detokenizer, vocab_size = worker.detokenizer, worker.settler.vocab_size

    def decode(part: Sequence[list[int]]) -> list[str]:
        for ids in part:
            check_ids(ids, vocab_size)
        return [_decode(detokenizer, ids, skip_special_tokens) for ids in part]

    size = _size(lists)
    texts: list[str] = []
    for part in _slices(lists):
        texts += await worker.offload(size, partial(decode, part))
    return texts


def check_ids(ids: list[int], vocab_size: int) -> None:
    """Raise a RequestError if one is outside the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise RequestError(f"tokens: id {bad} is outside the vocabulary of {vocab_size} ids", param="tokens")


def _decode(detokenizer: Detokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    if len(ids) <= _SLICE_SIZE or not detokenizer.uses_table:
        return detokenizer.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    # The library would hold the interpreter's lock from the first id to the last.
    state = detokenizer.new_state(skip_special_tokens)
    parts = [state.push(ids[i : i + _SLICE_SIZE]) for i in range(0, len(ids), _SLICE_SIZE)]
    return "".join([*parts, state.finish()])


def _size(items: Sequence[T]) -> int:
    return sum(map(len, items)) + _ITEM_BYTES * (len(items) - 1)


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Consecutive items: as many as fit a slice, or one that does not."""
    start = size = 0
    for i, item in enumerate(items):
        if i > start and (size + len(item) > _SLICE_SIZE or i - start == _SLICE_ITEMS):
            yield items[start:i]
            start, size = i, 0
        size += len(item)
    if items:
        yield items[start:]
