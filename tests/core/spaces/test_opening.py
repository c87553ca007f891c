"""The laws of looking a prompt up, of opening spaces for it, and of reorder: beams go on where others are.

`awaited` names the pages of a prompt that an open space is to publish: a slow twin compares every open prompt.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from pagedkv.core import Group, MemoryManager
from pagedkv.core import state as st
from pagedkv.core.spaces.awaited import Awaited
from pagedkv.errors import InvalidRequest, PlanConflict, StaleHandle
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


SIZE = 4


def commit(mm: MemoryManager, space: Any, ids: list[int]) -> None:
    first = len(space)
    mm.commit(mm.plan([space], [len(ids) - first]), ids[first:])


def expected(mm: MemoryManager, opened: list[tuple[Any, ...]], prompt: tuple[Any, ...], size: int) -> set[Awaited]:
    """The slow twin: compare the prompt with each open one, token by token and salt by salt."""
    ids, tenant, salt = prompt
    lengths = {}
    for space, others, its_tenant, its_salt in opened:
        common = 0
        while (
            common < min(len(ids) - 1, len(others))
            and ids[common] == others[common]
            and tenant == its_tenant
            and salt.get(common) == its_salt.get(common)
        ):
            common += 1
        common = common // size * size
        if common > max(len(space), mm.lookup(ids, tenant=tenant, salt=salt)):
            lengths[space.asid] = common
    known = mm.lookup(ids, tenant=tenant, salt=salt)
    return {Awaited(asid, common, known) for asid, common in lengths.items() if common == max(lengths.values())}


@pytest.mark.many_steps
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_awaited_prefix_is_the_longest_that_an_open_space_has_to_compute(size: int, seed: int) -> None:
    """Prompts of few tokens share beginnings; spaces compute them in chunks, and some are released on the way."""
    draw, mm = random.Random(seed), MemoryManager(1600 // size, size)
    opened: list[tuple[Any, ...]] = []
    found = 0
    for _ in range(300):
        begin = draw.choice(["abcdabcd", "abcdabce", "bcda"]) * draw.randint(1, 8)
        ids = [ord(c) for c in begin[: draw.randint(1, 60)]] + [draw.randint(0, 1) for _ in range(draw.randint(0, 9))]
        salt = draw.choice([{}, {}, {0: b"x"}, {7: b"x"}, {7: b"y"}, {7: b"x", 20: b"z"}])
        prompt = (ids, draw.choice([b"", b"t"]), {at: name for at, name in salt.items() if at < len(ids)})
        _, tenant, salt = prompt
        awaited = mm.awaited(ids, tenant=tenant, salt=salt)
        right = expected(mm, opened, prompt, size)
        assert awaited in right or (awaited is None and not right)
        found += awaited is not None
        if awaited is not None and draw.random() < 0.3:  # the promise: once that space is there, `open` finds them
            space, others, *_ = next(one for one in opened if one[0].asid == awaited.asid)
            commit(mm, space, others[: awaited.tokens])
            assert mm.lookup(ids, tenant=tenant, salt=salt) >= awaited.tokens
        elif len(opened) < 12:
            opened.append((mm.open(ids, tenant=tenant, salt=salt), *prompt))
        space, others, *_ = one = draw.choice(opened)
        if draw.random() < 0.1 or len(space) == len(others):
            space.release()
            opened.remove(one)
        elif draw.random() < 0.3:
            commit(mm, space, others[: draw.randint(len(space) + 1, len(others))])
    assert found > 5


def test_the_ids_are_those_that_the_caller_had_at_open() -> None:
    mm, ids = MemoryManager(64, SIZE), np.arange(20, dtype=np.int32)
    mm.open(ids).detach()
    ids[:] = 7
    assert mm.awaited(range(20)) == Awaited(0, 16, 0)
    assert mm.awaited(ids) is None


def test_a_space_that_publishes_nothing_is_not_awaited() -> None:
    for prefix_cache in (False, True):
        mm = MemoryManager(64, SIZE, prefix_cache=prefix_cache)
        space = mm.open(range(20))
        assert (mm.awaited(range(20)) is not None) == prefix_cache
        commit(mm, space, list(range(6)))
        mm.forget()
        assert mm.awaited(range(20)) is None
    mm = MemoryManager(64, SIZE)
    space = mm.open(range(20))
    mm.commit(mm.plan([space], [6]), None)
    assert mm.awaited(range(20)) is None


@pytest.mark.many_steps
def test_prompts_of_closed_spaces_are_forgotten() -> None:
    mm = MemoryManager(200, SIZE)
    for first in range(50):
        mm.open(range(first, first + 20)).release()
    assert not mm._open_prompts._prompts
    for first in range(20):  # a step that computes the prompts, and the next question
        space = mm.open(range(first, first + 20))
        commit(mm, space, list(range(first, first + 20)))
        space.detach()
        assert mm.awaited(range(first, first + 20)) is None
    assert not mm._open_prompts._prompts
