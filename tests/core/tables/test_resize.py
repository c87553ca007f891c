"""Resize: a pool that grows and shrinks keeps its pages, and never moves a frame that work in flight reads.

Forget: no page computed before it is found afterwards, and open spaces run on. The state machine tests both in any
order with other calls.
"""

from __future__ import annotations

import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict
from tests.core.oracle import grown, refused


def test_a_smaller_pool_refuses_to_move_a_frame_in_use() -> None:
    mm = MemoryManager(40, 4)
    first, second = grown(mm, list(range(40))), grown(mm, list(range(100, 140)))
    assert max(second.pages) >= 20
    plan = mm.plan([first], [1])
    with refused(mm, PlanConflict, "1 plans name frames"):
        mm.resize(20)
    mm.commit(plan, [7])
    mm.retire(1)
    with pytest.raises(PlanConflict, match=r"work launched in epoch 1 may still read frames.*call advance\(1\) first"):
        mm.resize(22)
    mm.advance(1)
    pin = mm.pin(second)
    with pytest.raises(InvalidRequest, match="are pinned"):
        mm.resize(22)
    mm.unpin(pin)
    with pytest.raises(
        OutOfFrames, match=r"resize to \d+ frames: \d+ frames cannot be evicted.*give at least \d+, or release"
    ) as short:
        mm.resize(20)
    assert (short.value.needed, short.value.free) == (21, 20)
    moves = mm.resize(22)
    assert len(moves) > 0
    assert (moves[:, 0] >= 22).all()
    assert (moves[:, 1] < 22).all()
    assert max(second.pages) < 22
    mm.check(3)


def test_a_smaller_pool_moves_no_pinned_page_of_any_group() -> None:
    """The page of group 0 stays where it is; the page of group 1 lies beyond the new end."""
    mm = MemoryManager(40, 4, groups=(Group(), Group()))
    before, kept = grown(mm, list(range(24))), grown(mm, list(range(100, 108)))
    before.release()
    leaders, companions = kept.pages.tolist(), kept.pages_in(1).tolist()
    assert max(leaders) < min(companions)
    pin = mm.pin(kept)
    with refused(mm, InvalidRequest, "2 frames beyond the new end are pinned"):
        mm.resize(min(companions))
    mm.unpin(pin)
    plan = mm.plan([kept], [1])
    with pytest.raises(PlanConflict, match="1 plans name frames"):
        mm.resize(min(companions))
    mm.abort(plan)
    assert len(mm.resize(min(companions))) == 2
    mm.check()


def test_cached_pages_stay_findable_as_far_as_they_fit(mm: MemoryManager) -> None:
    for prompt in range(4):
        grown(mm, [prompt] * 17).release()
    mm.resize(6)
    mm.check()
    assert mm.stats().cached == 6
    assert [len(mm.open([prompt] * 17)) for prompt in (3, 2)] == [16, 8]


def test_a_page_whose_prefix_was_beyond_the_end_is_no_successor_of_another_page() -> None:
    mm = MemoryManager(16, 1, groups=(Group(window=3),))
    blocker = grown(mm, [9] * 8)
    space = grown(mm, [1, 2, 3, 4])
    assert (space.pages >= 0).tolist() == [False, False, True, True]
    mm.evict(16)
    blocker.release()
    mm.evict(16)
    mm.resize(4)
    mm.check()
    grown(mm, [1, 2])
    assert len(mm.open([1, 2, 3, 4])) == 2


def test_events_follow_a_move() -> None:
    mm = MemoryManager(32, 4, events=256)
    blocker = grown(mm, [9] * 40)
    grown(mm, [1] * 9).release()
    blocker.release()
    mm.evict(8)
    mm.resize(4)
    stored = {block for event in mm.events_snapshot().blocks for block in event.block_hashes}
    newest = mm.events_snapshot().sequence
    mm.evict(4)
    removed = {block for event in mm.events(newest) for block in event.block_hashes}
    assert removed == stored
    assert stored


def test_a_frame_that_moves_gets_a_new_generation() -> None:
    mm = MemoryManager(8, 4)
    before, kept = mm.open(), mm.open()
    for space, tokens in ((before, range(16)), (kept, range(100, 108))):
        mm.commit(mm.plan([space], [len(tokens)]), list(tokens))
    places, generations = before.pages.copy(), mm.state.frames["generation"].copy()
    before.release()
    mm.evict(4)
    assert set(mm.resize(4)[:, 1]) <= set(places)
    assert (mm.state.frames["generation"][kept.pages] > generations[kept.pages]).all()


def test_a_prefix_that_a_plan_pinned_is_unpinned_after_forget_and_resize() -> None:
    mm = MemoryManager(32, 4, groups=(Group(window=8, keep=8),))
    space = grown(mm, list(range(21)))  # page 0 is behind the window
    space.truncate(14)
    plan = mm.plan([space], [1])  # copies page 3, which stays cached: the pages before it are pinned with it
    assert plan.splits[:, 3].tolist() == [1]
    mm.forget()
    mm.resize(64)
    mm.check()
    mm.commit(plan, [5])
    mm.check()
    space.release()
    assert (mm.stats().free, mm.pending) == (64, 0)


def test_the_lists_of_every_tenant_follow_a_move(mm: MemoryManager) -> None:
    for tenant in (b"a", b"b"):
        mm.set_quota(tenant, hard=12)
    spaces = [mm.open(tenant=b"a"), mm.open(tenant=b"b")]
    for space, count in zip(spaces, (32, 8), strict=True):
        mm.commit(mm.plan([space], [count]), list(range(count)))
        space.release()
    assert len(mm.resize(8)) == 2  # those of b
    mm.check()
    assert len(mm.open(list(range(9)), tenant=b"b")) == 8


GROUPS = [(Group(),), (Group(), Group(window=8, sinks=2))]


@pytest.mark.parametrize("groups", GROUPS)
def test_cached_pages_are_freed_and_open_spaces_run_on(groups: tuple[Group, ...]) -> None:
    mm = MemoryManager(64, 4, groups=groups)
    grown(mm, [1] * 17).release()
    running = grown(mm, [2] * 17)
    pages, cached = running.pages.tolist(), mm.stats().cached
    assert mm.forget() == cached > 0
    mm.check()
    assert mm.stats().cached == 0
    assert running.pages.tolist() == pages
    assert len(mm.open([1] * 17)) == len(mm.open([2] * 17)) == 0
    mm.commit(mm.plan([running], [9]), [2] * 9)
    assert running.token_ids.tolist() == [2] * 26
    mm.check()


@pytest.mark.parametrize("groups", GROUPS)
def test_pages_that_mix_old_and_new_weights_are_never_found(groups: tuple[Group, ...]) -> None:
    """A space that was open during forget(), its forks and its plans hold pages of the old weights."""
    mm = MemoryManager(64, 4, groups=groups)
    running = grown(mm, [3] * 10)
    plan = mm.plan([running], [6])
    mm.forget()
    mm.commit(plan, [3] * 6)
    child = running.fork()
    mm.commit(mm.plan([running, child], [8, 9]), [3] * 8 + [4] * 9)
    assert len(mm.open([3] * 24)) == 0
    child.release()
    running.release()
    assert mm.stats().cached == 0
    mm.check()


def test_forget_is_refused_while_a_frame_is_pinned_and_changes_nothing() -> None:
    mm = MemoryManager(32, 4)
    space = grown(mm, [1] * 9)
    pin = mm.pin(space, owner="sender")
    with refused(mm, InvalidRequest, "1 pins hold 2 frames, the first for sender; unpin them first"):
        mm.forget()
    mm.unpin(pin)
    mm.forget()
    assert len(mm.open([1] * 9)) == 0
