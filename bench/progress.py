"""A progress bar on a terminal's stderr, from the first step of a loop on. It does nothing while a variant is timed.

rich draws a bar from a thread of its own, which would disturb a timing. Here the bar is drawn only between the steps of
a loop, and at most ten times a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
INTERVAL: Final = 0.1
"""Seconds from one drawing to the next."""

_shown: list[Progress] = []
"""The bars on the screen: one, or none. A loop inside a loop adds a line to the bar of the outer loop."""


def track(steps: Sequence[T], text: str) -> Iterator[T]:
    """Yield each of `steps`, and draw how many are done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from steps
        return
    owned = not _shown
    progress = _new(console) if owned else _shown[0]
    task, drawn = progress.add_task(text, total=len(steps)), -math.inf
    try:
        for done, step in enumerate(steps):
            now = time.monotonic()
            if now - drawn > INTERVAL:
                progress.update(task, completed=done)
                progress.refresh()
                drawn = now
            yield step
    finally:
        progress.remove_task(task)
        if owned:
            progress.stop()
            _shown.remove(progress)


def _new(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
    progress.start()
    _shown.append(progress)
    return progress
