"""Page tables take memory for the pages in use and for the sequences, and give it back: one long row costs no more."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedkv.core import MemoryManager
from pagedkv.core import state as st
from tests.core.oracle import grown

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps says what memory a table takes")

SIZE, MANY, WIDE = 16, 2047, 65_000


def resident(array: np.ndarray) -> int:
    """Return the bytes of memory that the pages of `array` take."""
    first = array.ctypes.data
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(bound, 16) for bound in part.split()[0].split("-"))
        if begin <= first < end:
            assert first + array.nbytes <= end, "the table lies in two mappings"
            return 1024 * int(re.search(r"^Rss: +(\d+) kB", part, re.M)[1])
    raise AssertionError("the table lies in no mapping")


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


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [2**62, 0], ids=["holes", "zeros"])
def test_tables_of_both_kinds_serve_the_same_spaces(monkeypatch: pytest.MonkeyPatch, lazy: int) -> None:
    """The table grows in both directions, and rows are used again after their memory was given back."""
    monkeypatch.setattr(st, "LAZY_BYTES", lazy)
    monkeypatch.setattr(st, "LONG", 0)
    mm = MemoryManager(4000, 2)
    for turn in range(3):
        spaces = [grown(mm, list(range(turn * 1000 + 7 * i, turn * 1000 + 9 * i))) for i in range(40)]
        mm.check()
        assert [space.token_ids.tolist() for space in spaces] == [
            list(range(turn * 1000 + 7 * i, turn * 1000 + 9 * i)) for i in range(40)
        ]
        mm.resize(4000 + turn)
        kept = [space.pages.tolist() for space in spaces]
        spaces[-1].release()
        mm.state.reg[st.CLOSED_LONG] = 1  # as after a long row
        mm.state.spaces["complete"] = np.where(mm.state.spaces["status"] == st.UNUSED, st.LONG, 0)
        spaces.append(mm.open())
        assert [space.pages.tolist() for space in spaces[:-2]] == kept[:-1]
        for space in (*spaces[:-2], spaces[-1]):
            space.release()
        mm.check()
