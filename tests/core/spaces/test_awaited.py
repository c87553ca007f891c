"""`awaited`: the pages of a prompt that an open space is to publish, against a comparison with every open prompt."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedkv.core import MemoryManager
from pagedkv.core.spaces.awaited import Awaited

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
    import numpy as np

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
