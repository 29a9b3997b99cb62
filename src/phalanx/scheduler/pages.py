"""Which pages each row holds, and how many it may still ask for."""

from __future__ import annotations

import mmap

import numpy as np

from phalanx.core.step import Bool, Int32, Int64, PageGrants
from phalanx.kvcache.allocator import PageAllocator
from phalanx.scheduler.ragged import expand

_NONE: Int32 = np.zeros(0, dtype=np.int32)
NO_GRANTS = PageGrants(rows=_NONE, page_index=_NONE, page_ids=_NONE)


def lazy_zeros(size: int) -> Int32:
    """[size] int32 zeros whose memory is committed 4 KiB at a time, as it is first written.

    `np.zeros` asks for huge pages: then touching the start of each row would commit the whole table, which is
    gigabytes for long contexts, and each first touch would clear 2 MiB.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, max(size, 1) * 4, **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.int32)[:size]


def concat_grants(first: PageGrants, second: PageGrants) -> PageGrants:
    """Both, in this order."""
    if not len(first.rows) or not len(second.rows):
        return first if len(first.rows) else second
    return PageGrants(
        rows=np.concatenate((first.rows, second.rows)),
        page_index=np.concatenate((first.page_index, second.page_index)),
        page_ids=np.concatenate((first.page_ids, second.page_ids)),
    )


class RowPages:
    """The host's page lists, [num_rows, max_pages_per_row] int32, and the reservations behind them.

    A row reserves all the pages it can ever need when it enters, and takes them later, block by block. The
    sum of reservations never exceeds the pool, so a grant cannot fail.

    Attributes:
        held: [num_rows] int32, pages in the row's list.
        reserved: [num_rows] int32, pages it may hold at most.
        room: [num_rows] int32, tokens that its held pages can take beyond those launched.
        num_unreserved: pages that new rows may reserve.
    """

    def __init__(
        self, *, num_rows: int, max_pages_per_row: int, num_pages: int, page_size: int, grant_tokens: int
    ) -> None:
        self.allocator = PageAllocator(num_pages)
        self.page_size = page_size
        self.pages_per_grant = max(1, grant_tokens // page_size)
        self.max_pages_per_row = max_pages_per_row
        self.held: Int32 = np.zeros(num_rows, dtype=np.int32)
        self.reserved: Int32 = np.zeros(num_rows, dtype=np.int32)
        self.room: Int32 = np.zeros(num_rows, dtype=np.int32)
        self.num_unreserved = self.allocator.num_usable
        self._lists = lazy_zeros(num_rows * max_pages_per_row)  # flat: one index array, not two

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def enter(self, rows: Int64, prompt_lens: Int32, reserved: Int32) -> None:
        """Reserve `reserved` pages for each of these empty rows, take those of their prompts ([k] each)."""
        num_pages = -(-prompt_lens // self.page_size)
        self._take(rows, num_pages)
        self.reserved[rows] = reserved
        self.num_unreserved -= int(reserved.sum())
        self.room[rows] = num_pages * self.page_size - prompt_lens

    def advance(self, is_decode: Bool) -> PageGrants:
        """Launch one token on each of these rows ([num_rows] bool); grant to those whose room is used up."""
        short = np.flatnonzero(is_decode & (self.room == 0))
        grants = self.grant(short) if len(short) else NO_GRANTS
        self.room -= is_decode
        return grants

    def grant(self, rows: Int64) -> PageGrants:
        """Give each of these rows ([k], without room) its next block, cut to its reservation."""
        num_pages = np.minimum(self.reserved[rows] - self.held[rows], self.pages_per_grant)
        grants = self._take(rows, num_pages)
        self.room[rows] += num_pages * self.page_size
        return grants

    def last_pages(self, rows: Int64, prompt_lens: Int32) -> PageGrants:
        """Grants that name the pages where these prompts end ([k]); each is partly filled."""
        page_index = prompt_lens // self.page_size
        page_ids = self._lists[rows * self.max_pages_per_row + page_index]
        return PageGrants(rows=rows.astype(np.int32), page_index=page_index, page_ids=page_ids)

    def slots(self, rows: Int64, starts: Int32, lens: Int32) -> Int32:
        """KV slots of positions starts[i] .. starts[i]+lens[i]-1 of row rows[i]: [sum(lens)] int32."""
        positions = expand(starts.astype(np.int64), lens)
        page_index, offset = np.divmod(positions, self.page_size)
        page_ids = self._lists[np.repeat(rows * self.max_pages_per_row, lens) + page_index]
        return (page_ids * self.page_size + offset).astype(np.int32)

    def release(self, rows: Int64) -> None:
        """Give back every page and reservation of these rows ([k], each named once)."""
        self.allocator.free(self.pages_of(rows))
        self.num_unreserved += int(self.reserved[rows].sum())
        self.held[rows] = 0
        self.reserved[rows] = 0
        self.room[rows] = 0

    def pages_of(self, rows: Int64) -> Int32:
        """The page ids these rows hold, row after row: [sum(held[rows])] int32."""
        return self._lists[expand(rows * self.max_pages_per_row, self.held[rows])]

    def check(self, live: Int64) -> None:
        """Raise AssertionError unless pages and reservations are conserved; live: rows in use, [k]."""
        self.allocator.check()
        free, total = self.allocator.num_free, self.allocator.num_usable
        held = int(self.held[live].sum())
        assert free + held == total, f"{free} free + {held} held pages are not {total}"
        assert held == int(self.held.sum()), f"rows hold {int(self.held.sum())} pages, live ones {held}"
        reserved = int(self.reserved.sum())
        assert reserved == int(self.reserved[live].sum()), "a row that is not live has a reservation"
        assert reserved + self.num_unreserved == total, (
            f"{reserved} reserved + {self.num_unreserved} unreserved pages are not {total}"
        )
        assert self.num_unreserved >= 0, f"{-self.num_unreserved} pages reserved beyond the pool"
        assert (self.held <= self.reserved).all(), "a row holds more pages than it reserved"
        assert (self.room >= 0).all(), "a row was launched beyond its pages"
        pages = self.pages_of(live)
        num_owned = len(np.unique(pages))
        assert num_owned == held, f"{held} pages in the rows' lists, {num_owned} of them different"
        assert self.allocator.is_held(pages).all(), "a row lists a page that the allocator has free"

    def _take(self, rows: Int64, num_pages: Int32) -> PageGrants:
        """Append so many pages to the lists of these rows ([k] each)."""
        page_ids = self.allocator.alloc(int(num_pages.sum()))
        held = self.held[rows]
        if len(page_ids) == len(rows) and self.pages_per_grant == 1 and (num_pages == 1).all():
            of_page, page_index = rows, held.astype(np.int64)
        else:
            of_page, page_index = np.repeat(rows, num_pages), expand(held.astype(np.int64), num_pages)
        self._lists[of_page * self.max_pages_per_row + page_index] = page_ids
        self.held[rows] = held + num_pages
        return PageGrants(
            rows=of_page.astype(np.int32), page_index=page_index.astype(np.int32), page_ids=page_ids
        )
