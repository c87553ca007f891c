"""Hints: prefixes that a caller will need again, held until a time that the caller names. The table of `advise`.

    retain    a soft hint. A plan that lacks frames takes the prefix, the one that is needed last first
    pin       a hard hint, which ends at its time and not before. `max_pinned` limits it, for a tenant with a hard quota
              to that share of the quota
    release   ends the hints on a prefix            demote    does so, and the pages are evicted before all others

A hint is a HELD row, as `MemoryManager.pin` makes it, with the Pin that names it. A recurrent state at the end of the
prefix is held, too. Retained prefixes share `share` of the pool; a frame of several counts once. Beyond that the prefix
that is needed last goes first, and a new one that is needed last of all is clipped.

No clock is read here: a hint ends at the first call whose `now` has reached its time. Without a soft hint no call costs
more than a look at an empty dict. O(pages of the prefix + hints) for each hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.core import state as st
from pagedkv.core.arguments import real
from pagedkv.core.handles import Pin
from pagedkv.core.recovery import Registry
from pagedkv.core.state import I32, I64, Records, State
from pagedkv.core.states.door import States
from pagedkv.core.tables import page_tables
from pagedkv.core.tenants import NONE
from pagedkv.errors import InvalidRequest, OutOfFrames, QuotaExceeded

ACTIONS: Final = ("retain", "pin", "demote", "prefetch", "release")

MOST: Final = 4096
"""Hints at once."""


@dataclass(slots=True)
class _Hint:
    """A hint. key: the last frame of the prefix, and whether the hint is soft. account: that of the space's tenant."""

    pin: Pin
    key: tuple[int, bool]
    until: float
    account: int


class Hints:
    """The hints of one manager. share, most_pinned: shares of the pool. registry: knows the pins by weak references."""

    def __init__(self, share: float, most_pinned: float, registry: Registry) -> None:
        self.share: float = share
        self.most_pinned: float = most_pinned
        self._registry = registry
        self.soft: dict[int, _Hint] = {}  # by row
        self.hard: dict[int, _Hint] = {}
        self._soonest = float("inf")  # no hint ends before
        self._counts: I64 | None = None  # [F], how many retained prefixes map each frame; None: to be counted again

    # -- the actions ---------------------------------------------------------------------------------------------------

    def expire(self, s: State, now: float) -> None:
        """End the hints whose time has come."""
        if now < self._soonest:
            return
        for hint in self._all():
            if hint.until <= now:
                self._end(s, hint)
        self._soonest = min((hint.until for hint in self._all()), default=float("inf"))

    def hold(self, s: State, states: States | None, asid: int, until: float, *, is_soft: bool) -> str:
        """Hold the published pages of a space until a time. The page table has an unused row. Return the answer."""
        pages = int(s.spaces["complete"][asid])
        frames = _frames(s, asid, pages)
        if not (frames[0] >= 0).any():
            return "missing"
        key, mine = (_last(frames), is_soft), set(frames[0].tolist())
        covered = [hint for hint in self._all() if hint.key[1] == is_soft and hint.key[0] in mine]
        for hint in covered:
            if hint.key == key:  # at least until then
                hint.until = max(hint.until, until)
                return "accepted"
        fit = self._fitting(s, frames, until) if is_soft else self._pinnable(s, asid, frames)
        if not (frames[0, :fit] >= 0).any() or not self._has_room(s):
            return "rejected"
        if states is None:
            row = int(page_tables.pin_space(s, asid, fit))
        else:
            with_state = self.may_hold_state(s, states, is_soft=is_soft)
            row = states.pin(s, asid, np.empty(0, np.int32), fit, with_state)
        pin = Pin(row, int(s.spaces["generation"][row]), int((frames[:, :fit] >= 0).sum()), "advise()", until)
        self._soonest = min(self._soonest, until)
        counts, self._counts = self._counted(s) if is_soft else self._counts, None  # an interrupt leaves None
        self._registry.add_pin(pin)
        hint = _Hint(pin, (_last(frames[:, :fit]), is_soft), until, _account(s, asid))
        (self.soft if is_soft else self.hard)[row] = hint
        if is_soft and counts is not None:
            counts[_mapped(frames[:, :fit])] += 1
        self._counts = counts
        for shorter in covered:
            if shorter.until <= until and fit == pages:
                self._end(s, shorter)
        return "accepted" if fit == pages else "clipped"

    def release(self, s: State, asid: int, *, hard: bool = True) -> str:
        """End the hints on exactly the prefix in the whole pages of a space, or up to the end of its last page."""
        pages = int(s.spaces["num_pages"][asid])
        ends = s.table[asid, max(0, min(pages, int(s.spaces["complete"][asid])) - 1) : pages].tolist()
        found = [hint for hint in self._all() if hint.key[0] in ends and (hard or hint.key[1])]
        for hint in found:
            self._end(s, hint)
        return "accepted" if found else "missing"

    # -- frames that a plan lacks --------------------------------------------------------------------------------------

    def freeable(self, s: State) -> I64:
        """int64 [accounts]: mapped frames of each account that only retained prefixes map; [1] if none is retained."""
        if not self.soft:
            return NONE
        return _by_account(s, _held_alone(s.frames, self._counted(s)))

    def relieve(self, s: State, states: States | None, lack: OutOfFrames, accounts: dict[bytes, int]) -> bool:
        """End the retained prefix that is needed last, if all of them have the frames that a plan lacks.

        Returns: whether the plan should be tried again
        """
        if not self.soft:
            return False
        account = accounts[lack.tenant] if isinstance(lack, QuotaExceeded) else None
        frames = self._states_alone(states) if lack.pool == "states" and states else self.freeable(s)
        is_fenced = s.reg[st.EPOCH] > s.reg[st.PASSED]  # frames are pending after they were released
        lacking = lack.shortfall - (lack.pending if is_fenced else 0)
        if not 0 < lacking <= (frames.sum() if account is None else frames[account]):
            return False
        self._end(s, max((h for h in self.soft.values() if account in (None, h.account)), key=_until))
        return True

    def clear(self, s: State, num_frames: int = 0) -> None:
        """End the retained prefixes that have a frame from `num_frames` on."""
        for hint in list(self.soft.values()):
            if not num_frames or self._rows_of(s, hint).max(initial=-1) >= num_frames:
                self._end(s, hint)

    def forget_ended(self, s: State) -> None:
        """Forget the hints that an interrupt ended in part. To be called before pins are recovered."""
        for hint in self._all():
            if not self._is_held(s, hint):
                self._end(s, hint)
        self._counts = None

    @property
    def pinned_softly(self) -> int:
        """int, frames: what retained prefixes add to the count of pinned frames. A frame counts once for each."""
        return sum(hint.pin.num_frames for hint in self.soft.values())

    # -- private -------------------------------------------------------------------------------------------------------

    def _all(self) -> list[_Hint]:
        return [*self.soft.values(), *self.hard.values()]

    def _most(self, s: State) -> int:
        return int(self.share * len(s.frames))

    def _has_room(self, s: State) -> bool:
        """Return whether there may be one more hint. Each takes a row, and `open` needs rows, too."""
        return len(self.soft) + len(self.hard) < min(MOST, st.MAX_SPACES // len(s.groups) // 4)

    def _fitting(self, s: State, frames: I32, until: float) -> int:
        """Return how many pages of a prefix fit the share of the pool, once those that are needed later have ended."""
        while True:
            counts = self._counted(s)
            fresh = ((frames >= 0) & (counts[frames] == 0)).sum(0)
            room = self._most(s) - np.count_nonzero(counts)
            later = [hint for hint in self.soft.values() if hint.until > until]
            if (fresh.sum() <= room and self._has_room(s)) or not later:
                return int(np.searchsorted(fresh.cumsum(), room, "right")) if room >= 0 else 0
            self._end(s, max(later, key=_until))

    def _pinnable(self, s: State, asid: int, frames: I32) -> int:
        """Return how many pages of a prefix pins may hold: of the pool, and of the quota of the space's tenant."""
        room = int(self.most_pinned * len(s.frames)) - int(s.reg[st.PINNED]) + self.pinned_softly
        account, blocks = _account(s, asid), st.account_registers(s.reg)
        if len(blocks) and (quota := int(blocks[account, st.HARD])) >= 0:
            own = sum(hint.pin.num_frames for hint in self.hard.values() if hint.account == account)
            room = min(room, int(self.most_pinned * quota) - own)
        return int(np.searchsorted((frames >= 0).sum(0).cumsum(), room, "right"))

    def may_hold_state(self, s: State, states: States, *, is_soft: bool = False) -> bool:
        """Return whether one more pin, or one more retained prefix, may hold a recurrent state."""
        held = states.pinned(s)
        soft = int(np.isin(held, list(self.soft)).sum())
        share, count = (self.share, soft) if is_soft else (self.most_pinned, len(held) - soft)
        return count < int(share * len(states.pool.frames))

    def _end(self, s: State, hint: _Hint) -> None:
        """End a hint. An interrupt leaves at most a hint without a row, which ends here a second time."""
        row, (_, is_soft) = hint.pin.asid, hint.key
        if self._is_held(s, hint):
            counts, self._counts = self._counted(s) if is_soft else self._counts, None
            frames = self._rows_of(s, hint)
            page_tables.unpin_row(s, row)
            if is_soft and counts is not None:
                counts[frames] -= 1
            self._counts = counts
        if self._registry.pins.get(row) is not None and self._registry.pin_of(row) is hint.pin:
            del self._registry.pins[row]
        (self.soft if is_soft else self.hard).pop(row, None)

    def _is_held(self, s: State, hint: _Hint) -> bool:
        row = s.spaces[hint.pin.asid]
        return bool(row["status"] == st.HELD and row["generation"] == hint.pin.generation)

    def _rows_of(self, s: State, hint: _Hint) -> I32:
        """Return the frames that a hint holds, in any order."""
        return _mapped(_frames(s, hint.pin.asid, int(s.spaces["num_pages"][hint.pin.asid])))

    def _counted(self, s: State) -> I64:
        """int64 [F]: how many retained prefixes map each frame."""
        if self._counts is None or len(self._counts) != len(s.frames):
            rows = [self._rows_of(s, hint) for hint in self.soft.values() if self._is_held(s, hint)]
            self._counts = np.bincount(np.concatenate([np.empty(0, np.int32), *rows]), minlength=len(s.frames))
        return self._counts

    def _states_alone(self, states: States) -> I64:
        """int64 [accounts]: frames of recurrent states that only retained prefixes hold."""
        pool, rows = states.pool, states.held.rows["state"][[row for row in self.soft if row < len(states.held.rows)]]
        return _by_account(pool, _held_alone(pool.frames, np.bincount(rows[rows >= 0], minlength=len(pool.frames))))


def action_of(action: object, until: object) -> tuple[str, float | None]:
    """Return an action and its time, checked. Raises: InvalidRequest"""
    if not isinstance(action, str) or action not in ACTIONS:
        raise InvalidRequest(f"action is {action!r}; give one of {', '.join(ACTIONS)}")
    end = None if until is None else real(until, "until")
    if (end is not None) != (action in ("retain", "pin")):
        raise InvalidRequest(
            f"{action} with until={until!r}; give retain and pin the time of their end, and no time to others"
        )
    return action, end


def _until(hint: _Hint) -> float:
    return hint.until


def _account(s: State, asid: int) -> int:
    return int(s.roots[s.spaces["root"][asid], st.CHARGED])


def _frames(s: State, asid: int, pages: int) -> I32:
    """int32 [groups, pages]: the frames of a row and of its companions, HOLE without one."""
    return s.table[asid : asid + len(s.groups), :pages].copy()


def _mapped(frames: I32) -> I32:
    return frames[frames >= 0]


def _last(frames: I32) -> int:
    """Return the last frame of group 0."""
    return int(_mapped(frames[0])[-1])


def _by_account(s: State, frames: I64) -> I64:
    return np.bincount(s.frames["account"][frames], minlength=max(1, len(st.account_registers(s.reg))))


def _held_alone(records: Records, counts: I64) -> I64:
    """Return the frames that nothing but `counts` rows maps, and that nothing reads. Shapes: counts int64 [F]"""
    held = np.flatnonzero(counts)
    alone: I64 = held[(records["refs"][held] == counts[held]) & (records["pins"][held] == 0)]
    return alone
