"""Resize: a pool that grows and shrinks keeps its pages, and never moves a frame that work in flight reads.

The state machine tests resizing in any order with other calls.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core.policies import POLICIES
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict
from tests.core.oracle import everything, grown


def test_a_smaller_pool_refuses_to_move_a_frame_in_use() -> None:
    mm = MemoryManager(40, 4)
    first, second = grown(mm, list(range(40))), grown(mm, list(range(100, 140)))
    assert max(second.pages) >= 20
    plan = mm.plan([first], [1])
    before = everything(mm)
    with pytest.raises(PlanConflict, match="1 plans name frames"):
        mm.resize(20)
    assert everything(mm) == before
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
    unchanged = everything(mm)
    with pytest.raises(InvalidRequest, match="2 frames beyond the new end are pinned"):
        mm.resize(min(companions))
    assert everything(mm) == unchanged
    mm.unpin(pin)
    plan = mm.plan([kept], [1])
    with pytest.raises(PlanConflict, match="1 plans name frames"):
        mm.resize(min(companions))
    mm.abort(plan)
    assert len(mm.resize(min(companions))) == 2
    mm.check()


def test_pages_that_lost_different_prefixes_may_hold_the_same_tokens_in_a_smaller_pool() -> None:
    mm = MemoryManager(40, 2, groups=(Group(window=2),))
    filler = grown(mm, list(range(1000, 1040)))
    one, two = grown(mm, [1, 2, 9, 9]), grown(mm, [3, 4, 9, 9])
    assert min(one.pages[1], two.pages[1]) >= 20
    filler.release()
    mm.evict(40)
    mm.resize(20)
    mm.check()
    assert len(mm.open([1, 2, 9, 9, 0])) == len(mm.open([3, 4, 9, 9, 0])) == 0
    assert [space.token_ids.tolist()[2:] for space in (one, two)] == [[9, 9], [9, 9]]


def test_a_pool_that_shrank_and_grew_finds_the_pages_it_kept() -> None:
    mm = MemoryManager(1000, 4)
    kept = list(range(200))
    for start in range(0, 4000, 400):
        grown(mm, list(range(start, start + 400))).release()
    grown(mm, kept).release()  # used last: it stays
    mm.resize(60)
    assert mm.stats().cached == 60
    mm.resize(5000)
    assert len(mm.open(kept)) == 196
    mm.check(3)


def test_evicted_pages_are_remembered_by_a_pool_of_another_size() -> None:
    mm = MemoryManager(1000, 4)
    grown(mm, [1, 2, 3, 4]).release()
    mm.evict(1)
    for num_frames in (5000, 600):
        mm.resize(num_frames)
        assert mm.why([1, 2, 3, 4, 5]).reason == "evicted"


def test_a_pool_grows_under_open_spaces(mm: MemoryManager) -> None:
    space = grown(mm, list(range(30)))
    pages = space.pages.tolist()
    assert mm.resize(500).tolist() == []
    mm.check()
    assert (mm.available, space.pages.tolist()) == (500 - 8, pages)
    assert len(mm.open(list(range(30)))) == 28
    mm.commit(mm.plan([space], [1000]), [7] * 1000)
    mm.check()


def test_mapped_frames_move_below_the_end_and_the_moves_are_returned(mm: MemoryManager) -> None:
    first, second = grown(mm, [1] * 40), grown(mm, list(range(22)))
    old = second.pages
    first.release()
    mm.evict(10)
    moves = mm.resize(6)
    mm.check()
    assert moves[:, 0].tolist() == sorted(old[old >= 6].tolist())
    assert second.pages.tolist() == [dict(moves.tolist()).get(frame, frame) for frame in old.tolist()]
    assert second.token_ids.tolist() == list(range(22))
    assert len(second.runs) == 1
    assert len(mm.open(list(range(22)))) == 20


def test_cached_pages_stay_findable_as_far_as_they_fit(mm: MemoryManager) -> None:
    for prompt in range(4):
        grown(mm, [prompt] * 17).release()
    mm.resize(6)
    mm.check()
    assert mm.stats().cached == 6
    assert [len(mm.open([prompt] * 17)) for prompt in (3, 2)] == [16, 8]


@pytest.mark.parametrize("policy", POLICIES)
def test_lists_survive_a_move(policy: str) -> None:
    mm = MemoryManager(100, 2, policy=policy)
    mm.set_quota(b"a", soft=20)
    rng = np.random.default_rng(0)
    for turn in range(60):
        grown(mm, rng.integers(0, 2, 11).tolist(), tenant=b"ab"[turn % 2 : turn % 2 + 1]).release()
    for size in (60, 90, 40, 7, 64, 65):
        mm.resize(size)
        mm.check()
        grown(mm, rng.integers(0, 2, 9).tolist(), tenant=b"a").release()
        mm.check()


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


def test_protected_shares_must_fit(mm: MemoryManager) -> None:
    mm.set_quota(b"t", protected=9)
    with pytest.raises(InvalidRequest, match="quotas protect 9"):
        mm.resize(8)


@pytest.mark.parametrize("size", [0, -1, 2**31, 1.5])
def test_impossible_sizes_are_refused(mm: MemoryManager, size: int) -> None:
    with pytest.raises(InvalidRequest, match="give an int of 1 or more"):
        mm.resize(size)


def test_shares_of_the_pool_follow_its_size() -> None:
    mm = MemoryManager(10, 1, watermark=0.2, max_pinned=0.5)
    mm.resize(100)
    assert (mm.max_pinned, mm.reserve, mm.num_frames) == (50, 20, 100)


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


def test_the_lists_of_every_tenant_follow_a_move() -> None:
    mm = MemoryManager(16, 4)
    for tenant in (b"a", b"b"):
        mm.set_quota(tenant, hard=12)
    spaces = [mm.open(tenant=b"a"), mm.open(tenant=b"b")]
    for space, count in zip(spaces, (32, 8), strict=True):
        mm.commit(mm.plan([space], [count]), list(range(count)))
        space.release()
    assert len(mm.resize(8)) == 2  # those of b
    mm.check()
    assert len(mm.open(list(range(9)), tenant=b"b")) == 8
