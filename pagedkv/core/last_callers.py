"""Last callers: a debug record of the calls that last used each space and frame, kept at PAGEDKV_DEBUG=3.

Error messages quote the record. Each call costs a walk up the stack and over the pages, and Python objects for spaces
and frames. Level 3 is for finding a bug, not for speed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pagedkv.core.handles import AddressSpace, Plan
from pagedkv.core.state import HOLE, I32, UNUSED, State

_INSIDE: Final = tuple(str(Path(__file__).parents[1] / folder) for folder in ("core", "cache"))
_OPENING: Final = ("open", "open_batch", "fork")
_CLOSING: Final = ("release", "retire")


class LastCallers:
    """The record of one manager."""

    def __init__(self) -> None:
        self._spaces: dict[int, dict[str, str]] = {}  # asid: verb: call site
        self._frames: dict[int, str] = {}  # frame: verb, space and call site

    def before(self, s: State, verb: str, args: tuple[object, ...]) -> None:
        """Record a call of `verb` that closes spaces, before it runs: the spaces still have their pages."""
        if verb in _CLOSING:
            self._note(s, verb, [space.asid for space in _spaces_in(args) if _is_current(s, space)])

    def after(self, s: State, verb: str, args: tuple[object, ...], result: object) -> None:
        """Record a call of any other `verb`, after it has run."""
        if verb not in _CLOSING:
            self._note(s, verb, _rows_in((result, *args) if verb not in _OPENING else (result,)))

    def _note(self, s: State, verb: str, asids: Iterable[int]) -> None:
        site = call_site(4)
        for asid in asids:
            if verb in _OPENING:  # keep the closing calls: the error about a stale handle quotes them
                history = self._spaces.get(asid, {})
                self._spaces[asid] = {closing: at for closing, at in history.items() if closing in _CLOSING}
            self._spaces.setdefault(asid, {})[verb] = site
            if s.spaces["status"][asid] != UNUSED:
                for frame in s.table[asid : asid + len(s.groups), : s.spaces["num_pages"][asid]].reshape(-1).tolist():
                    if frame != HOLE:
                        self._frames[frame] = f"{verb} of space {asid} at {site}"

    def renumber(self, moves: I32, num_frames: int) -> None:
        """Rename the frames that moved, source to target (int32 [M, 2]), into a pool of `num_frames`."""
        moved = {target: self._frames.get(source) for source, target in moves.tolist()}
        stayed = {frame: call for frame, call in self._frames.items() if frame < num_frames and frame not in moved}
        self._frames = stayed | {frame: call for frame, call in moved.items() if call}

    def of_space(self, asid: int) -> str:
        """Return a sentence about a space, to be appended to an error; "" without a record of it."""
        calls = "; ".join(f"last {verb} at {site}" for verb, site in self._spaces.get(asid, {}).items())
        return f". Space {asid}: {calls}" if calls else ""

    def of_frame(self, frame: int) -> str:
        """Return a sentence about a frame, to be appended to an error; "" without a record of it."""
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
    """Return the asids that a call names in its arguments and result (`args`)."""
    plans = [one for one in args if isinstance(one, Plan)]
    rows = [asid for plan in plans for asid in plan.rows.tolist()]
    return list(dict.fromkeys([*rows, *(space.asid for space in _spaces_in(args))]))


def call_site(depth: int) -> str:
    """Return the innermost `depth` lines of the Python stack that are outside of core and cache, innermost first."""
    frame, lines = sys._getframe(1), list[str]()
    while frame is not None and len(lines) < depth:
        code = frame.f_code
        if not code.co_filename.startswith(_INSIDE):
            lines.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(lines)
