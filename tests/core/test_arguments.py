"""Arguments: every public call takes any value that Python accepts as an int, and refuses others without a change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.core import AddressSpace, Group, MemoryManager
from pagedkv.core.policies import LRU, Cost
from pagedkv.errors import InvalidRequest
from tests.core.oracle import grown, refused

Call = Callable[[MemoryManager, AddressSpace], Any]


def manager_and_space() -> tuple[MemoryManager, AddressSpace]:
    mm = MemoryManager(16, 4, events=8)
    return mm, grown(mm, [1] * 9)


WRONG: dict[str, Call] = {
    "MemoryManager of a bool": lambda m, a: MemoryManager(True, 4),
    "MemoryManager of more than int32": lambda m, a: MemoryManager(2**31, 4),
    "MemoryManager too large for any memory": lambda m, a: MemoryManager(2**31 - 1, 2**31 - 1),
    "block_size 0": lambda m, a: MemoryManager(8, 0),
    "no frames": lambda m, a: MemoryManager(0, 4),
    "block_size of more than int32": lambda m, a: MemoryManager(1, 2**31),
    "watermark of text": lambda m, a: MemoryManager(8, 4, watermark="0.1"),  # type: ignore[arg-type]
    "watermark NaN": lambda m, a: MemoryManager(8, 4, watermark=float("nan")),
    "max_pinned above 1": lambda m, a: MemoryManager(8, 4, max_pinned=1.5),
    "policy of a number": lambda m, a: MemoryManager(8, 4, policy=7),  # type: ignore[arg-type]
    "policy that is a class": lambda m, a: MemoryManager(8, 4, policy=LRU),  # type: ignore[arg-type]
    "policy of scale 0": lambda m, a: MemoryManager(8, 4, policy=Cost(scale=0)),
    "groups of one Group": lambda m, a: MemoryManager(8, 4, groups=Group()),  # type: ignore[arg-type]
    "half an event": lambda m, a: MemoryManager(8, 4, events=1.5),  # type: ignore[arg-type]
    "Group with a bool": lambda m, a: Group(window=True),
    "open for a tenant of text": lambda m, a: m.open(tenant="a"),  # type: ignore[arg-type]
    "open of text": lambda m, a: m.open("abc"),  # type: ignore[arg-type]
    "open of half a token": lambda m, a: m.open([1.5]),  # type: ignore[list-item]
    "open of a token beyond int32": lambda m, a: m.open([2**40]),
    "open of rows of unequal length": lambda m, a: m.open([[1], [1, 2]]),  # type: ignore[list-item]
    "open with a salt of text": lambda m, a: m.open(salt="cat"),  # type: ignore[arg-type]
    "open with an empty salt": lambda m, a: m.open(salt={3: b""}),
    "open with a salt at text": lambda m, a: m.open(salt={"3": b"cat"}),  # type: ignore[dict-item]
    "open with a salt before the prompt": lambda m, a: m.open(salt={-1: b"cat"}),
    "open_batch of text": lambda m, a: m.open_batch("abc"),
    "open_batch with too few tenants": lambda m, a: m.open_batch([[1], [2]], tenant=[b"a"]),
    "open_batch with too many pads": lambda m, a: m.open_batch([[1]], pads=[0, 0]),
    "open_batch with a pad below 0": lambda m, a: m.open_batch([[1]], pads=[-1]),
    "open_batch with a wrong salt": lambda m, a: m.open_batch([[1], [2]], salt=[b"", 3]),  # type: ignore[list-item]
    "fork of a number": lambda m, a: m.fork(a.asid),  # type: ignore[arg-type]
    "reorder of a number": lambda m, a: m.reorder(3, [0]),  # type: ignore[arg-type]
    "reorder by a number": lambda m, a: m.reorder([a], 0),  # type: ignore[arg-type]
    "reorder by half": lambda m, a: m.reorder([a], [0.5]),  # type: ignore[list-item]
    "reorder by an index beyond the spaces": lambda m, a: m.reorder([a], [0, 1]),
    "reorder of a space named twice": lambda m, a: m.reorder([a, a], [0]),
    "reorder of nothing": lambda m, a: m.reorder([], [0]),
    "release of None": lambda m, a: m.release(None),  # type: ignore[arg-type]
    "truncate to half a token": lambda m, a: a.truncate(1.5),  # type: ignore[arg-type]
    "truncate to True": lambda m, a: a.truncate(True),
    "pages in half a group": lambda m, a: a.pages_in(0.5),  # type: ignore[arg-type]
    "plan of one space": lambda m, a: m.plan(a, [1]),  # type: ignore[arg-type]
    "plan of a number": lambda m, a: m.plan([a.asid], [1]),  # type: ignore[list-item]
    "plan of half an asid": lambda m, a: m.plan(np.array([0.0]), [1]),  # type: ignore[arg-type]
    "plan of an asid beyond int32": lambda m, a: m.plan(np.array([2**32]), [1]),
    "plan of text": lambda m, a: m.plan([a], ["1"]),  # type: ignore[list-item]
    "plan of two counts for a space": lambda m, a: m.plan([a], [1, 1]),
    "plan of bools": lambda m, a: m.plan([a], [True]),
    "plan of half a token": lambda m, a: m.plan([a], [0.5]),  # type: ignore[list-item]
    "plan of None": lambda m, a: m.plan([a], None),  # type: ignore[arg-type]
    "plan of more tokens than a kernel addresses": lambda m, a: m.plan([a], [2**31]),
    "plan of a count beyond int64": lambda m, a: m.plan([a], [2**70]),
    "commit of no plan": lambda m, a: m.commit(None, []),  # type: ignore[arg-type]
    "abort of a space": lambda m, a: m.abort(a),  # type: ignore[arg-type]
    "pin of a number": lambda m, a: m.pin(3),  # type: ignore[arg-type]
    "pin of no frames": lambda m, a: m.pin(np.array([], np.int32)),
    "pin of bools": lambda m, a: m.pin(np.array([True])),  # type: ignore[arg-type]
    "pin until text": lambda m, a: m.pin(a, deadline="noon"),  # type: ignore[arg-type]
    "unpin of a number": lambda m, a: m.unpin(0),  # type: ignore[arg-type]
    "retire under text": lambda m, a: m.retire("1"),  # type: ignore[arg-type]
    "retire under more than int64": lambda m, a: m.retire(2**63),
    "retire of one space": lambda m, a: m.retire(1, a),  # type: ignore[arg-type]
    "advance to text": lambda m, a: m.advance("1"),  # type: ignore[arg-type]
    "advance far below 0": lambda m, a: m.advance(-(2**70)),
    "advice of a list": lambda m, a: m.advise(a, ["COLD"]),  # type: ignore[arg-type]
    "advice on a number": lambda m, a: m.advise(3),  # type: ignore[arg-type]
    "evict half a frame": lambda m, a: m.evict(1.5),  # type: ignore[arg-type]
    "evict True": lambda m, a: m.evict(True),
    "resize to 0": lambda m, a: m.resize(0),
    "resize to text": lambda m, a: m.resize("8"),  # type: ignore[arg-type]
    "admits -1": lambda m, a: m.admits(-1),
    "check at level 4": lambda m, a: m.check(4),
    "events since True": lambda m, a: m.events(True),
    "events below 0": lambda m, a: MemoryManager(8, 4, events=-1),
    "events since a future one": lambda m, a: m.events(99),
    "events since text": lambda m, a: m.events("0"),  # type: ignore[arg-type]
    "is_stale of text": lambda m, a: m.is_stale("a"),  # type: ignore[arg-type]
    "is_stale of a space of another manager": lambda m, a: m.is_stale(MemoryManager(8, 4).open()),
    "prefix_cache of text": lambda m, a: MemoryManager(8, 4, prefix_cache="no"),  # type: ignore[arg-type]
    "quota of a tenant of text": lambda m, a: m.set_quota("t"),  # type: ignore[arg-type]
    "quota of True": lambda m, a: m.set_quota(b"t", hard=True),
    "quota beyond int64": lambda m, a: m.set_quota(b"t", hard=2**63),
    "usage of a tenant of text": lambda m, a: m.usage("t"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_argument_is_refused_by_name_and_changes_nothing(call: str) -> None:
    mm, space = manager_and_space()
    with refused(mm, InvalidRequest, r"give|it is|name|no memory|use the one"):
        WRONG[call](mm, space)
    mm.check()


@pytest.mark.parametrize("value", [1, None])
def test_options_of_commit_and_abort_must_be_bools(value: Any) -> None:
    """For another type numba would compile again, which would stop a server for seconds."""
    mm, space = manager_and_space()
    plan = mm.plan([space.fork()], [1])
    with refused(mm, InvalidRequest, "copied is .*; give True or False"):
        mm.abort(plan, copied=value)
    with refused(mm, InvalidRequest, "keep_planned is .*; give True or False"):
        mm.commit(plan, [1], [1], keep_planned=value)
    mm.abort(plan, copied=np.True_)  # type: ignore[arg-type]


class Two:
    """An object that only its `__index__` makes an int."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize(
    "two", [np.int64(2), np.uint8(2), np.array(2), Two()], ids=["int64", "uint8", "0-d array", "__index__"]
)
def test_any_object_that_python_accepts_as_an_int_is_taken(two: Any) -> None:
    mm = MemoryManager(np.int64(16), two, events=two, groups=(Group(), Group(window=two, sinks=two)))
    assert (mm.num_frames, mm.block_size, mm.groups[1]) == (16, 2, Group(window=2, sinks=2))
    mm.set_quota(b"t", hard=two, soft=two, protected=two)
    space = grown(mm, [1] * 7)
    space.truncate(np.int64(7))
    assert len(space.pages_in(np.int64(1))) == 4
    mm.retire(two, [space])
    assert mm.advance(two) > 0
    assert mm.admits(two)
    assert mm.evict(two) == 2
    assert len(mm.resize(np.int32(8))) >= 0
    mm.check(two)
    mm.check()
