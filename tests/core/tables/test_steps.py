"""The laws of a step: plan, commit and abort in every order, and the calls that are refused.

With commit(keep_planned=True) a part of a plan is committed, and the rest stays planned.
"""

from __future__ import annotations

import pytest

from pagedkv.core import MemoryManager
from pagedkv.core import state as st
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict
from tests.core.oracle import grown, refused


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
    for batch in ([child], [parent, child]):
        with refused(mm, OutOfFrames, "needs 1 frames"):
            mm.plan(batch, [1] * len(batch))


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


def test_a_page_is_planned_once_and_committed_token_by_token(mm: MemoryManager) -> None:
    space = grown(mm, [1, 2, 3])
    plan = mm.plan([space], [9])
    slots, pages = plan.slots.copy(), space.pages.tolist()
    for token in range(4, 12):
        mm.commit(plan, [token], [1], keep_planned=True)
        assert plan.remaining.tolist() == [12 - token]
        assert space.pages.tolist() == pages
        assert plan.is_outstanding
        mm.check()
    assert (plan.slots == slots).all()
    assert mm.lookup(range(20)) == 0
    assert mm.lookup([*range(1, 9), 0]) == 8  # full pages are found while the rest is planned
    mm.commit(plan, [12], [1], keep_planned=True)
    assert plan.settled == "committed"
    assert space.token_ids.tolist() == list(range(1, 13))
    assert mm.recover() == (0, 0, 0)


def test_all_that_remains_is_committed_without_counts(mm: MemoryManager) -> None:
    a, b = mm.open(), mm.open()
    plan = mm.plan([a, b], [5, 3])
    mm.commit(plan, [1, 2, 8], [2, 1], keep_planned=True)
    with pytest.raises(InvalidRequest, match="commit got 8 token ids and counts"):
        mm.commit(plan, range(8))  # type: ignore[arg-type]
    mm.commit(plan, [3, 4, 5, 9, 7])
    assert (a.token_ids.tolist(), b.token_ids.tolist()) == ([1, 2, 3, 4, 5], [8, 9, 7])
    assert plan.settled == "committed"
    for again in (lambda: mm.abort(plan), lambda: mm.commit(plan, [3, 4, 5, 9, 7])):
        with pytest.raises(PlanConflict, match="committed already"):
            again()


@pytest.mark.parametrize("end", ["abort", "commit"])
def test_the_rest_is_given_back_by_abort_or_by_a_commit_that_keeps_nothing_planned(mm: MemoryManager, end: str) -> None:
    space = mm.open()
    plan = mm.plan([space], [14])
    mm.commit(plan, [1, 2, 3, 4, 5], [5], keep_planned=True)
    if end == "abort":
        mm.abort(plan)
    else:
        mm.commit(plan, [6], [1])
    assert len(space) == 5 + (end == "commit")
    assert len(space.pages) == 2
    assert mm.stats().free == 14


def test_a_newer_plan_waits_for_the_rest_of_an_older_one(mm: MemoryManager) -> None:
    space = mm.open()
    older, newer = mm.plan([space], [4]), mm.plan([space], [2])
    mm.commit(older, [1], [1], keep_planned=True)  # nothing is rolled back, so the newer plan does not matter
    for call in (lambda: mm.commit(newer, [5, 6]), lambda: mm.abort(older), lambda: mm.commit(older, [2], [1])):
        with pytest.raises(PlanConflict):
            call()
    mm.commit(older, [2, 3, 4])
    mm.commit(newer, [5, 6])
    assert space.token_ids.tolist() == [1, 2, 3, 4, 5, 6]


def test_copies_count_as_made_once_a_part_is_committed(mm: MemoryManager) -> None:
    parent = grown(mm, [1, 2, 3])
    a, b = parent.fork(), parent.fork()
    plan = mm.plan([a, b], [3, 3])
    assert plan.num_copies == 2
    mm.commit(plan, [4], [1, 0], keep_planned=True)
    assert plan.num_copies == 0
    assert not mm.state.frames["pins"].any()
    mm.abort(plan)
    assert [len(space) for space in (parent, a, b)] == [3, 4, 3]
    assert len({int(space.pages[0]) for space in (parent, a, b)}) == 3  # each keeps its copy
