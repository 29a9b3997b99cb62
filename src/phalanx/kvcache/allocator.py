"""Counts KV pages: a stack of free page ids. The only place that hands pages out and takes them back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class PageAllocator:
    """A stack of free pages over a pool of `num_pages`.

    Page 0 takes the writes of padding rows and is never handed out, so `num_pages - 1` can be.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1 (the padding page), got {num_pages}")
        self.num_pages = num_pages
        # Descending, so that pages come off the end of the stack in ascending order: neighbours in the pool.
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = num_pages - 1
        self._held = np.zeros(num_pages, dtype=np.bool_)
        self._order = np.zeros(num_pages, dtype=np.int32)  # scratch of `free`

    @property
    def num_usable(self) -> int:
        """Pages that can be handed out: all but page 0."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return self._num_free

    @property
    def num_held(self) -> int:
        """Pages handed out and not yet back."""
        return self.num_usable - self._num_free

    def alloc(self, num_pages: int) -> IntArray:
        """Hand out pages.

        Returns:
            page_ids: [num_pages] int32, owned by the caller.

        Raises:
            ValueError: fewer than `num_pages` are free, or the number is negative. Nothing is handed out.
        """
        if not 0 <= num_pages <= self._num_free:
            raise ValueError(f"{num_pages} pages asked for, {self._num_free} of {self.num_usable} are free")
        rest = self._num_free - num_pages
        page_ids = self._stack[rest : self._num_free][::-1].copy()
        self._num_free = rest
        self._held[page_ids.astype(np.intp)] = True  # NumPy indexes by intp; it casts others more slowly
        return page_ids

    def free(self, page_ids: IntArray) -> None:
        """Take pages back.

        Args:
            page_ids: [n] int32, each held and named once.

        Raises:
            ValueError: a page is not held, named twice, or does not exist. Nothing is taken back.
        """
        num_pages = len(page_ids)
        if num_pages == 0:
            return
        low, high = int(page_ids.min()), int(page_ids.max())
        if low < 1 or high >= self.num_pages:
            raise ValueError(f"pages {low}..{high} freed, the pool has 1..{self.num_usable}")
        index = page_ids.astype(np.intp)
        held = self._held.take(index)
        if not held.all():
            raise ValueError(f"page {page_ids[~held][0]} freed, but it is not held")
        # Each page remembers where it was named last; one named twice forgets the first. (A sort is slower.)
        order = np.arange(num_pages, dtype=np.int32)
        self._order[index] = order
        repeated = self._order.take(index) != order
        if repeated.any():
            raise ValueError(f"page {page_ids[repeated][0]} freed twice at once")
        self._held[index] = False
        # Reversed, so that they come back in the order they were named in.
        self._stack[self._num_free : self._num_free + num_pages] = page_ids[::-1]
        self._num_free += num_pages

    def check(self) -> None:
        """Raise AssertionError unless free and held pages are disjoint and together are all but page 0."""
        free = self._stack[: self._num_free]
        num_held = int(np.count_nonzero(self._held))
        assert num_held == self.num_held, f"{num_held} pages marked held, {self.num_held} handed out"
        assert not self._held[0], "page 0 (padding) is held"
        seen = self._held.copy()
        seen[free] = True
        num_seen = int(np.count_nonzero(seen))
        assert num_seen == self.num_usable and not seen[0], (
            f"{num_held} held and {self._num_free} free pages are {num_seen} of {self.num_usable}"
        )

    def is_held(self, page_ids: IntArray) -> npt.NDArray[np.bool_]:
        """[n] bool: which of these pages (all within the pool) are handed out."""
        return self._held[page_ids]
