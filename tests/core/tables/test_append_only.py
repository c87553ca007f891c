"""The laws of append-only tables: a page that a space has computed keeps its frame."""

from __future__ import annotations

import pytest

from pagedkv.core import Group, MemoryManager
from tests.core.oracle import grown

GROUPS = [(Group(),), (Group(), Group(window=8, sinks=2))]


@pytest.mark.parametrize("groups", GROUPS)
def test_a_page_that_exists_already_is_not_exchanged_under_its_owner(groups: tuple[Group, ...]) -> None:
    mm = MemoryManager(64, 4, append_only=True, groups=groups)
    first, second = mm.open(), mm.open()
    plan = mm.plan([first, second], [10, 10])
    tables = [second.pages_in(group).tolist() for group in range(len(groups))]
    mm.commit(plan, [*range(10)] * 2)
    assert [second.pages_in(group).tolist() for group in range(len(groups))] == tables
    assert not set(first.pages.tolist()) & set(second.pages.tolist())
    assert mm.stats().deduplicated == 0
    mm.check()
    second.release()
    mm.check()
    assert mm.lookup([*range(10), 0]) == 8
    assert mm.stats().free == 64 - 3 * len(groups)


def test_behind_a_twin_nothing_is_published_and_prompts_find_the_first_pages() -> None:
    mm = MemoryManager(64, 4, append_only=True)
    grown(mm, [1] * 5).release()
    twin = mm.open([1] * 4)  # one token is left to compute, so the page is computed again
    mm.commit(mm.plan([twin], [12]), [1] * 4 + [2] * 8)
    assert mm.lookup([1] * 4 + [2] * 8 + [0]) == 4
    child = twin.fork()
    mm.commit(mm.plan([child], [4]), [3] * 4)
    for space in (twin, child):
        space.release()
    assert mm.stats().cached == 1
    mm.check()


def test_a_space_that_drops_its_twin_publishes_again() -> None:
    mm = MemoryManager(64, 4, append_only=True)
    grown(mm, [1] * 5).release()
    twin = mm.open([1] * 4)
    mm.commit(mm.plan([twin], [6]), [1] * 6)
    twin.truncate(0)
    mm.commit(mm.plan([twin], [8]), [2] * 8)
    assert mm.lookup([2] * 9) == 8
    mm.check()


def test_pages_before_a_twin_stay_published() -> None:
    mm = MemoryManager(64, 4, append_only=True)
    a, b = grown(mm, [1] * 6), grown(mm, [1] * 6)
    assert a.pages[0] == b.pages[0]  # b found it
    plan = mm.plan([a, b], [4, 4])
    mm.commit(plan, [2] * 8)
    assert a.pages[1] != b.pages[1]
    a.release(), b.release()
    assert mm.lookup([1] * 6 + [2] * 3) == 8
    mm.check()


def test_without_a_prefix_cache_nothing_changes() -> None:
    mm = MemoryManager(16, 4, append_only=True, prefix_cache=False)
    assert not mm.prefix_cache
    grown(mm, [1] * 9).release()
    assert mm.stats().cached == 0
