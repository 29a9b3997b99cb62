"""kvcache/allocator.py: who has which page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.kvcache.allocator import PageAllocator


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_hands_out_every_page_but_0_in_order():
    allocator = PageAllocator(6)
    assert (allocator.num_usable, allocator.num_free, allocator.num_held) == (5, 5, 0)
    first = allocator.alloc(2)
    assert first.tolist() == [1, 2] and first.dtype == np.int32
    assert allocator.alloc(3).tolist() == [3, 4, 5]
    assert (allocator.num_free, allocator.num_held) == (0, 5)
    allocator.check()


def test_alloc_nothing():
    allocator = PageAllocator(1)
    assert allocator.alloc(0).tolist() == []
    allocator.free(pages())
    allocator.check()


def test_alloc_beyond_the_pool_names_the_numbers_and_takes_nothing():
    allocator = PageAllocator(4)
    allocator.alloc(1)
    with pytest.raises(ValueError, match="3 pages asked for, 2 of 3 are free"):
        allocator.alloc(3)
    with pytest.raises(ValueError):
        allocator.alloc(-1)
    assert allocator.num_free == 2
    allocator.check()


def test_freed_pages_come_back_in_the_order_they_were_named():
    allocator = PageAllocator(10)
    taken = allocator.alloc(6)
    allocator.free(taken[[4, 1, 3]])
    assert allocator.alloc(3).tolist() == [5, 2, 4]


def test_the_caller_owns_what_it_got():
    allocator = PageAllocator(5)
    taken = allocator.alloc(2)
    allocator.free(taken)
    taken[:] = 0
    assert sorted(allocator.alloc(4).tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0,), "0..0 freed"),
        ((1, 5), "1..5 freed, the pool has 1..4"),
        ((-1,), "-1..-1 freed"),
        ((1, 3), "page 3 freed, but it is not held"),
        ((2, 1, 2), "page 2 freed twice"),
    ],
)
def test_a_wrong_free_is_refused_and_changes_nothing(ids, message):
    allocator = PageAllocator(5)
    allocator.alloc(2)
    with pytest.raises(ValueError, match=message):
        allocator.free(pages(*ids))
    assert allocator.num_held == 2
    allocator.check()


def test_double_free_is_refused():
    allocator = PageAllocator(5)
    taken = allocator.alloc(2)
    allocator.free(taken)
    with pytest.raises(ValueError, match="not held"):
        allocator.free(taken)


def test_check_sees_a_lost_page():
    allocator = PageAllocator(5)
    allocator.alloc(2)
    allocator._stack[0] = allocator._stack[1]
    with pytest.raises(AssertionError, match="3 of 4"):
        allocator.check()


def test_a_pool_needs_the_padding_page():
    with pytest.raises(ValueError):
        PageAllocator(0)


@pytest.mark.fuzz
@given(
    num_pages=st.integers(1, 40),
    moves=st.lists(
        st.tuples(st.booleans(), st.integers(0, 12), st.randoms(use_true_random=False)), max_size=40
    ),
)
def test_any_sequence_agrees_with_a_set(num_pages, moves):
    allocator = PageAllocator(num_pages)
    held: list[int] = []
    for is_alloc, count, random in moves:
        if is_alloc and count > num_pages - 1 - len(held):
            with pytest.raises(ValueError):
                allocator.alloc(count)
        elif is_alloc:
            got = allocator.alloc(count).tolist()
            assert len(set(got)) == count and not set(got) & set(held) and all(0 < p < num_pages for p in got)
            held += got
        else:
            random.shuffle(held)
            allocator.free(pages(*held[:count]))
            del held[:count]
        assert allocator.num_held == len(held)
        assert allocator.is_held(np.arange(num_pages, dtype=np.int32)).nonzero()[0].tolist() == sorted(held)
        allocator.check()
