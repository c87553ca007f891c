"""The laws of a step: plan, commit and abort in every order, and the calls that are refused."""

from __future__ import annotations

import pytest

from pagedkv.core import MemoryManager
from pagedkv.core import state as st
from pagedkv.errors import OutOfFrames, PlanConflict
from tests.core.oracle import everything, grown


def test_a_frame_that_an_outstanding_plan_copies_from_is_not_written(mm: MemoryManager) -> None:
    """The copy may not have been made yet, and abort may give the frame back."""
    a = grown(mm, [1, 2, 3])
    b = a.fork()
    older = mm.plan([a], [1])
    b.truncate(1)
    mm.commit(mm.plan([b], [2]), [8, 9])
    mm.abort(older)
    assert a.token_ids.tolist() == [1, 2, 3]
    assert b.token_ids.tolist() == [1, 8, 9]


def test_a_plan_aborted_after_its_copies_keeps_its_own_tails(mm: MemoryManager) -> None:
    """The last writer of the tail wrote in place, so the tail cannot be shared again."""
    a = grown(mm, [1, 2, 3])
    b = a.fork()
    b.truncate(1)
    plan = mm.plan([a, b], [1, 2])
    mm.abort(plan, copied=True)
    assert set(a.pages) & set(b.pages) == set()
    assert a.token_ids.tolist() == [1, 2, 3]


def test_a_page_is_not_exchanged_for_an_equal_one_under_a_plan(mm: MemoryManager) -> None:
    """A plan reads the page, maybe through an older table. When the last plan is settled the page is shared."""
    grown(mm, [7, 7, 7, 7, 7])
    late = mm.open()
    first, second = mm.plan([late], [4]), mm.plan([late], [1])
    mine = int(late.pages[0])
    mm.commit(first, [7, 7, 7, 7])
    assert late.pages[0] == mine
    mm.commit(second, [7])
    assert late.pages[0] != mine


def test_the_source_of_a_copy_survives_its_owners_until_commit(mm: MemoryManager) -> None:
    parent = grown(mm, [1, 2, 3, 4, 5])
    child = parent.fork()
    plan = mm.plan([child], [1])
    source = int(plan.copies[0, 0])
    parent.release()
    assert mm.state.frames["status"][source] == st.RETIRED
    assert mm.stats().retired == 1
    mm.commit(plan, [6])
    assert mm.state.frames["status"][source] == st.FREE


def test_a_plan_whose_copies_do_not_fit_changes_nothing() -> None:
    mm = MemoryManager(num_frames=2, block_size=4)
    parent = grown(mm, [1, 2, 3, 4, 5])
    child = parent.fork()  # every frame is mapped, and the tail has two owners
    before = everything(mm)
    for batch, short_of in (([child], "needs 1 frames"), ([parent, child], "needs 1 frames")):
        with pytest.raises(OutOfFrames, match=short_of):
            mm.plan(batch, [1] * len(batch))
        assert everything(mm) == before


def test_a_cut_commit_gives_back_the_frames_of_rejected_drafts(mm: MemoryManager) -> None:
    space = grown(mm, [1, 2, 3])
    plan = mm.plan([space], [9])
    assert len(space.pages) == 3
    mm.commit(plan, [4, 5], [2])
    assert space.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert len(space.pages) == 2
    assert mm.stats().mapped == 2


def test_an_aborted_plan_leaves_the_tables_as_they_were(mm: MemoryManager) -> None:
    parent = grown(mm, [1, 2, 3, 4, 5])
    child = parent.fork()
    before = parent.pages.tolist(), child.pages.tolist(), mm.stats().free
    mm.abort(mm.plan([parent, child], [9, 9]))
    assert (parent.pages.tolist(), child.pages.tolist(), mm.stats().free) == before


def test_release_under_an_outstanding_plan_waits_for_it(mm: MemoryManager) -> None:
    space = mm.open([1])
    plan = mm.plan([space], [5])
    space.release()
    assert mm.stats().mapped == 2
    mm.commit(plan, [1, 2, 3, 4, 5])
    assert mm.stats().mapped == 0


def test_plans_of_a_space_are_committed_oldest_first(mm: MemoryManager) -> None:
    space = mm.open([1])
    older, newer = mm.plan([space], [2]), mm.plan([space], [2])
    with pytest.raises(PlanConflict, match="older plans first"):
        mm.commit(newer, [3, 4])
    with pytest.raises(PlanConflict, match="newer plan"):
        mm.commit(older, [1], [1])
    mm.commit(older, [1, 2])
    mm.commit(newer, [3, 4])
    assert space.token_ids.tolist() == [1, 2, 3, 4]


def test_an_outstanding_plan_keeps_its_table_when_tables_grow() -> None:
    mm = MemoryManager(num_frames=200, block_size=1)
    first = mm.open([1])
    plan = mm.plan([first], [1])
    table = plan.block_table
    others = [grown(mm, [i] * 3) for i in range(40)]
    long = grown(mm, [9] * 60)
    assert table[first.asid, 0] == first.pages[0]
    assert len({s.asid for s in [first, long, *others]}) == 42
    mm.commit(plan, [1])
    mm.check()
