"""Sizes that decode batches are padded to: one CUDA graph and one set of buffers each."""

from __future__ import annotations

from bisect import bisect_left

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
