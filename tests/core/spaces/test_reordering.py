"""The laws of reorder: beams go on where others are, all of them or none."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.errors import InvalidRequest, PlanConflict, StaleHandle
from tests.core.oracle import grown, refused


@pytest.mark.parametrize("groups", [(Group(),), (Group(), Group(window=4))])
@pytest.mark.parametrize("index", [[0, 1, 2], [2, 0, 2], [1, 1, 1, 1], [2], []])
def test_each_result_goes_on_where_its_source_is(groups: tuple[Group, ...], index: list[int]) -> None:
    mm = MemoryManager(64, 4, groups=groups)
    beams = [grown(mm, [beam] * 7) for beam in range(3)]
    pages = [[beam.pages_in(group).tolist() for group in range(len(groups))] for beam in beams]
    result = mm.reorder(beams, np.array(index, np.int64))
    mm.check()
    assert [[space.pages_in(group).tolist() for group in range(len(groups))] for space in result] == [
        pages[at] for at in index
    ]
    assert mm.stats().spaces == len(index)
    for place, at in enumerate(index):
        assert (result[place] is beams[at]) == (at not in index[:place])
    if result:
        mm.commit(mm.plan(result, [1] * len(result)), list(range(50, 50 + len(result))))
    assert [space.token_ids.tolist() for space in result] == [[at] * 7 + [50 + i] for i, at in enumerate(index)]
    mm.check()


def test_a_beam_that_ends_gives_its_frames_back_and_its_handle_is_stale(mm: MemoryManager) -> None:
    beams = [grown(mm, [beam] * 7) for beam in range(3)]
    free = mm.stats().free
    result = mm.reorder(beams, [0, 0, 0])
    assert mm.stats().free == free + 2  # the tails; the full pages stay cached
    with pytest.raises(StaleHandle):
        beams[1].fork()
    for space in result:
        space.release()
    assert mm.recover() == (0, 0, 0)


def test_all_beams_are_reordered_or_none(mm: MemoryManager) -> None:
    beams = [grown(mm, [beam] * 7) for beam in range(3)]
    plan = mm.plan([beams[1]], [1])
    with refused(mm, PlanConflict, "reorder of address space"):
        mm.reorder(beams, [1, 1, 0])
    for index in ([0, 3], [-1], [True]):
        with refused(mm, InvalidRequest):
            mm.reorder(beams, index)
    assert mm.reorder(beams, [1]) == [beams[1]]  # moved, with its plan
    mm.commit(plan, [9])
    assert beams[1].token_ids.tolist() == [1] * 7 + [9]
    with pytest.raises(StaleHandle):
        mm.reorder(beams, [1])
