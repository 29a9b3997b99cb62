"""Compiled CPU code on torch's own OpenMP threads.

A kernel is a C function `void run(int64_t *block)`. It claims chunks from a counter in the block until none
is left, so that every thread of a team may run the same function and a slow one holds up nobody. The team is
the one that torch computes with: its OpenMP runtime is found through torch's library, so no second pool of
threads competes for the cores, and idle threads sleep or spin as the user has settled for torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
ALONE = 65536  # elements; some 10 us of work
HEADER = 2  # block[0]: the next chunk, block[1]: number of chunks


@functools.cache
def _team() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP that torch is linked with (GNU's, LLVM's, Intel's have it), or None."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            function = ctypes.CDLL(str(folder / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        return function
    return None


class Kernel:
    """A compiled function and how to run it.

    Args:
        address: of `void run(int64_t *block)`, which claims chunks by adding 1 to block[0].
        size: int64 entries of its block after the header.
    """

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._alone = _RUN(address)
        self._block_type = ctypes.c_int64 * (HEADER + size)

    def __call__(self, num_chunks: int, *arguments: int) -> None:
        """Run all chunks, on as many threads as torch computes with here, and wait. Releases the GIL.

        arguments: the entries of the block after the header: sizes, strides, addresses of memory that the
            caller holds.
        """
        block = self._block_type(0, num_chunks, *arguments)
        num_threads = min(torch.get_num_threads(), num_chunks)
        team = _team() if num_threads > 1 else None
        if team is None:
            self._alone(ctypes.addressof(block))
        else:
            team(self._address, ctypes.addressof(block), num_threads, 0)


def chunks_of(num_items: int, item_size: int) -> tuple[int, int]:
    """Cut items of equal work. Returns (items per chunk, number of chunks).

    Two chunks a thread, since a thread that wakes late, or loses its core, should take fewer; but none of
    less than ALONE elements, which one thread does in the time that another needs to wake.

    item_size: elements of an item that are read.
    """
    threads = torch.get_num_threads()
    most = max(1, min(2 * threads if threads > 1 else 1, num_items * item_size // ALONE))
    per_chunk = -(-num_items // most)
    return per_chunk, -(-num_items // per_chunk)
