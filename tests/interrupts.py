"""Interrupts on purpose: KeyboardInterrupt at a chosen instruction of the package, as if a signal handler raised it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pagedkv

_PACKAGE = str(Path(pagedkv.__file__).parent)


class Interrupter:
    """Counts the instructions of the package that run, and raises KeyboardInterrupt before the one with number `at`."""

    def __init__(self, at: int | None = None) -> None:
        self.count, self.at = 0, at

    def run(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`. Raises KeyboardInterrupt from inside of it if it has so many instructions."""
        sys.settrace(self._enter)
        try:
            return work()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt(f"instruction {self.at}, {where}")
        return self._step


def interrupted(at: int, work: Callable[[], Any]) -> str:
    """Run `work` up to its instruction with number `at`. Return the place, or "no instruction" if it has fewer."""
    try:
        Interrupter(at).run(work)
    except KeyboardInterrupt as why:
        return str(why)
    return "no instruction"


def count_instructions(work: Callable[[], Any]) -> int:
    """Return how many instructions of the package `work` runs."""
    counter = Interrupter()
    counter.run(work)
    return counter.count
