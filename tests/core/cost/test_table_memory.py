"""Page tables take memory for the pages in use and for the sequences, and give it back: one long row costs no more."""

from __future__ import annotations

import mmap

import pytest

from pagedkv.core import MemoryManager
from tests.core.cost.memory import IS_THERE, resident

pytestmark = pytest.mark.skipif(not IS_THERE, reason="reads /proc of Linux")

SIZE, MANY, WIDE = 16, 2047, 65_000


def test_a_long_sequence_beside_many_short_ones_takes_memory_for_its_pages_only() -> None:
    mm = MemoryManager(MANY + WIDE, SIZE, prefix_cache=False)
    short = [mm.open() for _ in range(MANY)]
    mm.commit(mm.plan(short, [1] * MANY), None)
    pages = [space.pages[0] for space in short]
    long = mm.open()
    mm.commit(mm.plan([long], [WIDE * SIZE]), None)
    table = mm.state.table
    assert table.nbytes >= 4 * (MANY + 1) * WIDE
    in_use = 4 * WIDE + mmap.PAGESIZE * (MANY + 1)
    before = resident(table)
    assert before <= in_use + 2 * mmap.PAGESIZE
    assert [space.pages[0] for space in short] == pages, "a wider table has lost pages"
    assert len(set(long.pages.tolist())) == WIDE
    long.release()
    assert resident(table) <= before - 4 * WIDE + 2 * mmap.PAGESIZE
    mm.check()


def test_a_long_row_that_a_plan_keeps_gives_its_memory_back_when_the_plan_has_ended() -> None:
    mm = MemoryManager(MANY + WIDE, SIZE, prefix_cache=False)
    long = mm.open()
    for _ in range(16):  # the table is too small otherwise
        mm.open().detach()
    mm.commit(mm.plan([long], [WIDE * SIZE]), None)
    plan = mm.plan([long], [1])
    before = resident(mm.state.table)
    long.release()
    assert resident(mm.state.table) == before
    mm.abort(plan)
    mm.open()
    assert resident(mm.state.table) <= before - 4 * WIDE + 2 * mmap.PAGESIZE
