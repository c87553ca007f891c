"""Misuse is caught at the call, with numbers and a remedy; it changes nothing. Errors of level 3 name callers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from pagedkv.core import AddressSpace, MemoryManager, Plan
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
