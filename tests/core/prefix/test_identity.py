"""Identity is exact (I4): a page with an equal hash, or with the right frame number, may be another page.

Tokens that were committed without their ids are kept, and no prompt ever finds their KV.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from tests.core.oracle import grown


def test_pages_that_hash_alike_are_told_apart_by_their_tokens() -> None:
    """The test changes the tokens of a frame: the prefix hash leads to the frame, but the tokens differ."""
    mm = MemoryManager(16, 4)  # check() sees such a change
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


def test_tokens_without_ids_are_kept_and_never_found() -> None:
    mm = MemoryManager(num_frames=16, block_size=2)
    space = mm.open()
    mm.commit(mm.plan([space], [5]), None)
    assert len(space) == 5
    assert space.token_ids.tolist() == [-1] * 5
    mm.commit(mm.plan([space], [4]), [1, 2, 3, 4])  # what follows them is not found either
    space.release()
    assert mm.stats().cached == 0
    for prompt in ([-1] * 6, [1, 2, 3, 4], [-1] * 5 + [1, 2, 3, 4, 5]):
        assert len(mm.open(prompt)) == 0


def test_two_forks_with_different_tokens_without_ids_never_share_a_page() -> None:
    """Zeros in place of unknown ids let the pages of two beams pass for one."""
    mm = MemoryManager(num_frames=16, block_size=2)
    parent = mm.open()
    mm.commit(mm.plan([parent], [2]), [1, 2])
    child = parent.fork()
    mm.commit(mm.plan([parent, child], [4, 4]), None)
    assert not set(parent.pages[1:].tolist()) & set(child.pages[1:].tolist())
    assert mm.stats().deduplicated == 0


@pytest.mark.parametrize(("length", "found"), [(4, 8), (5, 4), (3, 8), (0, 8)])
def test_a_space_that_drops_its_tokens_without_ids_publishes_again(length: int, found: int) -> None:
    mm = MemoryManager(num_frames=16, block_size=2)
    prompt = [*range(1, 9)]
    space = mm.open()
    mm.commit(mm.plan([space], [4]), prompt[:4])
    mm.commit(mm.plan([space], [3]), None)
    space.truncate(length)
    mm.commit(mm.plan([space], [8 - length]), prompt[length:])
    space.release()
    assert len(mm.open([*prompt, 9])) == found


def test_pages_that_waited_for_an_outstanding_plan_are_published_after_tokens_without_ids() -> None:
    mm = MemoryManager(num_frames=32, block_size=2)
    other, space = mm.open(), mm.open()
    first, second = mm.plan([space], [6]), mm.plan([space], [2])
    mm.commit(mm.plan([other], [2]), [1, 2])
    mm.commit(first, [1, 2, 3, 4, 5, 6])  # its first page is published already, and `second` may read ours
    pin = mm.pin(space)
    mm.commit(second, None)
    mm.unpin(pin)
    for each in (space, other):
        each.release()
    assert len(mm.open([1, 2, 3, 4, 5, 6, 7])) == 6
