"""The rows of `pagedkv bench hints`: the tokens that a request computes again, by the share of the pool for hints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pagedkv.bench.clock import track
from pagedkv.bench.hints.agents import PAGE, TURNS, half_of_all, optimum, requests
from pagedkv.bench.hints.live import play

Row = dict[str, Any]
Report = Callable[[Row], None]

VARIANTS: Final = {
    "LRU": (0.0, 0.0),
    "pagedkv": (0.9, 0.0),
    "pagedkv, times 20 % off": (0.9, 0.2),
    "pagedkv, times 50 % off": (0.9, 0.5),
    "pagedkv, hints=0.5": (0.5, 0.0),
    "pagedkv, hints=0.1": (0.1, 0.0),
}
"""variant: the share of the pool for hints, and by what share the expected times are off, at most."""
OF_LRU: Final = 0.6
OF_OPTIMUM: Final = 1.3
SEEDS: Final = 3


def measure(report: Report, *, is_quick: bool) -> None:
    """Replay the traces, and hand each row to `report`. is_quick: one trace of few turns; nothing is promised then."""
    seeds, turns = (1, 8) if is_quick else (SEEDS, TURNS)
    sizes = [half_of_all(requests(seed, turns)) for seed in range(seeds)]
    least = [optimum(requests(seed, turns), size) for seed, size in enumerate(sizes)]
    totals = {"optimum": sum(least)}
    for name, (share, error) in track(VARIANTS.items(), "replaying"):
        played = [play(requests(seed, turns, error), size, share).again for seed, size in enumerate(sizes)]
        totals[name] = sum(played)
    number = seeds * len(requests(0, turns))
    must = min(OF_LRU * totals["LRU"], OF_OPTIMUM * totals["optimum"]) / number
    for name, total in sorted(totals.items(), key=lambda pair: -pair[1]):
        row: Row = {"case": "agents", "variant": name, "unit": "tokens", "median": total / number}
        row |= {"must": must if name == "pagedkv" and not is_quick else None, "of_lru": total / totals["LRU"]}
        report(row | {"of_optimum": total / totals["optimum"], "frames": sizes[0], "page": PAGE, "requests": number})
