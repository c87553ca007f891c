"""An interrupt at any instruction of a call leaves a manager, or a frame pool, that `recover` makes whole."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest

from pagedkv.core import AddressSpace, FramePool, Group, MemoryManager, Pin, Plan, StatePool
from pagedkv.core.prefix.events import Event, EventLog
from pagedkv.core.state import EPOCH
from pagedkv.errors import ConcurrentUse, InvalidRequest, PlanConflict
from tests.core.frame_pool.oracle import key
from tests.core.interrupts.concurrency import at_once, call_under_way
from tests.core.oracle import grown
from tests.interrupts import count_instructions, interrupted

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

MANAGERS: dict[str, dict[str, Any]] = {
    "observed": {"events": 256, "policy": "2q"},
    "groups": {"groups": (Group(), Group(window=40))},
    "states": {"groups": (Group(), Group(window=40)), "states": StatePool(16)},
}


@dataclass
class Engine:
    """A caller that behaves as an engine should: it keeps its handles, and aborts its plan after an exception."""

    mm: MemoryManager
    spaces: list[AddressSpace] = field(default_factory=list)
    plan: Plan | None = None
    pins: list[Pin] = field(default_factory=list)

    @classmethod
    def new(cls, kind: str) -> Engine:
        mm = MemoryManager(64, 4, **MANAGERS[kind])
        return cls(mm, [grown(mm, list(range(9))), grown(mm, list(range(20, 27)))])

    def step(self, counts: list[int], accepted: list[int] | None = None) -> None:
        try:
            self.plan = self.mm.plan(self.spaces, counts)
            kept = counts if accepted is None else accepted
            self.mm.commit(self.plan, self.tokens(kept), accepted)
        except BaseException:
            if self.plan is not None and not self.plan.settled:
                self.mm.abort(self.plan)
            raise
        finally:
            self.plan = None

    def tokens(self, counts: list[int]) -> list[int]:
        """Return tokens for a step: those that are known, which are computed again for their state, and new ones."""
        known = [space.token_ids[space.ready :].tolist() for space in self.spaces]
        return [token for row, n in zip(known, counts, strict=True) for token in [*row[:n], *range(n - len(row))]]

    def step_in_parts(self, counts: list[int], kept: list[int]) -> None:
        plan = self.mm.plan(self.spaces, counts)
        try:
            self.mm.commit(plan, list(range(sum(kept))), kept, keep_planned=True)
            self.mm.commit(plan, list(range(sum(counts) - sum(kept))))
        except BaseException:
            if not plan.settled:
                self.mm.abort(plan)
            raise

    def need_retained(self) -> None:
        """Plan for a sequence that needs all frames, also those of a retained prefix."""
        self.mm.advise(self.spaces[0], "retain", until=9.0)
        self.spaces.pop(0).release()
        self.spaces.append(self.mm.open([7]))
        self.plan = self.mm.plan(self.spaces[-1:], [self.mm.available // len(self.mm.groups) * self.mm.block_size])
        assert not self.mm._hints.soft
        self.mm.abort(self.plan)

    def end(self) -> None:
        """Give everything back, and show that the pool is whole."""
        self.plan = None
        self.mm.recover()
        self.mm.check()
        self.mm.advise(None, "release", now=10.0)
        for pin in self.pins:
            if self.mm.holds(pin):
                self.mm.unpin(pin)
        for space in self.spaces:
            if not self.mm.is_stale(space):
                self.step_alone(space)
                space.release()
        epoch = int(self.mm.state.reg[EPOCH]) + 1
        self.mm.retire(epoch)
        self.mm.advance(epoch)
        self.mm.check()
        now = self.mm.stats()
        assert (now.spaces, now.mapped, now.retired, now.pinned) == (0, 0, 0, 0)
        assert now.states is None or now.states.mapped == 0
        assert self.mm.recover() == (0, 0, 0)
        if self.is_observed:
            assert self.mm.events(0) == events_read_once(self.mm)

    @property
    def is_observed(self) -> bool:
        """True if the manager keeps events."""
        return len(self.mm.state.log) > 0

    def restore(self) -> None:
        with self.mm.restoring():
            grown(self.mm, list(range(40, 53))).release()

    def step_alone(self, space: AddressSpace) -> None:
        self.mm.commit(self.mm.plan([space], [1]), [*space.token_ids[space.ready :][:1], 7][:1])


def events_read_once(mm: MemoryManager) -> list[Event]:
    """Return all events as a reader sees them who has read none before."""
    log = EventLog()
    log._roots = mm._log._roots
    return log.events(mm.state, 0)


CALLS: dict[str, Callable[[Engine], Any]] = {
    "open": lambda e: e.spaces.append(e.mm.open(list(range(8)), tenant=b"new")),
    "open of a prefix": lambda e: e.spaces.append(e.mm.open(list(range(12)))),
    "open of a batch": lambda e: e.spaces.extend(e.mm.open_batch([list(range(12)), [4]], salt=[b"", b"s"]).spaces),
    "reorder": lambda e: setattr(e, "spaces", e.mm.reorder(e.spaces, [1, 1, 1])),
    "fork": lambda e: e.spaces.append(e.spaces[0].fork()),
    "decode step": lambda e: e.step([1, 1]),
    "prefill step": lambda e: e.step([30, 2]),
    "rejected drafts": lambda e: e.step([6, 2], [1, 0]),
    "part of a plan": lambda e: e.step_in_parts([6, 2], [1, 0]),
    "plan and abort": lambda e: e.mm.abort(e.mm.plan(e.spaces, [3, 5])),
    "copied abort": lambda e: (e.spaces.append(e.spaces[0].fork()), e.mm.abort(e.mm.plan(e.spaces, [1, 1, 1]))),
    "truncate": lambda e: e.spaces[0].truncate(5),
    "release": lambda e: e.spaces[0].release(),
    "pin": lambda e: e.pins.append(e.mm.pin(e.spaces[0])),
    "pin of frames": lambda e: e.pins.append(e.mm.pin(e.spaces[0].pages[:1])),
    "unpin": lambda e: e.mm.unpin(e.mm.pin(e.spaces[0])),
    "retire": lambda e: e.mm.retire(5, e.spaces[:1]),
    "advance": lambda e: (e.mm.retire(5, e.spaces[:1]), e.mm.advance(5)),
    "retain": lambda e: e.mm.advise(e.spaces[0], "retain", until=9.0),
    "retain and need the frames": lambda e: e.need_retained(),
    "retain until then": lambda e: (
        e.mm.advise(e.spaces[0], "retain", until=9.0),
        e.mm.advise(None, "release", now=9.0),
    ),
    "pin and release": lambda e: (e.mm.advise(e.spaces[0], "pin", until=9.0), e.mm.advise(e.spaces[0], "release")),
    "evict": lambda e: (e.spaces[0].release(), e.mm.evict(1)),
    "resize": lambda e: (e.mm.resize(80), e.mm.resize(20)),
    "forget": lambda e: e.mm.forget(),
    "quota": lambda e: e.mm.set_quota(b"new", hard=9, protected=2),
    "detach": lambda e: e.spaces.append(e.mm.attach(e.spaces[0].detach())),
    "restoring": lambda e: e.restore(),
    "events": lambda e: e.mm.events(0),
    "snapshot": lambda e: e.mm.events_snapshot(),
    "page changes": lambda e: e.mm.page_changes(0),
}
OF_EVENTS = ("events", "snapshot", "page changes")
WITHOUT = {(kind, call) for kind in ("groups", "states") for call in OF_EVENTS} | {("states", "part of a plan")}


@pytest.mark.parametrize("kind", MANAGERS)
@pytest.mark.parametrize("at_most", [5, pytest.param(10**9, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.many_steps  # at level 3 nine of ten instructions are those of check(), which only reads
def test_no_instruction_of_a_call_is_a_wrong_place_for_an_interrupt(call: str, kind: str, at_most: int) -> None:
    if (kind, call) in WITHOUT:
        pytest.skip("this manager keeps no events, or its steps are committed at once")
    CALLS[call](Engine.new(kind))  # compiles what is not compiled yet
    gc.collect()
    engine = Engine.new(kind)
    total = count_instructions(lambda: CALLS[call](engine))
    for at in range(1, total + 1, max(1, total // at_most)):
        engine = Engine.new(kind)
        where = interrupted(at, lambda engine=engine: CALLS[call](engine))
        try:
            engine.end()
        except Exception as error:
            raise AssertionError(f"after an interrupt at {where}: {error}") from error


def life_of_a_pool(pool: FramePool) -> None:
    """Make each call that changes the pool."""
    taken = pool.take(3).tolist()
    pool.publish(taken, [key(number) for number in range(3)])
    pool.share([taken[0]])
    pool.set_quota(b"acme", hard=4)
    pool.drop([pool.take_one(tenant=b"acme")], last=True)
    pool.drop(taken[:2])
    pool.retire(3)
    pool.advance(3)
    pool.victims(2)
    pool.evict(1)
    pool.forget()


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.many_steps
def test_no_instruction_of_a_frame_pool_is_a_wrong_place_for_an_interrupt(step: int) -> None:
    life_of_a_pool(FramePool(8, key_bytes=8))  # compiles what is not compiled yet
    total = count_instructions(lambda: life_of_a_pool(FramePool(8, key_bytes=8)))
    for at in range(1, total + 1, step):
        pool = FramePool(8, key_bytes=8)
        where = interrupted(at, lambda pool=pool: life_of_a_pool(pool))
        try:
            pool.check()
            pool.recover(np.zeros(8, np.int64))
            pool.retire(9)
            pool.advance(9)
            pool.forget()
            pool.set_quota(b"acme", hard=8)
            pool.check()
            assert pool.take(8, tenant=b"acme").shape == (8,)
        except Exception as error:
            raise AssertionError(f"after an interrupt at {where}: {error}") from error


def test_recover_ends_a_restoring_whose_traceback_is_kept() -> None:
    mm = MemoryManager(64, 4, groups=(Group(window=4),))
    kept = mm.restoring()
    kept.__enter__()
    mm.recover()
    space = grown(mm, list(range(13)))
    assert (space.pages == -1).any()


def test_a_call_that_a_signal_interrupted_does_not_lock_the_manager(mm: MemoryManager) -> None:
    mm._calls[0] = [0]  # of a thread that has ended
    mm.open([1])
    mm._calls[0] = [threading.get_ident()]
    mm.open([1])
    mm._calls[0] = [threading.get_ident()]
    with call_under_way(mm):
        with pytest.raises(ConcurrentUse):
            mm.open([1])
        with pytest.raises(ConcurrentUse):
            mm.own()
    assert not mm._calls


def test_threads_that_follow_an_interrupted_call_enter_one_at_a_time() -> None:
    """Stale calls are planted all the time, as if each call were interrupted at its end."""
    mm, inside, most, served = MemoryManager(16, 4), [0], [0], [0]
    mm.disown()  # at PAGEDKV_DEBUG=3 the first caller would own it

    class Counting:
        def __array__(self, *_: Any, **__: Any) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            served[0] += 1
            return np.zeros(1, np.int32)

    def work() -> None:
        for _ in range(100):
            try:
                mm.open(Counting()).release()  # type: ignore[arg-type]
            except ConcurrentUse:
                mm._calls.setdefault(0, [threading.get_ident()])

    at_once(*[work] * 4)
    assert most == [1]
    assert served[0] > 0
    mm.recover()
    mm.check()


def test_a_plan_is_settled_once_whatever_its_attributes_say(mm: MemoryManager) -> None:
    space = mm.open()
    plan = mm.plan([space], [6])
    mm.commit(plan, range(6))  # type: ignore[arg-type]
    for settle in (lambda: mm.abort(plan), lambda: mm.commit(plan, list(range(6)))):
        with pytest.raises(PlanConflict, match="this plan was committed already"):
            settle()
    assert len(space) == 6
    mm.check()
    assert mm.recover() == (0, 0, 0)


def test_only_the_manager_writes_page_tables(mm: MemoryManager) -> None:
    plan = mm.plan([mm.open()], [6])
    with pytest.raises(ValueError, match="read-only"):
        plan.block_table[0, 0] = 9
    assert plan.block_table.base is not None
    assert (plan.block_table == mm.state.table).all()
    mm.abort(plan)


def test_a_warning_that_is_an_error_changes_nothing(mm: MemoryManager) -> None:
    kept = grown(mm, [1, 2, 3, 4, 5])
    for call in (mm.open, kept.fork, lambda: mm.pin(kept), lambda: mm.plan([kept], [1])):
        mm.open()  # dropped
        before = mm.stats().spaces
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ResourceWarning, match="was dropped before release"):
                call()
        assert mm.stats().spaces == before
        assert mm.recover() == (0, 1, 0)
    assert mm.stats().spaces == 1


LOST = ["address space 1", "a plan of 1 sequences", "a pin by row 4", "a pin by row 5"]


def test_recover_gives_back_what_no_handle_names_and_nothing_else(mm: MemoryManager) -> None:
    kept, lost, detached = grown(mm, [1, 2, 3, 4, 5]), mm.open(), grown(mm, [7, 8]).detach()
    lost_plan, pins = mm.plan([lost], [5]), [mm.pin(kept), mm.pin(kept, owner="disk", deadline=3.0), mm.pin(kept)]
    plan = mm.plan([kept], [1])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        del lost, lost_plan
        pins.pop(), pins.pop()
        mm.open().release()  # the next call that opens something warns
    texts = [str(warning.message) for warning in seen]
    assert [warning.category for warning in seen] == [ResourceWarning] * 4, texts
    assert sorted(text.split(" was dropped")[0] for text in texts) == sorted(LOST)
    assert all("opened at test_interrupts.py:" in text for text in texts), texts
    assert mm.recover() == (1, 1, 2)
    mm.check()
    assert mm.recover() == (0, 0, 0)
    mm.unpin(pins[0])
    mm.commit(plan, [6])
    kept.release()
    back = mm.attach(detached)
    assert back.token_ids.tolist() == [7, 8]
    for wrong in (detached, 15, -1, 99):  # it has a handle now; no space; no row
        with pytest.raises(InvalidRequest, match=f"attach to address space {wrong}"):
            mm.attach(wrong)
    back.release()
    assert mm.stats().spaces == 0


@pytest.mark.parametrize("kind", MANAGERS)
def test_compiled_functions_that_change_the_state_run_no_python(kind: str) -> None:
    """A signal handler runs between two instructions of Python: inside of such a call there is none."""
    ran: set[tuple[str, str]] = set()

    def look(frame: FrameType, event: str, arg: object) -> None:
        caller = frame.f_back
        if event == "call" and caller and "numba" in frame.f_code.co_filename and _is_ours(caller):
            ran.add((caller.f_code.co_name, frame.f_code.co_name))

    for name, call in CALLS.items():
        if (kind, name) in WITHOUT:
            continue
        call(Engine.new(kind))
        engine = Engine.new(kind)
        sys.setprofile(look)
        try:
            call(engine)
        finally:
            sys.setprofile(None)
    assert ran <= {("_closure", "_numba_unpickle")}  # prefix_closure returns an array, and changes nothing


def _is_ours(frame: FrameType) -> bool:
    return "numba" not in frame.f_code.co_filename
