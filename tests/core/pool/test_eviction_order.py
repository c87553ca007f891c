"""I9 in its hardest case: a cached chain with a page that is mapped behind a hole. Random walks found these cases."""

from __future__ import annotations

from pagedkv.core import Group, MemoryManager
from pagedkv.core import state as st
from tests.core.oracle import grown


def test_a_prefix_is_not_given_up_before_what_is_cached_behind_a_page_that_is_mapped() -> None:
    mm = MemoryManager(num_frames=8, block_size=1, groups=(Group(window=3),))
    whole = grown(mm, [1, 2, 3])
    other = mm.open([1, 2, 9])  # maps 1 and 2
    first, leaf = int(other.pages[0]), int(whole.pages[2])
    mm.advise(other, "DONTNEED")
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
