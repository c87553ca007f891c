"""Identity is exact (I4): a page with an equal hash, or with the right frame number, may be another page."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from tests.core.oracle import grown


def test_pages_that_hash_alike_are_told_apart_by_their_tokens(mm: MemoryManager) -> None:
    """The test changes the tokens of a frame: the prefix hash leads to the frame, but the tokens differ."""
    first = grown(mm, [1, 2, 3, 4, 5])
    mm.state.tokens[first.pages[0]] = [1, 2, 3, 9]
    assert len(mm.open([1, 2, 3, 4, 5])) == 0


def test_the_same_tokens_after_another_prefix_are_another_page(mm: MemoryManager) -> None:
    grown(mm, [1, 1, 1, 1, 7, 7, 7, 7, 0])
    assert len(mm.open([2, 2, 2, 2, 7, 7, 7, 7, 0])) == 0
    assert len(mm.open([7, 7, 7, 7, 0])) == 0


@pytest.mark.parametrize("other", [b"acme2", b"acm", b"", b"ACME"])
def test_a_tenant_finds_nothing_of_a_name_alike(mm: MemoryManager, other: bytes) -> None:
    grown(mm, [1, 2, 3, 4, 5], tenant=b"acme")
    assert len(mm.open([1, 2, 3, 4, 5], tenant=other)) == 0


def test_tokens_at_the_ends_of_int32_are_tokens_like_others(mm: MemoryManager) -> None:
    ends = [np.iinfo(np.int32).min, np.iinfo(np.int32).max, -1, 0]
    grown(mm, [*ends, 1])
    assert len(mm.open([*ends, 1])) == 4
    assert len(mm.open([ends[1], ends[0], -1, 0, 1])) == 0


def test_a_page_is_not_found_after_the_successor_of_its_parent_even_if_that_holds_the_same() -> None:
    """The parent was evicted and computed again in the same frame: it has another generation, and no successor yet."""
    mm = MemoryManager(num_frames=3, block_size=1, groups=(Group(window=2),))
    kept = grown(mm, [1, 2, 3])
    parent = int(mm.state.frames["parent"][kept.pages[2]])
    assert mm.evict(3) == 2
    assert grown(mm, [1, 2]).pages[1] == parent
    assert mm.lookup([1, 2, 3, 4]) == 2
    mm.check()


def test_an_evicted_parent_cannot_be_taken_for_its_successor() -> None:
    """The frame is reused for other tokens; successors of the old page must not be found after the new one."""
    mm = MemoryManager(num_frames=3, block_size=1, groups=(Group(window=2),))
    kept = grown(mm, [1, 2, 3])
    parent = int(mm.state.frames["parent"][kept.pages[2]])
    assert mm.evict(3) == 2
    impostors = {int(grown(mm, [token]).pages[0]): token for token in (7, 8)}
    assert mm.lookup([impostors[parent], 3, 4]) == 1
    mm.check()


def test_a_page_without_its_prefix_is_not_left_cached() -> None:
    mm = MemoryManager(num_frames=4, block_size=1, groups=(Group(window=2),))
    kept = grown(mm, [1, 2, 3, 4])
    assert mm.evict(4) == 3
    kept.release()
    mm.check()
    assert mm.stats().cached == 0
