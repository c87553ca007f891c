"""The cost of transfers to the steps beside them: eight sequences decode while a tier stores and loads.

A transfer reads and writes each byte once, and a step loses that memory traffic: `taken` is that share of a bare read,
measured in the same turns. The promise is about the rest: with a limit of 2 GB/s a step is slower by `taken` and 5 per
cent at most. Without a limit the cost is reported. Switches to the tier's own thread are part of that cost, so that
only the steps alone are checked for switches. The tier has written all of its memory before: memory that is written for
the first time is cleared by Linux, and the steps would pay for that, too.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.clock import Timing, Turns, compare, ratios
from pagedkv.bench.generate.models import CONFIG, emptied, engine_of, filled, of_model, write_checkpoint
from pagedkv.bench.generate.runner import STEPS, matrices, read_speed, steps
from pagedkv.bench.tiers.speed import Driven, pool_of
from pagedkv.tiers.host import HostTier

Row = dict[str, Any]
ALONE: Final = "no transfers"
LIMITS: Final = {"pagedkv, 2 GB/s": "2GB", "pagedkv, no limit": None}
SLOWER: Final = 5.0
"""Per cent that a step may lose beyond the traffic that transfers take, with a limit."""
PAUSE: Final = 0.005
"""Seconds between two looks at what has arrived, after which the next transfer begins. An engine looks once a step."""
SHAPE: Final = (8, 2048)
FRAME: Final = 1_835_008
SLOTS: Final = 160


@dataclass(frozen=True)
class Traffic:
    """The bytes per second of a tier in one turn, and of a bare read right after it."""

    moved: float
    read: float

    @property
    def taken(self) -> float:
        """The share of a bare read that the transfers take."""
        return 2 * self.moved / self.read


def rows(turns: int, shape: tuple[int, int] = SHAPE, config: dict[str, Any] = CONFIG) -> Iterator[Row]:
    """Yield a row for the steps alone, and one for each limit."""
    batch, context = shape
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), config)
        engine = engine_of(Path(name), batch * (context + (1 + len(LIMITS)) * 2 * STEPS), batch)
    measured = Turns((ALONE, *LIMITS), turns, "steps beside transfers")
    traffic: dict[str, list[Traffic]] = {name: [] for name in measured.taken}
    for order in measured:
        requests = filled(engine, batch, context)
        for variant in order:
            with _transfers(variant) as moved:
                engine.step()
                before, began = moved(), time.perf_counter()
                seconds, is_clean = steps(engine)
                speed = (moved() - before) / (time.perf_counter() - began)
            traffic[variant].append(Traffic(speed, read_speed(matrices(engine))))
            measured.add(variant, seconds, is_clean or variant != ALONE)  # the tier's own thread makes switches
        emptied(engine, requests)
    timings = measured.timings()
    for variant, timing in timings.items():
        row: Row = {"case": "decode beside transfers", "batch": batch, "context": context}
        row |= {"variant": variant, "unit": "ms"} | timing.fields(lambda seconds: 1e3 * seconds)
        row |= _beside(variant, timing, timings[ALONE], traffic[variant][1:])  # the first turn does not count
        yield of_model(config, row)


def _beside(variant: str, timing: Timing, alone: Timing, traffic: list[Traffic]) -> Row:
    """Return the fields of a row about the transfers."""
    row: Row = {"moved_gb_s": statistics.median(one.moved for one in traffic) / 1e9}
    row["read_gb_s"] = statistics.median(one.read for one in traffic) / 1e9
    if variant == ALONE:
        return row
    slower, taken = compare(timing, alone, truediv), statistics.median(one.taken for one in traffic)
    row |= {"slower_percent": 100 * (slower - 1), "taken_percent": 100 * taken, "of_alone": slower}
    row |= {"ratios": ratios(timing, alone, truediv)}
    return row | {"must": 1 + taken + SLOWER / 100 if LIMITS[variant] else None}


@contextmanager
def _transfers(variant: str) -> Iterator[Any]:
    """Store and load all the time, unless the variant has no transfers. Yield a call: the bytes moved so far."""
    if variant == ALONE:
        yield lambda: 0
        return
    tier = HostTier(SLOTS * FRAME, limit=LIMITS[variant])
    pool, stop = pool_of(FRAME, 64), threading.Event()
    tier.register(pool, bytes(32))
    driven = Driven(tier, 64, pause=PAUSE)

    def work() -> None:
        while not stop.is_set():
            driven.store()()
            driven.load()()

    thread = threading.Thread(target=work)
    thread.start()

    def moved() -> int:
        now = tier.stats()
        return now.stored_bytes + now.loaded_bytes

    try:
        while tier.stats().stored_bytes < SLOTS * FRAME:
            assert thread.is_alive(), "the tier did not store all pages; its thread has printed why"
            time.sleep(PAUSE)
        yield moved
    finally:
        stop.set()
        thread.join()
        tier.close()
