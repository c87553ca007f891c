"""The cost of the memory manager, beside the managers of other engines, in one run: `pagedkv bench manager`.

A round goes through all cases: our run of a case and those of the peers, in an order that is drawn anew. A figure is
the median over the rounds, so that a slow moment of the machine affects all figures alike. Each peer runs in a process
of its own (peers.py); a peer or case that cannot be measured is reported with the reason. Our case and a peer's case do
the same work: the same number of sequences, tokens and blocks of 16, prefix cache on.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from pagedkv.bench.clock import settled, track
from pagedkv.bench.manager import frame_pool, peers
from pagedkv.bench.manager.peers import BATCH, BLOCK, GROWTH, PAGES, POOL, ROW, timed, turn_of
from pagedkv.bench.record import Row
from pagedkv.bench.worker_process import WorkerProcess
from pagedkv.core import AddressSpace, MemoryManager
from pagedkv.errors import InvalidRequest

OURS: Final = "pagedkv"
COUNTED: Final = 3
"""Runs of a case in its turn that count: the last ones."""

PATIENCE: Final = 5.0
"""Seconds after which a case is measured no more, even if rounds are left."""

SCALE: Final = {"ns": 1e9, "us": 1e6, "ms": 1e3, "bytes": 1}


@dataclass(frozen=True)
class Case:
    """A piece of work to measure.

    make:   builds its state and returns a function that does `work` units and returns their seconds.
    limit:  the promise of issue and manual, in `unit`; None for no promise.
    peer:   the case of peers.py that does the same work; "" for none.
    rounds: the largest number of rounds that measure it.
    skipped: the first runs of a turn, which do not count. The previous case has left its own data in the caches and its
            own jumps in the branch predictors. The second run of a step takes 1.4 times as long as the seventh, and
            longer the more other cases come between two turns.
    """

    name: str
    unit: str
    limit: float | None
    work: int
    make: Callable[[], Callable[[], float]]
    peer: str = ""
    rounds: int = 10**9
    skipped: int = 6

    @property
    def runs(self) -> int:
        """Runs of a turn."""
        return self.skipped + COUNTED


@dataclass
class Figure:
    """The runs of one case by one manager; without a measurement, the reason in `why_not`.

    samples: the runs of each turn that count, in the unit of the case, and whether no context switch fell into it.
    """

    who: str
    case: Case
    why_not: str = ""
    version: str = ""
    samples: list[tuple[list[float], bool]] = field(default_factory=list)
    took: float = 0.0  # seconds

    def add(self, answer: dict[str, Any]) -> None:
        """Add the runs of one turn, in the form of Peer.ask; the first `case.skipped` runs do not count."""
        case, self.why_not = self.case, answer.get("absent", "")
        self.took += sum(answer.get("seconds", ()))
        found = [seconds / case.work * SCALE[case.unit] for seconds in answer.get("seconds", ())[case.skipped :]]
        self.samples += [(found, answer.get("clean", True))] if found else []

    def row(self) -> Row:
        """Return the row: its turns are the medians of the runs of a turn."""
        row = {"case": self.case.name, "variant": self.who, "unit": self.case.unit}
        timing = (
            settled([(statistics.median(runs), is_clean) for runs, is_clean in self.samples]) if self.samples else None
        )
        row |= timing.fields(lambda value: value) if timing else {"median": None, "why_not": self.why_not}
        return row | {"must": self.case.limit if self.who == OURS else None, "version": self.version}


def prompt(seed: int, pages: int) -> np.ndarray:
    """Return int32 [pages * BLOCK + 1]: random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 30_000, pages * BLOCK + 1).astype(np.int32)


def grown(mm: MemoryManager, ids: np.ndarray) -> AddressSpace:
    """Return a space that holds `ids`; no prefix of them is matched."""
    space = mm.open()
    mm.commit(mm.plan([space], [len(ids)]), ids)
    return space


def full_pool(num_frames: int, pages: int) -> MemoryManager:
    """Return a pool whose frames all hold published pages of the prompts with seeds 0, 1, 2, ..."""
    mm = MemoryManager(num_frames, BLOCK)
    for seed in range(num_frames // pages):
        grown(mm, prompt(seed, pages)[:-1]).release()
    return mm


def decode(
    batch: int, mm: MemoryManager, *, context: int = 1, growth: int = GROWTH, evicting: bool = True
) -> Callable[[], float]:
    """Return a run of plan + commit of one step: each of `batch` sequences grows by one token; prefix cache on.

    The lengths of the sequences are staggered. The sequences start again when they have grown by `growth` tokens.
    evicting: the pages that the sequences leave cached are then evicted, untimed.
    """
    spaces = [grown(mm, prompt(i, -(-context // BLOCK) + 1)[: context + i % BLOCK]) for i in range(batch)]
    asids, ones = np.array([space.asid for space in spaces], np.int32), np.ones(batch, np.int64)
    ids = np.arange(batch, dtype=np.int32)

    def run() -> float:
        if len(spaces[0]) > context + growth:  # otherwise, the pool would fill up
            for i, space in enumerate(spaces):
                space.truncate(context + i % BLOCK)
            if evicting:
                mm.evict(mm.num_frames)
            mm.commit(mm.plan(asids, ones), ids)  # the shared tails are copied once
        ids[:] += batch  # new token ids: a page published before is not found again
        return timed(lambda: mm.commit(mm.plan(asids, ones), ids))

    return run


def allocate_and_release(batch: int, num_frames: int) -> Callable[[], float]:
    """Return a run of plan and abort of `batch` frames; it includes the slots and positions of all their tokens."""
    mm = MemoryManager(num_frames, 1)
    space = mm.open()
    return lambda: timed(lambda: mm.abort(mm.plan([space], [batch])))


def match(pages: int, num_frames: int) -> Callable[[], float]:
    """Return a run of open() for a prompt whose pages are all published, in a pool full of other prompts."""
    mm = full_pool(num_frames, pages)
    prompts = [prompt(seed, pages) for seed in range(num_frames // pages)]
    turn = iter(range(10**9))

    def run() -> float:
        ids = prompts[next(turn) * 7919 % len(prompts)]
        opened: list[AddressSpace] = []
        seconds = timed(lambda: opened.append(mm.open(ids)))
        assert len(opened[0]) == pages * BLOCK
        opened[0].release()
        return seconds

    return run


def publish(pages: int, num_frames: int) -> Callable[[], float]:
    """Return a run of commit() of a whole new prompt; its plan evicts a page for each new page, untimed."""
    mm = full_pool(num_frames, pages)
    turn = iter(range(num_frames, 10**9))

    def run() -> float:
        ids = prompt(next(turn), pages)[:-1]
        space = mm.open()
        plan = mm.plan([space], [len(ids)])
        seconds = timed(lambda: mm.commit(plan, ids))
        space.release()
        return seconds

    return run


def fork(pages: int) -> Callable[[], float]:
    """Return a run of fork() of a space of `pages` pages."""
    mm = MemoryManager(2 * pages, BLOCK)
    parent = grown(mm, prompt(0, pages)[:-1])

    def run() -> float:
        children: list[AddressSpace] = []
        seconds = timed(lambda: children.append(parent.fork()))
        children[0].release()
        return seconds

    return run


def create(num_frames: int) -> Callable[[], float]:
    """Return a run of MemoryManager(num_frames)."""
    return lambda: timed(lambda: MemoryManager(num_frames, BLOCK))


def held(num_frames: int, pages: int) -> Callable[[], float]:
    """Return a run that gives the bytes per frame of a pool full of published pages: arrays, index and token ids."""
    size = round(peers.held_by(lambda: full_pool(num_frames, pages)) / num_frames, 1)
    return lambda: size


def _frame_cases(name: str, call: str, limit: float, work: int, listed: bool = False) -> tuple[Case, Case]:
    """Return the cases of one call of FramePool: after other work, and in a loop, to which the limit applies."""
    unit, loop = "ns" if work > 1 else "us", peers.in_a_loop(call)
    return (
        Case(name, unit, None, work, partial(frame_pool.life, call, listed=listed), call, skipped=1),
        Case(f"{name}, in a loop", unit, limit, work, partial(frame_pool.life, loop, listed=listed), loop, skipped=1),
    )


CASES: Final = (
    Case("decode step, 256 sequences", "us", 30, 1, lambda: decode(256, MemoryManager(20_000, BLOCK)), "decode 256"),
    Case(
        "decode step, 1,024 sequences", "us", 80, 1, lambda: decode(1024, MemoryManager(40_000, BLOCK)), "decode 1024"
    ),
    Case("the same, pool of 1e6 frames", "us", 80, 1, lambda: decode(1024, MemoryManager(1_000_000, BLOCK))),
    Case(
        "the same, context of 500 tokens", "us", 80, 1, lambda: decode(1024, MemoryManager(100_000, BLOCK), context=500)
    ),
    Case("get and free a block, by 1,000", "ns", 30, BATCH, lambda: allocate_and_release(BATCH, POOL), peers.ALLOCATE),
    Case("match a block, pool of 1e5", "ns", 100, PAGES, lambda: match(PAGES, POOL), peers.MATCH),
    Case("publish a block, pool of 1e5", "ns", 150, PAGES, lambda: publish(PAGES, POOL), peers.PUBLISH),
    Case("fork 4,096 pages", "us", 20, 1, lambda: fork(4096)),
    Case("create a pool of 1e6", "ms", 100, 1, lambda: create(1_000_000), rounds=5),
    *(
        case
        for name, call, limit, work, listed in (
            ("take a frame, by 64, each of which evicts one", "take frames", 80, ROW, False),
            ("give a frame its key, by 64", "publish frames", 65, ROW, False),
            ("give a frame its key, a list of bytes", "publish frames", 65, ROW, True),
            ("drop a frame, by 64", "drop frames", 40, ROW, False),
            ("find a frame by its key, by 64", "find frames", 60, ROW, False),
            ("find a frame by its key, a list of bytes", "find frames", 60, ROW, True),
            ("share a frame, by 64", "share frames", 30, ROW, False),
            ("take and drop one frame alone", "one frame", 1.2, 1, False),
        )
        for case in _frame_cases(name, call, limit, work, listed)
    ),
    Case("a block, token ids included", "bytes", 48 + 4 * BLOCK, 1, lambda: held(POOL, PAGES), peers.BYTES, rounds=1),
)


def chosen(texts: Sequence[str]) -> list[Case]:
    """Return the cases whose names have one of the texts; all without one. Raises: InvalidRequest if there is none"""
    found = [case for case in CASES if not texts or any(text in case.name for text in texts)]
    if not found:
        names = ", ".join(case.name for case in CASES)
        raise InvalidRequest(f"no case is named by --case {' --case '.join(texts)}; the cases are: {names}")
    return found


class Peer:
    """A process that drives one of the managers of peers.py: the first of `pythons` that can import the manager.

    Raises: InvalidRequest if one of `pythons` cannot be started.
    """

    def __init__(self, name: str, pythons: Sequence[str]) -> None:
        self.name, self.absent, self.version = name, "", ""
        refusals = []
        for python in pythons:
            answer = self._started(python)
            self.version, self.absent = answer.get("version", ""), answer.get("absent", "")
            if not self.absent:
                return
            refusals.append(self.absent)
            self.close()
        self.absent = "; ".join(dict.fromkeys(refusals))

    def _started(self, python: str) -> dict[str, Any]:
        """Start the process; return its first words."""
        here = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # peers may run from their sources
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        file = Path(peers.__file__)
        try:
            self._worker = WorkerProcess("its process", [python, str(file), self.name], here | quiet, file.parent)
        except OSError as why:
            raise InvalidRequest(f"{python} cannot be started: {why}; --peers-python is the path of a Python") from None
        return _answer(self._worker.read)

    def ask(self, case: Case) -> dict[str, Any]:
        """Run a turn of a case. Returns {"seconds": [...]}, or {"absent": reason}."""
        if self.absent:
            return {"absent": self.absent}
        return _answer(partial(self._worker.ask, {"case": case.peer, "runs": case.runs}))

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._worker.end(10)


def _answer(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except OSError as ended:
        return {"absent": str(ended)}


def measure(
    rounds: int, report: Callable[[Row], None], *, pythons: Sequence[str] = (), cases: Sequence[Case] = CASES
) -> None:
    """Measure `cases` for `rounds` rounds; hand our row of each case to `report`, then those of the peers.

    pythons: the interpreters in which to look for peers, before this one.
    """
    with ExitStack() as stack:
        starting = track(peers.PEERS, "starting peers")
        others = [stack.enter_context(closing(Peer(name, [*pythons, sys.executable]))) for name in starting]
        figures = [Figure(OURS, case) for case in cases]
        theirs = {
            case: [(peer, Figure(peer.name, case, version=peer.version)) for peer in others if case.peer]
            for case in cases
        }
        runs, lots = [case.make() for case in cases], random.Random(0)
        turns = [turn for _ in range(rounds) for turn in zip(cases, runs, figures, strict=True)]
        for at, (case, run, figure) in enumerate(track(turns, "manager")):
            if at // len(cases) < case.rounds:
                _turn(case, run, figure, theirs[case], lots)
    for figure in figures:
        for its in (figure, *(its for _, its in theirs[figure.case])):
            report(its.row())


def _turn(
    case: Case, run: Callable[[], float], ours: Figure, theirs: Sequence[tuple[Peer, Figure]], lots: random.Random
) -> None:
    """Measure the case by each manager once, in an order drawn by lots."""
    managers: list[tuple[Peer | None, Figure]] = [(None, ours), *theirs]
    for peer, figure in lots.sample(managers, len(managers)):
        if peer is None:
            figure.add(turn_of(run, case.runs))
        elif not figure.why_not and figure.took < PATIENCE:
            figure.add(peer.ask(case))
