"""Resize: a pool that grows and shrinks keeps what it holds, and refuses to move what somebody reads. The state machine does the rest."""

from __future__ import annotations

import pytest

from pagedkv.core import MemoryManager
from pagedkv.errors import InvalidRequest, OutOfFrames, PlanConflict
from tests.core.oracle import everything, grown


def test_a_smaller_pool_refuses_to_move_what_somebody_reads() -> None:
    mm = MemoryManager(40, 4)
    first, second = grown(mm, list(range(40))), grown(mm, list(range(100, 140)))
    assert max(second.pages) >= 20
    plan = mm.plan([first], [1])
    before = everything(mm)
    with pytest.raises(PlanConflict, match="1 plans name frames"):
        mm.resize(20)
    assert everything(mm) == before
    mm.commit(plan, [7])
    mm.retire(1)
    with pytest.raises(PlanConflict, match="what epoch 1 may read"):
        mm.resize(22)
    mm.advance(1)
    pin = mm.pin(second)
    with pytest.raises(InvalidRequest, match="are pinned"):
        mm.resize(22)
    mm.unpin(pin)
    with pytest.raises(OutOfFrames) as short:
        mm.resize(20)
    assert (short.value.needed, short.value.free) == (21, 20)
    moves = mm.resize(22)
    assert len(moves) > 0
    assert (moves[:, 0] >= 22).all()
    assert (moves[:, 1] < 22).all()
    assert max(second.pages) < 22
    mm.check(3)


def test_a_pool_that_shrank_and_grew_finds_what_it_kept() -> None:
    mm = MemoryManager(1000, 4)
    kept = list(range(200))
    for start in range(0, 4000, 400):
        grown(mm, list(range(start, start + 400))).release()
    grown(mm, kept).release()  # used last: it stays
    mm.resize(60)
    assert mm.stats().cached == 60
    mm.resize(5000)
    assert len(mm.open(kept)) == 196
    mm.check(3)


def test_what_was_evicted_is_remembered_by_a_pool_of_another_size() -> None:
    mm = MemoryManager(1000, 4)
    grown(mm, [1, 2, 3, 4]).release()
    mm.evict(1)
    for num_frames in (5000, 600):
        mm.resize(num_frames)
        assert mm.why([1, 2, 3, 4, 5]).reason == "evicted"
