"""I9 in its hardest case: a cached chain with a page that is mapped behind a hole. Random walks found these cases."""

from __future__ import annotations

from pagedkv.core import MemoryManager
from pagedkv.core import state as st
from tests.core.oracle import grown


def test_a_prefix_is_not_given_up_before_what_is_cached_behind_a_page_that_is_mapped() -> None:
    mm = MemoryManager(num_frames=5, block_size=1)
    whole = grown(mm, [1, 2, 3])
    first, _, leaf = whole.pages.tolist()
    window = mm.open([1, 2, 9])
    mm.advise(window, "DONTNEED")
    whole.release()  # 3 is cached like any other; 1 and 2 are mapped
    window.punch(0, 1)  # 1 is cached, and this space does not need it
    mm.evict(1)
    assert mm.state.frames["status"][leaf] == st.FREE
    assert mm.state.frames["status"][first] == st.CACHED
    window.release()
    mm.check()


def test_the_fence_of_a_prefix_does_not_fall_before_that_of_a_tail_that_was_split(mm: MemoryManager) -> None:
    whole = grown(mm, list(range(13)))
    window = whole.fork()
    window.truncate(6)
    whole.release()
    mm.retire(1)
    window.punch(0, 1)
    mm.retire(2)
    plan = mm.plan([window], [1])  # splits page 1, whose prefix waits for epoch 1 already
    mm.check()
    mm.commit(plan, [99])
    mm.advance(1)
    mm.check()
    mm.advance(2)
    mm.check()
