"""Pins: the pages that a pin names stay findable, whatever plans were outstanding when it was made."""

from __future__ import annotations

import pytest

from pagedkv.core import Group, MemoryManager
from tests.core.oracle import grown

PROMPT = [0, 1, 2, 3, 5, 5, 5, 5]
GROUPS = {1: (Group(),), 2: (Group(), Group(window=40)), 3: (Group(), Group(window=40), Group(window=60, sinks=2))}


@pytest.mark.parametrize("num_groups", GROUPS)
@pytest.mark.parametrize("second", [0, 1, 5])
def test_a_prefix_that_was_computed_twice_is_pinned_between_two_commits(second: int, num_groups: int) -> None:
    mm = MemoryManager(16 * num_groups, 4, groups=GROUPS[num_groups])
    grown(mm, PROMPT[:4]).release()
    space = mm.open()
    first, later = mm.plan([space], [8]), mm.plan([space], [second])
    mm.commit(first, PROMPT)
    pin = mm.pin(space)
    mm.check()
    mm.commit(later, [9] * second)
    space.release()
    mm.check()
    mm.evict(99)
    mm.check()
    found = mm.open([*PROMPT, 7])
    assert len(found) == 8
    found.release()
    mm.unpin(pin)
    mm.check()
    assert len(mm.open([*PROMPT, 7])) == 8
