"""Recovery: keep a manager whole when a signal interrupts Python, or a handle is dropped.

**Interrupts.** Python runs signal handlers between two of its instructions, so any line may raise KeyboardInterrupt. No
handler runs inside a compiled function, as long as it takes and returns arrays and ints: its whole change is made, or
none of it. So each change of the state is one compiled call, or one assignment of a new State. `assign_together` is one
call for several attributes. A handle, which Python notes beside the state, may then be missing; it is never wrong:

    interrupted              the state                          afterwards
    before the compiled call as before                          nothing to do
    after it                 a space, plan or pin is there      no handle names it: recover() gives it back
    while a plan is settled  the plan's own status says so      commit or abort a second time is refused

**Dropped handles.** A registry knows each handle by a weak reference. The finaliser is a C function, which appends the
reference to a list: a finaliser in Python would swallow an interrupt. The next call that opens something warns
(ResourceWarning). `recover` aborts plans, closes spaces and unpins frames that no living handle names. Spaces of
`detach` are left alone.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from itertools import starmap
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np

from pagedkv import debug
from pagedkv.core import state as st
from pagedkv.core.handles import AddressSpace, Pin, Plan, Step
from pagedkv.core.last_callers import call_site
from pagedkv.core.state import State
from pagedkv.core.tables import page_tables, steps

Assignment = tuple[object, str, object]
"""An object, the name of one of its attributes, and its new value."""

Abort = Callable[[Step, bool], tuple[int, int]]

Handle = TypeVar("Handle", AddressSpace, Plan, Pin)


def assign_together(assignments: Iterable[Assignment]) -> None:
    """Set several attributes in one call of C functions, which no signal handler can interrupt."""
    deque(starmap(setattr, tuple(assignments)), maxlen=0)


class Recovered(NamedTuple):
    """The result of `recover`: how many plans it aborted, spaces it closed and pins it gave back."""

    plans: int
    spaces: int
    pins: int


class Registry:
    """The handles that a manager gave out, by weak references.

    spaces: the handle of each open space by asid, or the generation of a detached one; of closed spaces entries may be
            left. plans: the plans that are not settled yet, by number, in order. pins: the pin of each row that holds
            pinned frames.
    """

    def __init__(self) -> None:
        self.spaces: dict[int, ref[AddressSpace] | int] = {}
        self.plans: dict[int, tuple[ref[Plan], Step]] = {}
        self.pins: dict[int, ref[Pin]] = {}
        self._num_plans = 0
        self._lost: deque[ref[Any]] = deque()  # of handles that were collected before they were given back
        self._sites: dict[int, str] = {}  # by the id of the reference to a handle, where it was opened
        self._names_openers = debug.level() >= 1

    def add_space(self, space: AddressSpace) -> AddressSpace:
        """Note and return the handle of a space that was just opened."""
        self.spaces[space.asid] = self._watch(space)
        return space

    def add_plan(self, plan: Plan, step: Step) -> Plan:
        """Note and return the plan of a step whose frames are not mapped yet. Modifies: its number."""
        number = self._num_plans
        self._num_plans = number + 1
        plan.number = number
        self.plans[number] = self._watch(plan), step
        return plan

    def add_pin(self, pin: Pin) -> Pin:
        """Note and return a pin."""
        self.pins[pin.asid] = self._watch(pin)
        return pin

    def pin_of(self, row: int) -> Pin | None:
        """Return the pin whose frames a row holds; None if the pin was collected."""
        return pin() if (pin := self.pins.get(row)) else None

    def is_detached(self, s: State, asid: int) -> bool:
        """Return whether `asid` is an open space that was left without a handle."""
        generation = self.spaces.get(asid)
        return (
            isinstance(generation, int)
            and 0 <= asid < len(s.spaces)
            and bool(s.spaces["status"][asid] == st.OPEN and s.spaces["generation"][asid] == generation)
        )

    def _watch(self, handle: Handle) -> ref[Handle]:
        """Return a reference that is added to `_lost` if the handle is collected before the reference is dropped."""
        watch = ref(handle, self._lost.append)
        if self._names_openers:
            if len(self._sites) > 64 + 2 * (len(self.spaces) + len(self.plans) + len(self.pins)):
                self._forget_sites()
            self._sites[id(watch)] = call_site(1)
        return watch

    def _forget_sites(self) -> None:
        """Drop the records of handles that were given back."""
        everything = (*self.spaces.values(), *(plan for plan, _ in self.plans.values()), *self.pins.values())
        self._sites = {site: self._sites[site] for site in map(id, everything) if site in self._sites}

    # -- handles that were dropped -------------------------------------------------------------------------------------

    def report_lost(self, s: State) -> None:
        """Warn of each handle that was collected. To be called before anything changes: a warning may be an error."""
        if self._lost:
            self._warn(self._losses(s))

    def _losses(self, s: State) -> list[str]:
        """Return a text for each handle that was collected, while what it names is still there. Modifies: _lost."""
        losses: list[str] = []
        while self._lost:
            watch = self._lost.popleft()
            if loss := self._loss_of(s, watch):
                site = self._sites.get(id(watch))
                losses.append(f"{loss}; {f'opened at {site}' if site else 'PAGEDKV_DEBUG=1 says where it was opened'}")
        return losses

    @staticmethod
    def _warn(losses: list[str]) -> None:
        for loss in losses:
            warnings.warn(f"{loss}. recover() gives its frames back", ResourceWarning, 5)

    def _loss_of(self, s: State, watch: ref[Any]) -> str:
        status = s.spaces["status"]
        for asid, handle in self.spaces.items():
            if handle is watch and status[asid] == st.OPEN:
                return f"address space {asid} was dropped before release()"
        for plan, step in self.plans.values():
            if plan is watch and step.is_outstanding:
                return f"a plan of {len(step.rows)} sequences was dropped before commit() or abort()"
        for row, pin in self.pins.items():
            if pin is watch and status[row] == st.HELD:
                return f"a pin by row {row} was dropped before unpin()"
        return ""

    def recover(self, s: State, abort: Abort) -> Recovered:
        """Abort the plans, close the spaces and unpin the frames that no living handle names. Return how many.

        abort: a function of a step and whether its copies were made, which returns a code of tables/steps.py.
        """
        losses = self._losses(s)
        recovered = Recovered(self._abort_lost_plans(abort), self._close_lost_spaces(s), self._unpin_lost_frames(s))
        self._forget_sites()
        self._warn(losses)  # last: a filter may make errors of warnings
        return recovered

    def _abort_lost_plans(self, abort: Abort) -> int:
        aborted = 0
        for number, (plan, step) in reversed(list(self.plans.items())):
            if step.is_outstanding and plan() is None:
                code, _ = abort(step, False)
                aborted += code == steps.OK
            if not step.is_outstanding:
                del self.plans[number]
        return aborted

    def _close_lost_spaces(self, s: State) -> int:
        closed, num_groups = 0, len(s.groups)
        for asid in (np.flatnonzero(s.spaces["status"][::num_groups] == st.OPEN) * num_groups).tolist():
            handle, generation = self.spaces.get(asid), int(s.spaces["generation"][asid])
            space = handle() if isinstance(handle, ref) else None
            if handle != generation and (space is None or space.generation != generation):
                page_tables.release_space(s, asid)
                self.spaces.pop(asid, None)
                closed += 1
        return closed

    def _unpin_lost_frames(self, s: State) -> int:
        unpinned, num_groups = 0, len(s.groups)
        for row in (np.flatnonzero(s.spaces["status"][::num_groups] == st.HELD) * num_groups).tolist():
            pin, generation = self.pin_of(row), int(s.spaces["generation"][row])
            if pin is None or pin.generation != generation:
                page_tables.unpin_row(s, row)
                self.pins.pop(row, None)
                unpinned += 1
        return unpinned
