"""`--top`: the pool as a map of frames, drawn on stderr while the engine steps. Reads the engine, changes nothing.

    aaaaaaaabbbbbbbbbbbb##ccccccc....    a letter: frames of one sequence      #: shared by several
    ::::::::::::::::::::dddddd.......    a colon: found by prompts, mapped by none      a dot: free

A pool with more frames than the terminal has cells shows several neighbours in a cell: the kind that most of them have.
Letters and signs are ASCII and tell everything without colour; the colours differ for colour-blind readers, too. The
picture is drawn in place by the stepping thread, between two steps, and the last one stays on the terminal. SIGTERM
ends the process as ever, but the terminal gets its cursor back first.
"""

from __future__ import annotations

import os
import signal
import string
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pagedkv.cli.report import size
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy.typing as npt

    from pagedkv.model.engine import Engine
    from pagedkv.model.loop.sequence import SequenceState
    from pagedkv.model.request import Completion

SECONDS: Final = 0.25
"""Between two pictures."""
RATE_SECONDS: Final = 2.0
"""Rates are means over so long."""
TEXT_LINES: Final = 7
"""Lines of a picture beside the map, and a line for the cursor."""
SHOW_CURSOR: Final = b"\r\n\x1b[?25h"
MOST_NAMED: Final = 12
"""Sequences in the legend."""

LETTERS: Final = string.ascii_lowercase + string.ascii_uppercase
FREE, CACHED, SHARED, OWNED = 0, 1, 2, 3
"""Kinds of a frame; OWNED + i is the i-th letter."""
SIGNS: Final = f".:#{LETTERS}"

COLOURS: Final = tuple(
    f"{'#FFFFFF' if ground == '#0072B2' else '#000000'} on {ground}"
    for ground in ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#0072B2")
)
"""Grounds that readers with any kind of colour vision tell apart (Okabe and Ito, 2008)."""


@dataclass(frozen=True)
class Picture:
    """The kinds of all frames at one moment, and the owners of the letters.

    kinds: int64 [F]. owners: sequences and their letters. tenants: the colour of each, if there are several
    """

    kinds: npt.NDArray[np.int64]
    owners: dict[SequenceState, int]
    tenants: dict[bytes, int]

    def cells(self, most: int) -> npt.NDArray[np.int64]:
        """Return the kinds of at most so many cells of neighbouring frames: int64 [N].

        A kind that more than half of the frames of a cell have is the median of the cell.
        """
        together = -(-len(self.kinds) // most)
        padded = np.pad(self.kinds, (0, -len(self.kinds) % together), mode="edge").reshape(-1, together)
        return np.sort(padded, axis=1)[:, together // 2]

    def style(self, kind: int) -> str:
        """Return the style of a kind: a sequence has the colour of its letter or, if there are several, its tenant."""
        if kind < SHARED:
            return "dim" if kind == FREE else ""
        if kind == SHARED:
            return "reverse"
        number = kind - OWNED
        if len(self.tenants) > 1:
            owner = next(sequence for sequence, letter in self.owners.items() if letter == number)
            number = self.tenants[owner.completion.request.tenant]
        return COLOURS[number % len(COLOURS)]


class FrameMap:
    """A map of the frames of an engine, as pictures. A sequence keeps its letter as long as it has frames."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._letters: dict[Completion, int] = {}

    def picture(self) -> Picture:
        """Return the present picture."""
        cache, scheduler = self._engine.cache, self._engine.scheduler
        holders = [one for one in (*scheduler.running, *scheduler.waiting) if one.space is not None]
        self._assign(holders)
        kinds = np.where(cache.free_mask(), FREE, CACHED)
        maps = np.zeros(len(kinds), np.int64)
        owners: dict[SequenceState, int] = {}
        for sequence in holders:
            owners[sequence] = letter = self._letters[sequence.completion]
            for group in range(len(cache.specs)):
                assert sequence.space is not None
                frames = sequence.space.pages_in(group)
                frames = frames[frames >= 0]
                kinds[frames] = OWNED + letter
                maps[frames] += 1
        kinds[maps > 1] = SHARED
        tenants = sorted({one.completion.request.tenant for one in holders})
        return Picture(kinds, owners, {tenant: number for number, tenant in enumerate(tenants)})

    def _assign(self, holders: Iterable[SequenceState]) -> None:
        """Give each completion a letter: its old one, or one that the fewest others have."""
        now = {sequence.completion for sequence in holders}
        self._letters = {one: letter for one, letter in self._letters.items() if one in now}
        for completion in sorted(now - set(self._letters), key=lambda c: (c.request.submitted_at, c.index)):
            used = Counter(self._letters.values())
            self._letters[completion] = min(range(len(LETTERS)), key=lambda letter: used[letter])


class Top:
    """A live picture of an engine, with the methods of the progress bar. Results wait for its end, but for a pipe."""

    def __init__(self, screen: Console, engine: Engine) -> None:
        self._engine, self._screen, self._frames = engine, screen, FrameMap(engine)
        self._live = Live(console=screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._drawn_at = 0.0
        self._past: deque[tuple[float, int, int]] = deque()
        self._kept: list[tuple[Callable[[str], None], str]] = []
        self._at_term: Any = None

    def __enter__(self) -> Top:
        self._at_term = signal.signal(signal.SIGTERM, self._terminate)
        self._live.start()
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # a step that was interrupted leaves a pool that cannot be read
                self._draw()
        finally:
            self._live.stop()
            signal.signal(signal.SIGTERM, self._at_term)
            for show, text in self._kept:
                show(text)

    def _terminate(self, number: int, _: object) -> None:
        """Show the cursor below the picture, and end by the signal. The console may be in the middle of a write."""
        os.write(self._screen.file.fileno(), SHOW_CURSOR)
        signal.signal(number, self._at_term)
        os.kill(os.getpid(), number)

    def advance(self, _: list[Completion]) -> None:
        """Draw the picture again, if it is old."""
        if time.perf_counter() - self._drawn_at > SECONDS:
            self._draw()

    def print(self, text: str, show: Callable[[str], None] | None = None) -> None:
        """Print a result to stdout, or by `show`: at the end, if that is a terminal."""
        if show is None and not sys.stdout.isatty():
            print(text, flush=True)
        else:
            self._kept.append((show or print, text))

    def _draw(self) -> None:
        self._live.update(self.rendered(*self._screen.size), refresh=True)
        self._drawn_at = time.perf_counter()

    def rendered(self, width: int, height: int) -> Group:
        """Return the picture for a terminal of that size."""
        picture = self._frames.picture()
        lines = [self._counts(picture), self._work(), self._times(), Text()]
        lines += _map(picture, width, max(1, height - TEXT_LINES))
        lines += [_signs(), _legend(picture)]
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return Group(*lines[: max(1, height - 1)])

    def _counts(self, picture: Picture) -> Text:
        cache = self._engine.cache
        now, total = cache.stats(), len(picture.kinds)
        mapped = f"{now.mapped:,} mapped ({now.mapped / total:.0%})"
        rest = f"{now.cached:,} cached, {now.free:,} free of {total:,} frames, {size(total * cache.frame_bytes)}"
        return Text(f"pool  {mapped}, {rest}; {now.hit_rate:.0%} prefix hits, {now.evictions:,} evicted")

    def _work(self) -> Text:
        now = self._engine.stats()
        tokens, steps = self._rates(now.output_tokens, now.steps)
        moved = f"{now.preemptions:,} preempted, {sum(now.finished.values()):,} finished"
        counts = f"{now.running:,} running, {now.waiting:,} waiting, {moved}"
        return Text(f"work  {counts}; {tokens:,.0f} tokens/s, {steps:,.0f} steps/s")

    def _times(self) -> Text:
        found = self._engine.meter.times
        shown = [
            f"{name} {times.p50 * 1e3:,.1f} / {times.p90 * 1e3:,.1f} / {times.p99 * 1e3:,.1f} ms"
            for name, times in (
                ("first token", found.first_token.percentiles()),
                ("next", found.between_tokens.percentiles()),
            )
        ]
        return Text(f"time  {', '.join(shown)} (p50 / p90 / p99)")

    def _rates(self, tokens: int, steps: int) -> tuple[float, float]:
        """Return tokens and steps per second since RATE_SECONDS ago."""
        now = time.perf_counter()
        self._past.append((now, tokens, steps))
        while len(self._past) > 2 and now - self._past[1][0] >= RATE_SECONDS:
            self._past.popleft()
        then, before, steps_before = self._past[0]
        passed = now - then
        return ((tokens - before) / passed, (steps - steps_before) / passed) if passed else (0.0, 0.0)


def _map(picture: Picture, width: int, height: int) -> list[Text]:
    """Return the rows of the map."""
    cells = picture.cells(width * height)
    rows: list[Text] = []
    for first in range(0, len(cells), width):
        row, line = cells[first : first + width], Text()
        ends = [*(np.flatnonzero(np.diff(row)) + 1), len(row)]
        for begin, end in zip([0, *ends], ends, strict=False):
            kind = int(row[begin])
            line.append(SIGNS[kind] * int(end - begin), picture.style(kind))
        rows.append(line)
    return rows


def _signs() -> Text:
    return Text(". free   : cached   # shared   letters: sequences, with their tokens")


def _legend(picture: Picture) -> Text:
    """Return the letters of the first sequences, with their tokens, and their tenants if there are several."""
    line = Text()
    for sequence, letter in list(picture.owners.items())[:MOST_NAMED]:
        line.append(SIGNS[OWNED + letter], picture.style(OWNED + letter))
        tenant = sequence.completion.request.tenant.decode(errors="backslashreplace")
        line.append(f" {len(sequence.tokens):,}{f' {tenant!a}' if len(picture.tenants) > 1 else ''}  ")
    if (more := len(picture.owners) - MOST_NAMED) > 0:
        line.append(f"and {more} more")
    return line


def require_terminal(screen: Console) -> None:
    """Raise InvalidRequest if stderr is no terminal on which lines can be drawn again."""
    if not screen.is_terminal or screen.is_dumb_terminal:
        raise InvalidRequest(
            "--top draws on the terminal of stderr, and there is none; run it at a terminal, without 2>"
        )
