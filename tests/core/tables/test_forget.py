"""The laws of forget(): no page computed before it is found afterwards, and open spaces run on undisturbed."""

from __future__ import annotations

import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.errors import InvalidRequest
from tests.core.oracle import everything, grown

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
    before = everything(mm)
    with pytest.raises(InvalidRequest, match="1 pins hold 2 frames, the first for sender; unpin them first"):
        mm.forget()
    assert everything(mm) == before
    mm.unpin(pin)
    mm.forget()
    assert len(mm.open([1] * 9)) == 0
