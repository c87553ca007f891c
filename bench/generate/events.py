"""Events: the cost of recording the lives of requests, in a decode step of the bundled checkpoint.

    events, step      ms of one `Engine.step` with `engine.events` set, and without; `ratios` are on / off, of each turn
                      in which no other process disturbed either
    events, record    the part of it that `Events.step` takes, over the rest of the same step

The bundled checkpoint is the fastest model that there is to run, so its steps show the cost best. On and off take turns
of STEPS steps over the same sequences, in an order by lot. The second figure has a clock around the call: it shows a
cost that the noise of whole steps hides.

Run it by `python -m pagedkv.bench.generate.events`: two minutes. It appends a row for each figure to
bench/results/events.jsonl: the tables of bench generate show its newest run, and these rows are no run of it.
"""

from __future__ import annotations

import statistics
import time
from operator import truediv
from typing import TYPE_CHECKING, Any, Final

from pagedkv.bench import record
from pagedkv.bench.clock import Timing, Turns, compare, ratios, watched
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
        shares: list[float] = []
        timed = Turns((ON, OFF), turns, "events")
        for order in timed:
            for variant in order:
                engine.events = _Clocked() if variant == ON else None
                engine.step()  # its first step records the admission of all
                (seconds, of_record), _, is_clean = watched(lambda: _steps(engine))
                timed.add(variant, seconds, is_clean)
                shares += of_record
        engine.events = None
        models.emptied(engine, requests)
        rows += _rows({"batch": batch, "context": CONTEXT}, timed.timings(), shares[STEPS:])
    return rows


def _steps(engine: Engine) -> tuple[float, list[float]]:
    """Return the median seconds of STEPS steps, and the share of the record in each of them."""
    seconds, shares = [], []
    for _ in range(STEPS):
        seconds.append(timed_step(engine))
        if isinstance(engine.events, _Clocked):
            shares.append(engine.events.seconds / (seconds[-1] - engine.events.seconds))
    return statistics.median(seconds), shares


def _rows(axes: dict[str, int], taken: dict[str, Timing], shares: list[float]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for variant, timing in taken.items():
        row: dict[str, Any] = (
            {"bench": "generate", "case": "events, step"} | axes | {"variant": variant, "unit": "ms", "must": None}
        )
        row |= timing.fields(lambda seconds: 1e3 * seconds)
        if variant == ON:
            row |= {"of_off": compare(timing, taken[OFF], truediv), "must": MUST}
            row |= {"ratios": ratios(timing, taken[OFF], truediv)}
        made.append(row)
    of_record = {"bench": "generate", "case": "events, record", "variant": ON, "unit": "of the rest of the step"}
    share = {"median": statistics.median(shares), "best": min(shares), "must": MUST - 1}
    return [*made, of_record | axes | share]


def main() -> None:
    """Measure, keep the rows, and print the figures."""
    rows, about = measured(), record.provenance()
    record.append([row | about for row in rows], None, "events")
    for row in rows:
        of = f"{row['batch']:2} sequences, {row['variant']:3}"
        if row["unit"] == "ms":
            ratio = f"  {row['of_off']:.3f} x off" if "of_off" in row else ""
            print(f"{of}  {row['median']:7.3f} ms{ratio}, {row['clean']} turns undisturbed")
        else:
            print(f"{of}  {row['median']:7.2%} {row['unit']} takes the record")


if __name__ == "__main__":
    main()
