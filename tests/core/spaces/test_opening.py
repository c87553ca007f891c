"""The laws of looking a prompt up and of opening spaces for it."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.errors import InvalidRequest
from tests.core.oracle import everything, grown, refused

PROMPT = list(range(100, 130))


@pytest.mark.parametrize("length", [0, 1, 4, 5, 9, 30])
def test_lookup_answers_what_open_maps_and_changes_nothing(length: int) -> None:
    mm = MemoryManager(64, 4, events=9)
    grown(mm, PROMPT[:18], tenant=b"acme").release()
    before, stats = everything(mm), mm.stats()
    known = mm.lookup(PROMPT[:length], tenant=b"acme")
    assert everything(mm) == before
    assert mm.stats() == stats
    assert known == len(mm.open(PROMPT[:length], tenant=b"acme"))
    assert mm.lookup(PROMPT, tenant=b"umbra") == 0


def test_a_prompt_that_was_looked_up_is_evicted_no_later() -> None:
    mm = MemoryManager(8, 4)
    grown(mm, [1] * 5).release()
    grown(mm, [2] * 5).release()
    assert mm.lookup([1] * 5) == 4
    mm.evict(1)
    assert (mm.lookup([1] * 5), mm.lookup([2] * 5)) == (0, 4)


def test_a_batch_is_opened_as_its_rows_would_be() -> None:
    one, many = MemoryManager(64, 4), MemoryManager(64, 4)
    rows = [PROMPT, PROMPT[:9], [1, 2], PROMPT]
    for mm in (one, many):
        grown(mm, PROMPT, b"acme", {13: b"cat"}).release()
    tenants = [b"acme", b"acme", b"acme", b""]
    salts: list[dict[int, bytes]] = [{13: b"cat"}, {}, {}, {}]
    spaces = [one.open(row, tenant=t, salt=s) for row, t, s in zip(rows, tenants, salts, strict=True)]
    opened = many.open_batch(rows, tenant=tenants, salt=salts)
    assert [space.pages.tolist() for space in opened.spaces] == [space.pages.tolist() for space in spaces]
    assert [len(space) for space in opened.spaces] == [28, 8, 0, 0]
    assert one.stats() == many.stats()
    many.check()


@pytest.mark.parametrize(
    ("pads", "skip", "lengths"),
    [
        (None, 4, [12, 8, 4]),
        ([0, 0, 0], 4, [4, 4, 4]),
        ([0, 4, 22], 12, [12, 8, 0]),
        ([3, 5, 11], 13, [10, 8, 2]),
        ([9, 9, 9], 13, [4, 4, 4]),
    ],
)
def test_a_batch_skips_the_columns_that_every_row_knows(
    mm: MemoryManager, pads: list[int] | None, skip: int, lengths: list[int]
) -> None:
    grown(mm, PROMPT[:13])
    rows = [PROMPT, PROMPT[:9], PROMPT[:5]]
    opened = mm.open_batch(rows, pads=pads)
    assert opened.skip == skip
    assert [len(space) for space in opened.spaces] == lengths
    assert mm.open_batch([], pads=pads and []) == ([], 0)


def test_a_row_ends_before_a_column_from_which_its_window_lacks_a_page() -> None:
    """Page 1 is gone. A window of 4 does not see it from column 12 on, nor up to column 4, but from column 10."""
    mm = MemoryManager(64, 4, groups=(Group(), Group(window=4)))
    grown(mm, PROMPT[:13]).release()
    grown(mm, PROMPT[10:19]).release()
    mm.evict(1)  # the page that was given back first
    rows = [PROMPT, PROMPT[10:28]]
    assert [mm.lookup(row) for row in rows] == [12, 8]
    spaces, skip = mm.open_batch(rows, pads=[0, 2])
    assert (skip, [len(space) for space in spaces]) == (4, [4, 2])
    mm.commit(mm.plan(spaces, [4, 6]), [*PROMPT[4:8], *PROMPT[12:18]])
    assert mm.open_batch(rows, pads=[0, 2]).skip == 10
    mm.check()


def test_a_batch_is_opened_for_all_rows_or_for_none() -> None:
    mm = MemoryManager(16, 4, groups=tuple(Group() for _ in range(64)))
    most = 2**15 // 64
    kept = mm.open_batch([[1]] * (most - 3)).spaces
    with refused(mm, InvalidRequest, f"{most - 3} spaces and pins are open, and the limit is {most}"):
        mm.open_batch([[1]] * 4)
    assert len(mm.open_batch([[1]] * 3).spaces) == 3
    assert mm.state.reg[st.NUM_UNUSED_ASIDS] == 0
    del kept


def test_rows_may_be_an_array_or_a_tensor_of_the_host() -> None:
    torch = pytest.importorskip("torch")
    rows = [PROMPT[:9], PROMPT[9:18]]
    for form in (torch.tensor(rows), np.array(rows), [torch.tensor(row) for row in rows]):
        mm = MemoryManager(64, 4)
        grown(mm, PROMPT[:9])
        opened = mm.open_batch(form, pads=torch.tensor([0, 0]))
        assert opened.skip == 0
        assert len(mm.open_batch(form).spaces[0]) == 8
    for wrong in (torch.tensor(3), np.array(3), 3, "row", {1: 2}):
        with pytest.raises(InvalidRequest, match="rows is .*; give a list"):
            mm.open_batch(wrong)
