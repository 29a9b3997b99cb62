"""Sizes that decode batches are padded to: one CUDA graph and one set of buffers each."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from phalanx.config.groups import ModelConfig

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


_CHUNK_TOKENS = (128, 512, 1024, 1536, 2048, 3072, 4096)
_TOKENS_PER_CHUNK = 8  # a captured step has room for chunks of this many tokens on average
_LANES_RATIO = 0.8
_WIDE_TOKENS = 2048  # beside at least as many rows, whatever the model
_MOST_PADDING = 1.15
_LEAST_FREE_TOKENS = 768  # up to here a step's time is that of reading the weights
# What an eager layer takes the host on an H200's: 18 ms for qwen3-0.6b's 28, 22 for llama-3-8b's 32.
_EAGER_LAYER_S = 0.6e-3
_FLOPS = {"float32": 50e12}  # of large products on an H200
_FLOPS_16_BIT = 700e12


def free_tokens(config: ModelConfig, dtype: str) -> int:
    """Tokens of a step from which on the device takes longer for it than the host for queueing it eagerly.

    Up to here padding costs less than it saves, however much it is. By products alone, at an H200's rate:
    what attention reads comes on top, so that steps of long contexts are longer than this says.
    """
    weights = config.num_weights
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size  # of the embedding, which is no product
    seconds = _EAGER_LAYER_S * config.num_layers
    tokens = seconds * _FLOPS.get(dtype, _FLOPS_16_BIT) / (2 * weights)
    return max(_LEAST_FREE_TOKENS, int(tokens))


class MixedShapes:
    """Which mixed steps are captured, and which of them a step fits into.

    Args:
        buckets: of decode rows, ascending.
        free_tokens: up to so many tokens, padding included, a captured step is quicker than an eager one.
        most_tokens: prompt tokens that a step can have.
    """

    def __init__(self, buckets: list[int], *, free_tokens: int, most_tokens: int) -> None:
        self._free_tokens = free_tokens
        sizes = _CHUNK_TOKENS[: bisect_left(_CHUNK_TOKENS, most_tokens) + 1]
        sums = {
            (lanes, tokens)
            for tokens in sizes
            for lanes in _spread(buckets)
            if tokens <= max(min(lanes, _WIDE_TOKENS), sizes[0])
        }
        # Where prompts are most of a step it matters little how many lanes are padded.
        for tokens in sizes[1:] if buckets else ():
            for rows in (tokens, tokens // 2, tokens // 4, tokens // 8):
                lanes = bucket_of(min(rows, buckets[-1]), buckets)
                if lanes + tokens <= free_tokens:
                    sums.add((lanes, tokens))
        shapes = [MixedShape(lanes, tokens, tokens // _TOKENS_PER_CHUNK) for lanes, tokens in sums]
        self._shapes = sorted(shapes, key=lambda shape: (shape.lanes + shape.tokens, shape.lanes))

    def all(self) -> list[MixedShape]:
        """Every shape, the largest first."""
        return self._shapes[::-1]

    def fit(self, *, num_decode: int, num_tokens: int, num_chunks: int) -> MixedShape | None:
        """The smallest shape for a step of so many decode rows and chunk tokens; None: run it eagerly.

        That is where none holds it, and where the padding of a large step would cost more than a seventh.
        """
        needed = max(num_tokens, num_chunks * _TOKENS_PER_CHUNK)
        for shape in self._shapes:
            if shape.lanes >= num_decode and shape.tokens >= needed:
                total = shape.lanes + shape.tokens
                limit = max(self._free_tokens, _MOST_PADDING * (num_decode + num_tokens))
                return shape if total <= limit else None
        return None


def _spread(buckets: list[int]) -> list[int]:
    """The largest, and of the others those at most `_LANES_RATIO` of the next larger one taken."""
    found: list[int] = []
    for bucket in reversed(buckets):
        if not found or bucket <= found[-1] * _LANES_RATIO:
            found.append(bucket)
    return found
