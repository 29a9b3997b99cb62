"""Sizes that decode batches are padded to: one CUDA graph and one set of buffers each."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# (up to this many rows, in steps of). Beyond 64 a batch of any size is padded by 5% on average; below, a row
# more or less changes nothing in a step's time.
_STEPS = ((64, 8), (192, 16), (512, 32), (1024, 64), (2048, 128), (4096, 256))
_LAST_STEP = 512


def decode_buckets(max_rows: int) -> list[int]:
    """Bucket sizes, ascending, up to the first that holds `max_rows`; the last is max_rows rounded up to 8.

    max_rows: at least 1.
    """
    found, size = [], 0
    largest = -(-max_rows // 8) * 8
    while size < largest:
        size += next((step for limit, step in _STEPS if size < limit), _LAST_STEP)
        found.append(min(size, largest))
    return found


def power_of_two_buckets(max_rows: int) -> list[int]:
    """8, 16, 32 ... up to the first that holds `max_rows`: few buffers where padding costs no compute."""
    found = [8]
    while found[-1] < max_rows:
        found.append(2 * found[-1])
    return found


def bucket_of(num_rows: int, buckets: list[int]) -> int:
    """The smallest bucket that holds `num_rows`, which is at most the largest."""
    return buckets[bisect_left(buckets, num_rows)]


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Fixed sizes of a captured step with prompt chunks: decode lanes, chunk tokens, and chunks."""

    lanes: int
    tokens: int
    chunks: int


LONGEST_CHUNK = 128  # of a captured step: longer prompts keep the device busy while an eager step is queued
_CHUNK_TOKENS = (128, 512, 1024, 1536, 2048)
_TOKENS_PER_CHUNK = 8  # a captured step has room for chunks of this many tokens on average
_LANES_RATIO = 0.8
_FREE_TOKENS = 768  # up to here a step's time is that of reading the weights
_MOST_PADDING = 1.15


class MixedShapes:
    """Which mixed steps are captured, and which of them a step fits into.

    Args:
        buckets: of decode rows, ascending.
    """

    def __init__(self, buckets: list[int]) -> None:
        self._lanes: list[int] = []
        for bucket in reversed(buckets):
            if not self._lanes or bucket <= self._lanes[0] * _LANES_RATIO:
                self._lanes.insert(0, bucket)

    def all(self) -> list[MixedShape]:
        """Every shape, the largest first: as many chunk tokens as lanes at most, but 128 always."""
        return [
            MixedShape(lanes, tokens, tokens // _TOKENS_PER_CHUNK)
            for lanes in reversed(self._lanes)
            for tokens in reversed(_CHUNK_TOKENS)
            if tokens <= max(lanes, _CHUNK_TOKENS[0])
        ]

    def fit(self, *, num_decode: int, num_tokens: int, num_chunks: int, longest: int) -> MixedShape | None:
        """The shape for a step of so many decode rows and chunk tokens; None: run it eagerly.

        That is where none holds it, and where padding would cost more than a seventh of a large step.
        """
        if not num_decode or longest > LONGEST_CHUNK or num_decode > self._lanes[-1]:
            return None
        lanes = bucket_of(num_decode, self._lanes)
        needed = max(num_tokens, num_chunks * _TOKENS_PER_CHUNK)
        if needed > _CHUNK_TOKENS[-1]:
            return None
        tokens = bucket_of(needed, list(_CHUNK_TOKENS))
        total = lanes + tokens
        if tokens > max(lanes, _CHUNK_TOKENS[0]):
            return None
        if total > _FREE_TOKENS and total > _MOST_PADDING * (num_decode + num_tokens):
            return None
        return MixedShape(lanes, tokens, tokens // _TOKENS_PER_CHUNK)
