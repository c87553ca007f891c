"""Group 0 with a window: a long sequence is found again after its window has moved, and no page before its prefix goes.

The pages behind the window are cached while the sequence runs on, each after its prefix is cached already. So they are
put before their prefix in the order of eviction, and not at its end. The last two tests are cases of I9 that random
walks found: a cached chain with a page that is mapped behind a hole.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pagedkv.core import AddressSpace, Group, MemoryManager
from pagedkv.core import state as st
from tests.core.oracle import grown

pytestmark = pytest.mark.strict

LENGTH = 61
IDS = list(range(1000, 1000 + LENGTH))
GROUPS = {
    "one": (Group(window=9),),
    "sinks": (Group(window=9, sinks=6),),
    "keep": (Group(window=9, keep=10),),
    "narrow first": (Group(window=9), Group(window=17)),
    "wide first": (Group(window=17), Group(window=9, sinks=2)),
    "full second": (Group(window=9), Group()),
}


SELDOM = ("keep", "full second")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in GROUPS])
def groups(request: pytest.FixtureRequest) -> tuple[Group, ...]:
    return GROUPS[request.param]


def decoded(mm: MemoryManager, ids: list[int], *, chunk: int = 1, epochs: bool = False) -> AddressSpace:
    """Return a space that holds `ids`, committed a chunk at a time. epochs: each step overlaps the next one."""
    space = mm.open(ids)
    first = mm.state.reg[st.EPOCH] + 1
    for step, at in enumerate(range(len(space), len(ids), chunk)):
        if epochs:
            mm.retire(first + step)
        mm.commit(mm.plan([space], [len(ids[at : at + chunk])]), ids[at : at + chunk])
        if epochs and step > 0:
            mm.advance(first + step - 1)
    return space


def end_epochs(mm: MemoryManager) -> None:
    if mm.state.reg[st.EPOCH] >= 0:
        mm.advance(int(mm.state.reg[st.EPOCH]))
    mm.check()


QUICK = [("lru", 1, False), ("cost", 7, True)]
GRID = [case for case in product(["lru", "cost"], [1, 7, 45], [False, True]) if case not in QUICK]


@pytest.mark.parametrize(
    ("policy", "chunk", "epochs"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID)]
)
def test_a_sequence_longer_than_its_windows_is_found_to_its_last_page(groups, policy, chunk, epochs) -> None:
    mm = MemoryManager(128, 4, groups=groups, policy=policy)
    ids = IDS[:45]
    space = decoded(mm, ids, chunk=chunk, epochs=epochs)
    assert mm.lookup(ids) == 44
    space.release()
    end_epochs(mm)
    assert mm.lookup(ids) == 44
    again = mm.open(ids)
    for number, group in enumerate(groups):
        pages = again.pages_in(number)
        assert (pages >= 0).sum() < 15 or group.window is None
        assert (pages[-2:] >= 0).all()
    mm.check()
    again.release()
    mm.check()


@pytest.mark.parametrize(("released", "epochs"), [(False, True), (True, False)])
def test_eviction_takes_the_end_before_the_beginning(groups, released, epochs) -> None:
    mm = MemoryManager(128, 4, groups=groups)
    space = decoded(mm, IDS, epochs=epochs)
    if released:
        space.release()
    end_epochs(mm)
    found = [mm.lookup(IDS)]
    while mm.evict(1):
        mm.check()
        found.append(mm.lookup(IDS))
    assert found == sorted(found, reverse=True)
    cached = {int(frame) for frame in np.flatnonzero(mm.state.frames["status"] == st.CACHED)}
    assert not cached
    assert (found[-1] == 0) == (released or not groups[0].sinks)


def test_what_runs_on_gives_up_its_past_before_a_prompt_that_ended_later(groups) -> None:
    """A page behind a window is as old as its prefix, so a sequence that goes on does not keep its past fresh."""
    mm = MemoryManager(192, 4, groups=groups)
    space = decoded(mm, IDS[:40])
    decoded(mm, list(range(30))).release()
    ids = list(range(2000, 2021))
    mm.commit(mm.plan([space], [21]), ids)
    known = mm.lookup(list(range(30)))
    assert known == 28
    while mm.lookup([*IDS[:40], *ids]) > 8 and mm.lookup(list(range(30))) == known:
        assert mm.evict(1) == 1
    assert mm.lookup(list(range(30))) == known


@pytest.mark.parametrize("epochs", [False, True])
def test_a_sequence_whose_past_was_evicted_publishes_no_more_and_leaves_nothing(epochs) -> None:
    mm = MemoryManager(128, 4, groups=(Group(window=9),))
    space = decoded(mm, IDS, epochs=epochs)
    end_epochs(mm)
    mm.evict(5)
    mm.check()
    mm.commit(mm.plan([space], [20]), range(20))
    mm.check()
    assert (mm.state.frames["published"][space.pages[15:]] == 0).all()
    space.release()
    mm.check()
    assert mm.lookup(IDS) == 4 * (mm.stats().cached)  # what is cached is the beginning that was not evicted
    mm.evict(128)
    assert mm.stats().free == 128


def test_a_sequence_that_ended_last_is_evicted_last(groups) -> None:
    mm = MemoryManager(192, 4, groups=groups)
    space = decoded(mm, IDS)
    decoded(mm, list(range(30))).release()
    space.release()
    while mm.lookup(list(range(30))):
        assert mm.lookup(IDS) == 60
        assert mm.evict(1) == 1


def test_a_page_that_waits_for_an_epoch_is_free_if_its_prefix_was_evicted_meanwhile() -> None:
    mm = MemoryManager(128, 4, groups=(Group(window=9),))
    space = decoded(mm, IDS[:40])
    mm.retire(0)
    mm.commit(mm.plan([space], [8]), IDS[40:48])  # two pages fall behind the window, and wait for epoch 0
    waiting = mm.state.frames["place"] == st.AMONG_FENCED
    assert waiting.sum() == 2
    mm.evict(4)
    mm.check()
    mm.advance(0)
    mm.check()
    assert (mm.state.frames["status"][waiting] == st.FREE).all()


def test_the_prefix_of_a_copied_tail_stays_even_behind_a_hole() -> None:
    mm = MemoryManager(16, 4, groups=(Group(window=8, keep=8),))
    space = grown(mm, IDS[:21])
    space.truncate(14)
    plan = mm.plan([space], [1])  # copies page 3, which stays cached: the pages before it are pinned with it
    assert plan.splits[:, 3].tolist() == [1]
    assert mm.evict(16) == 1  # page 4 alone
    mm.check()
    mm.commit(plan, [9])
    mm.check()
    assert mm.evict(16) == 2  # page 0, and the source of the copy
    assert not mm.state.frames["pins"].any()


def test_a_tail_without_its_prefix_is_copied_and_its_source_freed() -> None:
    mm = MemoryManager(16, 4, groups=(Group(window=8, keep=8),))
    space = grown(mm, IDS[:21])
    assert mm.evict(16) == 1  # page 0
    space.truncate(14)
    plan = mm.plan([space], [1])
    assert plan.splits[:, 3].tolist() == [0]
    mm.check()
    mm.commit(plan, [9])
    mm.check()
    assert mm.stats().cached == 0


@pytest.mark.many_steps
def test_a_step_behind_two_thousand_pages_visits_none_of_them() -> None:
    """A page that falls behind the window is put before its prefix at once: no page of the prefix is visited."""
    mm = MemoryManager(4_000, 1, groups=(Group(window=4),))
    space = grown(mm, list(range(2_000)))
    order = []
    frame = int(st.list_registers(mm.state.reg)[st.NORMAL, 0])
    mm.commit(mm.plan([space], [1]), [5])
    while frame != st.NIL:
        order.append(frame)
        frame = int(mm.state.frames["newer"][frame])
    entered = mm.state.frames["entered"][order]
    assert len(order) == 1997
    assert len(set(entered.tolist())) == 1  # a prefix that was visited would have the clock of this step
    mm.check()


def test_a_prefix_is_not_given_up_before_what_is_cached_behind_a_page_that_is_mapped() -> None:
    mm = MemoryManager(num_frames=8, block_size=1, groups=(Group(window=3),))
    whole = grown(mm, [1, 2, 3])
    other = mm.open([1, 2, 9])  # maps 1 and 2
    first, leaf = int(other.pages[0]), int(whole.pages[2])
    mm.advise(other, "demote")
    whole.release()  # 3 is cached like any other
    mm.commit(mm.plan([other], [1]), [9])  # 1 falls behind the window, and is cached
    mm.check()
    mm.evict(1)
    assert mm.state.frames["status"][leaf] == st.FREE
    assert mm.state.frames["status"][first] == st.CACHED
    other.release()
    mm.check()


def test_the_fence_of_a_prefix_does_not_fall_before_that_of_a_tail_that_was_split() -> None:
    mm = MemoryManager(16, 4, groups=(Group(window=8, keep=8),))
    space = mm.open()
    plan = mm.plan([space], [21])
    mm.retire(1)
    mm.commit(plan, range(21))  # page 0 falls behind the window, and waits for epoch 1
    mm.retire(2)
    space.truncate(14)
    plan = mm.plan([space], [1])  # splits page 3, whose prefix waits for epoch 1 already
    assert plan.splits[:, 3].tolist() == [1]
    mm.check()
    mm.commit(plan, [99])
    mm.advance(1)
    mm.check()
    mm.advance(2)
    mm.check()
