"""The laws of commit(keep_planned=True): a part of a plan is committed, and the rest stays planned."""

from __future__ import annotations

import pytest

from pagedkv.core import MemoryManager
from pagedkv.errors import InvalidRequest, PlanConflict
from tests.core.oracle import grown


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
