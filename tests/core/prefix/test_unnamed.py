"""Tokens that were committed without their ids are kept, and no prompt ever finds their KV."""

from __future__ import annotations

import pytest

from pagedkv.core import MemoryManager


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
