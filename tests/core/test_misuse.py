"""Misuse is caught at the call, with numbers and a remedy; it changes nothing. Errors of level 3 name callers.

Arguments: every public call takes any value that Python accepts as an int, and refuses others. An error crosses
processes with its sentence and its numbers: replicas raise them far from their callers.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagedkv import errors
from pagedkv.core import AddressSpace, Group, MemoryManager, Plan
from pagedkv.core.policies import LRU, Cost
from pagedkv.errors import (
    ConcurrentUse,
    DoubleRelease,
    InvalidRequest,
    InvariantViolation,
    OutOfFrames,
    PlanConflict,
    StaleHandle,
)
from tests.core.interrupts.concurrency import call_under_way
from tests.core.oracle import everything, grown, refused


@dataclass
class Scene:
    """A manager with six tokens in `space`, a space of another manager, a released space, a plan of three tokens."""

    mm: MemoryManager
    space: AddressSpace
    foreign: AddressSpace
    released: AddressSpace
    plan: Plan
    settled: Plan


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("PAGEDKV_DEBUG", "1")
    mm = MemoryManager(num_frames=16, block_size=4)
    space, released = grown(mm, [1] * 6), grown(mm, [2] * 3)
    settled = mm.plan([released], [1])
    mm.commit(settled, [2])
    released.release()
    busy = mm.open()
    return Scene(mm, space, MemoryManager(4, 4).open(), released, mm.plan([busy], [3]), settled)


REOPEN = "open or fork a new one"
OTHER_SPACE = "belongs to another manager; use the one that opened it"
OTHER_PLAN = "made by another manager; give it back to that one"
NO_GENERATION = r"space 1 was released: this handle is of generation \d+; open or fork"

MISUSES: dict[str, tuple[Callable[[Scene], object], type[Exception], str]] = {
    "double release": (lambda s: s.released.release(), DoubleRelease, r"space 1 was released already; drop the handle"),
    "stale handle, planned": (lambda s: s.mm.plan([s.released], [1]), StaleHandle, NO_GENERATION),
    "stale handle, forked": (lambda s: s.released.fork(), StaleHandle, REOPEN),
    "stale handle, read": (lambda s: s.released.pages, StaleHandle, REOPEN),
    "stale handle, measured": (lambda s: len(s.released), StaleHandle, REOPEN),
    "stale handle, pinned": (lambda s: s.mm.pin(s.released), StaleHandle, REOPEN),
    "stale number": (lambda s: s.mm.plan(np.array([9]), [1]), StaleHandle, "9, which is not open; open or fork one"),
    "foreign handle": (lambda s: s.mm.plan([s.foreign], [1]), InvalidRequest, OTHER_SPACE),
    "foreign handle, released": (lambda s: s.mm.release(s.foreign), InvalidRequest, OTHER_SPACE),
    "foreign plan": (lambda s: s.foreign.manager.abort(s.plan), InvalidRequest, OTHER_PLAN),
    "foreign plan, committed": (lambda s: s.foreign.manager.commit(s.plan, [1] * 3), InvalidRequest, OTHER_PLAN),
    "plan settled twice": (lambda s: s.mm.commit(s.settled, [1]), PlanConflict, "committed already; make a new one"),
    "read before computed": (lambda s: s.mm.commit(s.plan, [1] * 4), InvalidRequest, r"4 token ids and counts \[3\]"),
    "kept more than planned": (lambda s: s.mm.commit(s.plan, [1] * 4, [4]), InvalidRequest, "than the 3 planned"),
    "named twice": (
        lambda s: s.mm.plan([s.space, s.space], [1, 1]),
        InvalidRequest,
        "names address space 0 twice; add its counts up",
    ),
    "negative count": (
        lambda s: s.mm.plan([s.space], [-1]),
        InvalidRequest,
        "asks for -1 tokens of address space 0; give 0 or more",
    ),
    "too many": (lambda s: s.mm.plan([s.space], [99]), OutOfFrames, r"\d+ frames; \d+ are free.*or raise num_frames"),
    "unknown tokens cut off": (
        lambda s: s.space.truncate(7),
        InvalidRequest,
        "truncate to 7: the space holds 6 tokens; give 0 up to that",
    ),
    "unpublished frame pinned": (
        lambda s: s.mm.pin(np.array([15])),
        InvalidRequest,
        "frame 15: it is not published.*pin the space that maps it",
    ),
    "epoch not opened": (
        lambda s: s.mm.advance(4),
        InvalidRequest,
        r"epoch 4: the newest one is -1; retire\(epoch\) opens one",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_caught_at_the_call(scene: Scene, misuse: str) -> None:
    act, error, text = MISUSES[misuse]
    with refused(scene.mm, error, text):
        act(scene)
    scene.mm.check()


def test_a_pin_of_another_manager_is_refused_even_if_it_looks_like_one_of_ours() -> None:
    ours, theirs = MemoryManager(16, 4), MemoryManager(16, 4)
    mine, other = (mm.pin(grown(mm, [1] * 9)) for mm in (ours, theirs))
    assert mine == other
    with pytest.raises(DoubleRelease, match="made by another manager"):
        ours.unpin(other)
    assert ours.stats().pinned == 2
    ours.unpin(mine)


def in_a_thread(act: Callable[[], object]) -> BaseException | None:
    """Run `act` in a thread named intruder, and return its exception or None."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="intruder")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_an_owned_manager_refuses_other_threads_at_any_time(scene: Scene) -> None:
    scene.mm.own()
    before = everything(scene.mm)
    error = in_a_thread(lambda: scene.mm.open([1]))
    assert isinstance(error, ConcurrentUse)
    assert "open was called from thread 'intruder'; thread 'MainThread' owns the manager. Call own()" in str(error)
    assert everything(scene.mm) == before


def test_only_the_owner_reads_events_and_any_thread_reads_figures() -> None:
    """Reading events changes the names that the log keeps: two readers at once would name pages wrongly."""
    mm = MemoryManager(8, 4, events=8)
    mm.own()
    for read in (lambda: mm.events(0), mm.events_snapshot):
        assert isinstance(in_a_thread(read), ConcurrentUse)
    for ask in (mm.stats, mm.check, lambda: mm.admits(1), lambda: mm.why([1] * 9)):
        assert in_a_thread(ask) is None


def test_another_thread_takes_over_by_owning_the_manager(scene: Scene) -> None:
    scene.mm.own()

    def take_over() -> None:
        scene.mm.own()
        scene.mm.open([1])

    assert in_a_thread(take_over) is None
    with pytest.raises(ConcurrentUse, match="thread 'intruder' owns the manager"):
        scene.mm.open([1])
    scene.mm.own()
    scene.mm.open([1])


def test_a_manager_is_not_taken_over_in_the_middle_of_a_call(scene: Scene) -> None:
    with call_under_way(scene.mm):
        assert isinstance(in_a_thread(scene.mm.own), ConcurrentUse)
    assert in_a_thread(scene.mm.own) is None


@pytest.mark.strict
def test_a_stale_handle_names_the_callers_that_opened_and_released_it() -> None:
    mm = MemoryManager(16, 4)

    def the_frontend() -> AddressSpace:
        return mm.open([1])

    def the_timeout(space: AddressSpace) -> None:
        space.release()

    space = the_frontend()
    the_timeout(space)
    with pytest.raises(
        DoubleRelease, match=r"last open at test_misuse.py:\d+ in the_frontend.*last release at .*in the_timeout <"
    ):
        space.release()
    mm.open([2])  # the asid goes to another space
    with pytest.raises(StaleHandle, match="in the_timeout"):
        mm.plan([space], [1])


@pytest.mark.strict
def test_a_broken_law_names_the_last_caller_of_the_frame() -> None:
    mm = MemoryManager(16, 4)

    def the_scheduler() -> None:
        space = mm.open()
        mm.plan([space], [5])

    the_scheduler()
    mm.state.frames["refs"][1] = 7
    with pytest.raises(
        InvariantViolation, match=r"I3 broken.*Frame 1: last plan of space 0 at .*in the_scheduler"
    ) as broken:
        mm.check()
    assert (broken.value.law, broken.value.frame) == ("I3", 1)


@pytest.mark.strict
def test_at_level_3_the_first_caller_owns_a_manager() -> None:
    mm = MemoryManager(16, 4)
    assert in_a_thread(lambda: mm.open([1])) is None
    with pytest.raises(ConcurrentUse, match="'intruder' owns"):
        mm.open([1])


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
    "advice of a list": lambda m, a: m.advise(a, ["demote"]),  # type: ignore[arg-type]
    "advice on a number": lambda m, a: m.advise(3, "demote"),  # type: ignore[arg-type]
    "advice on None": lambda m, a: m.advise(None, "retain", until=1.0),
    "retain without an end": lambda m, a: m.advise(a, "retain"),
    "pin without an end": lambda m, a: m.advise(a, "pin", until=None),
    "demote with an end": lambda m, a: m.advise(a, "demote", until=1.0),
    "retain until NaN": lambda m, a: m.advise(a, "retain", until=float("nan")),
    "advice at NaN": lambda m, a: m.advise(a, "demote", now=float("nan")),
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


RAISED = [
    errors.PagedKVError("it failed"),
    errors.InvalidRequest("it makes no sense"),
    errors.StaleHandle("space 3 was released"),
    errors.DoubleRelease("space 3 was released twice"),
    errors.PlanConflict("a plan is outstanding"),
    errors.EngineStopped("it was closed"),
    errors.ConcurrentUse("another thread is in"),
    errors.CheckpointError("config.json is missing"),
    errors.OutOfFrames(7, 1, 2, 3),
    errors.QuotaExceeded(b"acme", 7, 6, 5, 4),
    errors.QueueFull(9, 8),
    errors.EventsLost(3, 5),
    errors.KernelUnavailable("cuda", {"cuda": ["no GPU"]}),
    errors.InvariantViolation("frame 3", law="I1", frame=3),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_is_pickled_whole(error: errors.PagedKVError) -> None:
    error.add_note("in replica 3")
    for again in (*(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
        with pytest.raises(type(error)):
            raise again


def test_each_kind_of_error_is_tried() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds == {type(error) for error in RAISED}
