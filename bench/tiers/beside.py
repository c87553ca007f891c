"""The cost of transfers to the steps beside them: eight sequences decode while a tier stores and loads without pause.

A transfer reads and writes each byte once, and a step loses that memory traffic: `taken` is that share of a bare read,
measured in the same turns. The promise is about the rest: with a limit of 2 GB/s a step is slower by `taken` and 5 per
cent at most. Without a limit the cost is reported.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pagedkv.bench.clock import by_lot
from pagedkv.bench.generate.models import CONFIG, emptied, engine_of, filled, write_checkpoint
from pagedkv.bench.generate.runner import matrices, read_speed, timed_step
from pagedkv.bench.tiers.speed import Driven, pool_of
from pagedkv.tiers.host import HostTier

Row = dict[str, Any]
ALONE: Final = "no transfers"
LIMITS: Final = {"2 GB/s": "2GB", "no limit": None}
SLOWER: Final = 5.0
"""Per cent that a step may lose beyond the traffic that transfers take, with a limit."""
STEPS: Final = 8
SHAPE: Final = (8, 2048)
FRAME: Final = 1_835_008


def rows(turns: int, shape: tuple[int, int] = SHAPE, config: dict[str, Any] = CONFIG) -> Iterator[Row]:
    """Yield a row for the steps alone, and one for each limit."""
    batch, context = shape
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in (ALONE, *LIMITS)}
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name), config)
        engine = engine_of(Path(name), batch * (context + 4 * STEPS * (turns + 1)), batch)
    requests = filled(engine, batch, context)
    weights = matrices(engine)
    reads = []
    for order in by_lot(taken, turns):
        for variant in order:
            with _transfers(variant) as moved:
                engine.step()
                before, began = moved(), time.perf_counter()
                seconds = [timed_step(engine) for _ in range(STEPS)]
                speed = (moved() - before) / (time.perf_counter() - began)
            reads.append(read_speed(weights))
            taken[variant].append((statistics.median(seconds), speed))
    emptied(engine, requests)
    read = statistics.median(reads)
    alone = [seconds for seconds, _ in taken[ALONE][1:]]
    for variant, turns_of in taken.items():
        seconds, speeds = zip(*turns_of[1:], strict=True)  # the first turn does not count
        row: Row = {"case": "decode beside transfers", "batch": batch, "context": context, "variant": variant}
        row |= {"unit": "ms", "median": 1e3 * statistics.median(seconds), "turns": len(seconds)}
        row |= {"moved_gb_s": statistics.median(speeds) / 1e9, "read_gb_s": read / 1e9}
        if variant != ALONE:
            slower = 100 * statistics.median(a / b - 1 for a, b in zip(seconds, alone, strict=True))
            share = 100 * 2 * statistics.median(speeds) / read
            row |= {"slower_percent": slower, "taken_percent": share, "ratio": 1 + slower / 100}
            row["must"] = 1 + (share + SLOWER) / 100 if LIMITS[variant] else None
        yield row


@contextmanager
def _transfers(variant: str) -> Iterator[Any]:
    """Store and load all the time, unless the variant has no transfers. Yield a call: the bytes moved so far."""
    if variant == ALONE:
        yield lambda: 0
        return
    tier = HostTier(160 * FRAME, limit=LIMITS[variant])
    pool, stop = pool_of(FRAME, 64), threading.Event()
    tier.register(pool, bytes(32))
    driven = Driven(tier, 64)

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
        yield moved
    finally:
        stop.set()
        thread.join()
        tier.close()
