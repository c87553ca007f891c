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
from collections.abc import Iterable
from itertools import starmap
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import numpy as np

from pagedkv import debug
from pagedkv.core import state as st
from pagedkv.core.handles import AddressSpace, Manager, Pin, Plan, Step
from pagedkv.core.last_callers import call_site
from pagedkv.core.observation import ObservationMixin
from pagedkv.core.tables import page_tables, steps
from pagedkv.core.thread_guard import exclusive
from pagedkv.errors import InvalidRequest

Assignment = tuple[object, str, object]
"""An object, the name of one of its attributes, and its new value."""


Handle = TypeVar("Handle", AddressSpace, Plan, Pin)


def assign_together(assignments: Iterable[Assignment]) -> None:
    """Set several attributes in one call of C functions, which no signal handler can interrupt."""
    deque(starmap(setattr, tuple(assignments)), maxlen=0)


class Recovered(NamedTuple):
    """The result of `recover`: how many plans it aborted, spaces it closed and pins it gave back."""

    plans: int
    spaces: int
    pins: int


class RecoveryMixin(ObservationMixin, Manager):
    """The registry of the handles of a manager, and `recover`."""

    def _begin_recovery(self) -> None:
        # the handle of each open space by asid, or the generation of a detached one; entries of closed spaces are stale
        self._handles: dict[int, ref[AddressSpace] | int] = {}
        self._plans: dict[int, tuple[ref[Plan], Step]] = {}  # the plans that are not settled yet, in order
        self._num_plans = 0
        self._lost: deque[ref[Any]] = (
            deque()
        )  # the references to handles that were collected before they were given back
        self._sites: dict[int, str] = {}  # by the id of the reference to a handle, where it was opened
        self._pins: dict[int, ref[Pin]] = {}  # the pin of each row that holds pinned frames
        self._names_openers = debug.level() >= 1

    def _opened(self, asid: int, generation: int) -> AddressSpace:
        """Return the handle of a space that was just opened."""
        space = AddressSpace(self, asid, generation)
        self._handles[asid] = self._watch(space)
        return space

    def _new_plan(self, step: Step) -> Plan:
        """Return the handle of a step, known to `recover` before its frames are mapped."""
        self._report_lost()
        plan, number = Plan(self, step), self._num_plans
        self._num_plans = number + 1
        plan.number = number
        self._plans[number] = self._watch(plan), step
        return plan

    def _watch(self, handle: Handle) -> ref[Handle]:
        """Return a reference that is added to `_lost` if the handle is collected before the reference is dropped."""
        watch = ref(handle, self._lost.append)
        if self._names_openers:
            if len(self._sites) > 64 + 2 * (len(self._handles) + len(self._plans) + len(self._pins)):
                self._forget_sites()
            self._sites[id(watch)] = call_site(1)
        return watch

    def _forget_sites(self) -> None:
        """Drop the records of handles that were given back."""
        everything = (*self._handles.values(), *(plan for plan, _ in self._plans.values()), *self._pins.values())
        self._sites = {site: self._sites[site] for site in map(id, everything) if site in self._sites}

    def _report_lost(self) -> None:
        """Warn of each handle that was collected. To be called before anything changes: a warning may be an error."""
        if self._lost:
            self._warn(self._losses())

    def _losses(self) -> list[str]:
        """Return a text for each handle that was collected, while what it names is still there. Modifies: _lost."""
        losses: list[str] = []
        while self._lost:
            watch = self._lost.popleft()
            if loss := self._loss_of(watch):
                site = self._sites.get(id(watch))
                losses.append(f"{loss}; {f'opened at {site}' if site else 'PAGEDKV_DEBUG=1 says where it was opened'}")
        return losses

    def _warn(self, losses: list[str]) -> None:
        for loss in losses:
            warnings.warn(f"{loss}. recover() gives its frames back", ResourceWarning, 5)

    def _loss_of(self, watch: ref[Any]) -> str:
        status = self.state.spaces["status"]
        for asid, handle in self._handles.items():
            if handle is watch and status[asid] == st.OPEN:
                return f"address space {asid} was dropped before release()"
        for plan, step in self._plans.values():
            if plan is watch and step.is_outstanding:
                return f"a plan of {len(step.rows)} sequences was dropped before commit() or abort()"
        for row, pin in self._pins.items():
            if pin is watch and status[row] == st.HELD:
                return f"a pin by row {row} was dropped before unpin()"
        return ""

    @exclusive
    def detach(self, space: AddressSpace) -> None:
        """See AddressSpace.detach."""
        self.length_of(space)  # raises for a stale handle
        self._handles[space.asid] = space.generation

    @exclusive
    def attach(self, asid: int) -> AddressSpace:
        """Return a handle of the open space `asid`, which `detach` left without one.

        Raises: InvalidRequest if no detached space has this number
        """
        generation = self._handles.get(asid)
        if not isinstance(generation, int) or not self._is_open(asid, generation):
            raise InvalidRequest(f"attach to address space {asid!r}; give an asid that AddressSpace.detach() returned")
        return self._opened(asid, generation)

    @exclusive
    def recover(self) -> Recovered:
        """Give back what no handle names: after an interrupt, or when handles were dropped.

        Plans whose handle was collected are aborted, newest first; such spaces are closed and such pins given back.
        A plan that a newer, living plan follows stays until the newer one is settled. Handles are collected with the
        exception whose traceback holds them, so call this outside of `except`. O(rows of the page table).
        Returns: how many of each
        """
        losses, self._restoring = self._losses(), None  # of a context that an interrupt ended
        recovered = Recovered(self._abort_lost_plans(), self._close_lost_spaces(), self._unpin_lost_frames())
        self._forget_sites()
        self._warn(losses)  # last: a filter may make errors of warnings
        return recovered

    def _abort_lost_plans(self) -> int:
        aborted = 0
        for number, (plan, step) in reversed(list(self._plans.items())):
            if step.is_outstanding and plan() is None:
                code, _ = steps.abort_step(self.state, step.rows, step.longs, step.ints, False)
                aborted += code == steps.OK
            if not step.is_outstanding:
                del self._plans[number]
        return aborted

    def _close_lost_spaces(self) -> int:
        closed, num_groups = 0, len(self.groups)
        for asid in (np.flatnonzero(self.state.spaces["status"][::num_groups] == st.OPEN) * num_groups).tolist():
            handle, generation = self._handles.get(asid), int(self.state.spaces["generation"][asid])
            space = handle() if isinstance(handle, ref) else None
            if handle != generation and (space is None or space.generation != generation):
                page_tables.release_space(self.state, asid)
                self._handles.pop(asid, None)
                closed += 1
        return closed

    def _unpin_lost_frames(self) -> int:
        unpinned, num_groups = 0, len(self.groups)
        for row in (np.flatnonzero(self.state.spaces["status"][::num_groups] == st.HELD) * num_groups).tolist():
            pin, generation = self._pin_of(row), int(self.state.spaces["generation"][row])
            if pin is None or pin.generation != generation:
                page_tables.unpin_row(self.state, row)
                self._pins.pop(row, None)
                unpinned += 1
        return unpinned

    @property
    def has_plans(self) -> bool:
        """True while a plan is outstanding."""
        return any(step.is_outstanding for _, step in self._plans.values())

    def holds(self, pin: Pin) -> bool:
        """Return True if the frames of `pin` are pinned by it."""
        is_current = self._pin_of(pin.asid) is pin and self.state.spaces["status"][pin.asid] == st.HELD
        return bool(is_current and self.state.spaces["generation"][pin.asid] == pin.generation)

    def _pin_of(self, row: int) -> Pin | None:
        """Return the pin whose frames a row holds; None if the pin was collected."""
        return pin() if (pin := self._pins.get(row)) else None

    def _is_open(self, asid: int, generation: int) -> bool:
        spaces = self.state.spaces
        return (
            0 <= asid < len(spaces) and spaces["status"][asid] == st.OPEN and spaces["generation"][asid] == generation
        )
