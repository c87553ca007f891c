"""The laws of layer groups: several page tables a space, one pool, and windows that give frames back."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.prefix import index
from pagedkv.core.tables.layer_groups import usable_length
from pagedkv.errors import InvalidRequest, InvariantViolation, OutOfFrames, StaleHandle
from tests.core.oracle import grown, refused

PROMPT = list(range(100, 130))


@pytest.fixture
def two() -> MemoryManager:
    """Return a manager with a group that sees all, and one that sees 8 positions back and the first 2."""
    return MemoryManager(64, 4, groups=(Group(), Group(window=8, sinks=2)))


def test_frames_behind_the_window_are_given_back_on_commit_and_not_on_plan(two: MemoryManager) -> None:
    space = two.open()
    plan = two.plan([space], [30])
    assert (space.pages_in(1) >= 0).all()
    two.commit(plan, PROMPT)
    # the next query is at position 30 and sees 23 .. 30: pages 5 .. 7, and page 0 for its sinks
    assert (space.pages_in(1) >= 0).tolist() == [True, False, False, False, False, True, True, True]
    assert (space.pages >= 0).all()
    two.check()


def test_an_older_commit_leaves_the_pages_that_a_newer_plan_reads(two: MemoryManager) -> None:
    space = grown(two, PROMPT[:12])
    older, newer = two.plan([space], [8]), two.plan([space], [8])
    two.commit(older, PROMPT[12:20])
    first_query = 20
    assert all(space.pages_in(1)[page] >= 0 for page in range((first_query - 7) // 4, 7))
    two.commit(newer, PROMPT[20:28])
    two.check()


@pytest.mark.parametrize(("frames", "fits"), [(15, False), (16, True)])
def test_all_groups_are_served_or_none(frames: int, fits: bool) -> None:
    mm = MemoryManager(frames, 4, groups=(Group(), Group(window=4)))
    space = mm.open()
    if fits:
        assert mm.plan([space], [32]).num_tokens == 32
        return
    with refused(mm, OutOfFrames, "needs 16 frames"):
        mm.plan([space], [32])


def test_a_match_never_lacks_a_page_inside_a_window(two: MemoryManager) -> None:
    grown(two, PROMPT).release()
    again = two.open(PROMPT)
    assert len(again) == 28
    assert (again.pages_in(1) >= 0).tolist() == [True, False, False, False, False, True, True]
    two.check()


def test_a_shorter_prompt_matches_pages_that_were_given_back_and_are_still_cached(two: MemoryManager) -> None:
    grown(two, PROMPT)
    short = two.open(PROMPT[:17])
    assert len(short) == 16
    assert (short.pages_in(1) >= 0).tolist() == [True, False, True, True]


def test_an_evicted_companion_shortens_the_match_and_orphans_no_page(two: MemoryManager) -> None:
    grown(two, PROMPT)
    assert two.stats().cached == 4  # pages 1 .. 4 of the group with a window
    assert two.evict(4) == 4
    two.check()
    assert two.why(PROMPT[:17]).reason == "evicted"
    assert two.why(PROMPT[:17]).tokens_matched == len(two.open(PROMPT[:17])) == 4  # after page 0 the window is page 0
    assert len(two.open(PROMPT)) == 28


def test_a_companion_is_never_found_under_another_leader() -> None:
    """The frame of the leader is reused for other tokens, and the frame of its companion too."""
    mm = MemoryManager(4, 1, groups=(Group(), Group()))
    grown(mm, [1, 2]).release()
    mm.evict(4)
    other = grown(mm, [3, 4])
    assert len(mm.open([1, 2, 0])) == 0
    assert len(mm.open([3, 9])) == 1
    other.release()
    mm.check()


@pytest.mark.parametrize("groups", [(Group(window=8),), (Group(), Group(window=8))], ids=["one", "two"])
def test_a_sequence_is_not_truncated_into_a_page_that_was_given_back(groups: tuple[Group, ...]) -> None:
    mm = MemoryManager(64, 4, groups=groups)
    space = grown(mm, PROMPT)
    with pytest.raises(InvalidRequest, match=r"sees 8 positions back, .* given back at length 30; .* a larger keep"):
        space.truncate(10)
    mm.check()


def test_a_rollback_may_cross_as_many_positions_as_are_kept_behind_the_window() -> None:
    mm = MemoryManager(64, 4, groups=(Group(), Group(window=8, sinks=2, keep=9)))
    space = grown(mm, PROMPT)
    # the query at position 21 sees 14 .. 21, so page 3 stays
    assert (space.pages_in(1) >= 0).tolist() == [True, False, False, True, True, True, True, True]
    with pytest.raises(InvalidRequest, match="group 1 sees 8 positions back"):
        space.truncate(18)
    space.truncate(21)
    mm.check()
    mm.commit(mm.plan([space], [9]), PROMPT[21:])
    assert space.token_ids.tolist() == PROMPT
    mm.check()


@pytest.mark.parametrize("group", [0, 1])
def test_positions_are_kept_while_tokens_come_one_by_one(group: int) -> None:
    mm = MemoryManager(64, 4, groups=(Group(), Group(window=3, keep=6))[1 - group :])
    space = mm.open()
    for token in range(40):
        mm.commit(mm.plan([space], [1]), [token])
        first = max(0, token + 1 - 6 - 2) // 4
        assert (space.pages_in(group) >= 0).tolist() == [page >= first for page in range(token // 4 + 1)]
    mm.check()


def test_a_pin_keeps_every_group(two: MemoryManager) -> None:
    space = grown(two, PROMPT)
    frames = [int(f) for g in range(2) for f in space.pages_in(g)[:7] if f >= 0]
    pin = two.pin(space)
    space.release()
    two.evict(64)
    assert (two.state.frames["status"][frames] == st.MAPPED).all()
    two.check()
    two.unpin(pin)
    assert two.available == 64
    two.check()


def test_check_sees_a_companion_charged_to_another_tenant(two: MemoryManager) -> None:
    two.set_quota(b"t")
    space, other = grown(two, [1, 2], tenant=b"t"), grown(two, [3, 4], tenant=b"other")
    pages = [space.pages_in(1)[0], other.pages_in(1)[0]]
    two.check()
    two.state.frames["account"][pages] = two.state.frames["account"][pages[::-1]]
    with pytest.raises(InvariantViolation, match="charged to another account"):
        two.check()


@pytest.mark.many_steps
def test_a_match_that_is_cut_at_every_page_costs_the_pages_and_not_their_square() -> None:
    """Each of two groups sees one page, and they lack it in turn: no length suits both. Measured in CPU time."""

    def seconds(pages: int) -> float:
        mm = MemoryManager(4 * pages, 1, groups=(Group(), Group(window=2), Group(window=2)))
        space = grown(mm, list(range(pages + 1)))
        leaders = space.pages[:pages].copy()
        for page in range(pages):
            index.remove(mm.state, index.find_companion(mm.state, leaders[page], 1 + page % 2))
        times = []
        for _ in range(20):
            begun = time.thread_time()
            assert usable_length(mm.state, leaders, pages) == 0
            times.append(time.thread_time() - begun)
        return min(times)

    assert seconds(2000) < 9 * seconds(500)  # 4 if the cost is linear, 16 if each cut began anew


def test_the_row_of_another_group_is_not_a_space(two: MemoryManager) -> None:
    space = two.open()
    with pytest.raises(StaleHandle, match="not open"):
        two.plan(np.array([space.asid + 1]), [1])
    with pytest.raises(InvalidRequest, match="numbered from 0"):
        space.pages_in(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Group(window=0), "int of 1 or more"),
        (lambda: Group(window=2.5), "window is 2.5; give an int"),  # type: ignore[arg-type]
        (lambda: Group(window=2**31), r"below 2\*\*31"),
        (lambda: Group(window=2, sinks=2**63 - 1), r"below 2\*\*31"),
        (lambda: Group(sinks=4), "give a window"),
        (lambda: Group(keep=4), "give a window"),
        (lambda: Group(window=4, keep=-1), "int of 0 or more"),
        (lambda: Group(window=4, sinks=-1), "int of 0 or more"),
        (lambda: MemoryManager(4, 4, groups=()), "0 layer groups"),
    ],
)
def test_impossible_groups_are_refused(make: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()  # type: ignore[operator]
