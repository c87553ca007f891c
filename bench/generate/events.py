"""Events: the cost of recording the lives of requests, in a decode step of the bundled checkpoint.

    events, step      ms of one `Engine.step` with `engine.events` set, and without; `ratios` are on / off, of each turn
    events, record    the part of it that `Events.step` takes, over the rest of the same step

The bundled checkpoint is the fastest model that there is to run, so its steps show the cost best. On and off take turns
of STEPS steps over the same sequences, in an order by lot. The second figure has a clock around the call: it shows a
cost that the noise of whole steps hides.

Run it by `python -m pagedkv.bench.generate.events`: two minutes. It appends a row for each figure to
bench/results/generate.jsonl.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from pagedkv.bench import record
from pagedkv.bench.clock import by_lot
from pagedkv.bench.generate import models
from pagedkv.bench.generate.runner import timed_step
from pagedkv.model.engine import Engine
from pagedkv.model.loop.events import Events

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHES: Final = (1, 8, 64)
CONTEXT: Final = 128
STEPS: Final = 10
TURNS: Final = 30
MUST: Final = 1.03
ON, OFF = "on", "off"


class _Clocked(Events):
    """Events with a clock around each step: the seconds of the last one."""

    def step(self, *args: Any) -> None:
        """Record a step and its time."""
        began = time.perf_counter()
        super().step(*args)
        self.seconds = time.perf_counter() - began


def measured(batches: Sequence[int] = BATCHES, turns: int = TURNS) -> list[dict[str, Any]]:
    """Return the rows of all numbers of sequences."""
    engine = Engine.load(num_frames=max(batches) * 72)  # for the most tokens that `filled` asks for
    rows = []
    for batch in batches:
        requests = models.filled(engine, batch, CONTEXT)
        taken: dict[str, list[float]] = {ON: [], OFF: []}
        shares: list[float] = []
        for order in by_lot((ON, OFF), turns, "events"):
            for variant in order:
                engine.events = events = _Clocked() if variant == ON else None
                engine.step()  # its first step records the admission of all
                seconds = []
                for _ in range(STEPS):
                    seconds.append(timed_step(engine))
                    if events is not None:
                        shares.append(events.seconds / (seconds[-1] - events.seconds))
                taken[variant].append(statistics.median(seconds))
        engine.events = None
        models.emptied(engine, requests)
        axes = {"batch": batch, "context": CONTEXT}
        rows += _rows(axes, {variant: seconds[1:] for variant, seconds in taken.items()}, shares[STEPS:])
    return rows


def _rows(axes: dict[str, int], taken: dict[str, list[float]], shares: list[float]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    ratios = [on / off for on, off in zip(taken[ON], taken[OFF], strict=True)]
    for variant, seconds in taken.items():
        row = {"bench": "generate", "case": "events, step"} | axes | {"variant": variant, "unit": "ms"}
        row |= {"median": 1e3 * statistics.median(seconds), "best": 1e3 * min(seconds), "worst": 1e3 * max(seconds)}
        made.append(row | ({"ratios": ratios, "must": MUST} if variant == ON else {"must": None}))
    row = {"bench": "generate", "case": "events, record"} | axes | {"variant": ON, "unit": "of the rest of the step"}
    return [*made, row | {"median": statistics.median(shares), "best": min(shares), "must": MUST - 1}]


def main() -> None:
    """Measure, keep the rows, and print the figures."""
    rows, about = measured(), record.provenance()
    record.append([row | about for row in rows], None, "generate")
    for row in rows:
        of = f"{row['batch']:2} sequences, {row['variant']:3}"
        if row["unit"] == "ms":
            ratio = f"  {statistics.median(row['ratios']):.3f} x off" if "ratios" in row else ""
            print(f"{of}  {row['median']:7.3f} ms{ratio}")
        else:
            print(f"{of}  {row['median']:7.2%} {row['unit']} takes the record")


if __name__ == "__main__":
    main()
