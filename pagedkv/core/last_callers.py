"""Owners: at PAGEDKV_DEBUG=3, who opened, planned and released each space and frame last, and from where. For error messages only.

Python objects for spaces and frames, a walk up the stack and over the pages for each call: that level is for finding a bug, not for speed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pagedkv.core.handles import AddressSpace, Plan
from pagedkv.core.state import HOLE, I32, UNUSED, State

_CORE: Final = str(Path(__file__).parent)
_DEPTH: Final = 4
_MADE: Final = ("open", "fork")
_ENDED: Final = ("release", "retire")


class LastCallers:
    """The last callers of one manager."""

    def __init__(self) -> None:
        self._spaces: dict[int, dict[str, str]] = {}  # asid: verb: where from
        self._frames: dict[int, str] = {}  # frame: by what, for whom, where from

    def before(self, s: State, verb: str, args: tuple[object, ...]) -> None:
        """`verb` is about to be called: what it ends is noted while it still has pages."""
        if verb in _ENDED:
            self._note(s, verb, [space.asid for space in _spaces_in(args) if _is_current(s, space)])

    def after(self, s: State, verb: str, args: tuple[object, ...], result: object) -> None:
        """`verb` was called."""
        if verb not in _ENDED:
            self._note(s, verb, _rows_in((result, *args) if verb not in _MADE else (result,)))

    def _note(self, s: State, verb: str, asids: Iterable[int]) -> None:
        where = _caller()
        for asid in asids:
            if verb in _MADE:  # whoever has a stale handle wants to know who ended it
                self._spaces[asid] = {ended: at for ended, at in self._spaces.get(asid, {}).items() if ended in _ENDED}
            self._spaces.setdefault(asid, {})[verb] = where
            if s.spaces["status"][asid] != UNUSED:
                for frame in s.table[asid : asid + len(s.groups), : s.spaces["num_pages"][asid]].reshape(-1).tolist():
                    if frame != HOLE:
                        self._frames[frame] = f"{verb} of space {asid} at {where}"

    def renumber(self, moves: I32, num_frames: int) -> None:
        """Frames moved, source to target (int32 [M, 2]), into a pool of `num_frames`."""
        moved = {target: self._frames.get(source) for source, target in moves.tolist()}
        held = {frame: told for frame, told in self._frames.items() if frame < num_frames and frame not in moved}
        self._frames = held | {frame: told for frame, told in moved.items() if told}

    def of_space(self, asid: int) -> str:
        """A sentence to append to an error; "" if nothing is known."""
        told = "; ".join(f"last {verb} at {where}" for verb, where in self._spaces.get(asid, {}).items())
        return f". Space {asid}: {told}" if told else ""

    def of_frame(self, frame: int) -> str:
        """A sentence to append to an error; "" if nothing is known."""
        return f". Frame {frame}: last {self._frames[frame]}" if frame in self._frames else ""


def _is_current(s: State, space: AddressSpace) -> bool:
    return space.asid < len(s.spaces) and bool(s.spaces["generation"][space.asid] == space.generation)


def _spaces_in(args: Iterable[object]) -> Iterator[AddressSpace]:
    for one in args:
        if isinstance(one, AddressSpace):
            yield one
        elif isinstance(one, list | tuple):
            yield from _spaces_in(one)


def _rows_in(args: Iterable[object]) -> list[int]:
    """The spaces that a call is about, from its result and arguments."""
    plans = [one for one in args if isinstance(one, Plan)]
    rows = [asid for plan in plans for asid in plan.rows.tolist()]
    return list(dict.fromkeys([*rows, *(space.asid for space in _spaces_in(args))]))


def _caller() -> str:
    """Who called, innermost first, leaving core itself out."""
    frame, told = sys._getframe(1), list[str]()
    while frame is not None and len(told) < _DEPTH:
        code = frame.f_code
        if not code.co_filename.startswith(_CORE):
            told.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(told)
