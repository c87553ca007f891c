"""The cells of the benchmark: workloads and their allocators, the figures of the PagedAttention paper, our promises.

All names of variants stand here. Ours is `pagedkv` with frames of 16 tokens; other block sizes are named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pagedkv.bench.fragmentation.account import Allocator
from pagedkv.bench.fragmentation.arenas import KIB, MIB, Buddy, CachingArena
from pagedkv.bench.fragmentation.contiguous import (
    Growing,
    Reserving,
    power_of_two,
    to_maximum,
    to_power_of_two,
    to_true_length,
)
from pagedkv.bench.fragmentation.live import Live
from pagedkv.bench.fragmentation.virtual import VirtualMemory
from pagedkv.bench.fragmentation.workloads import Workload

OURS: Final = "pagedkv"
BLOCK: Final = 16
BLOCKS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

MAXIMUM, POWER, ORACLE = "reserve the maximum", "reserve a power of two", "reserve the true length"
DOUBLING, DYNAMIC = "buddy, doubling", "DynamicCache"
LARGE_PAGES, SMALL_PAGES = "virtual memory, 2 MiB", "virtual memory, 64 KiB"
UNAWARE: Final = f"{OURS}, without the window"


def blocks_of(size: int) -> str:
    """Return the variant with frames of `size` tokens."""
    return OURS if size == BLOCK else f"{OURS}, blocks of {size}"


def _live(size: int) -> Callable[[str, Workload], Allocator]:
    return lambda name, load: Live(name, load.memory, size, window=load.window)


MAKERS: Final[dict[str, Callable[[str, Workload], Allocator]]] = {
    MAXIMUM: lambda name, load: Reserving(name, load.memory, to_maximum, Buddy, window=load.window),
    POWER: lambda name, load: Reserving(name, load.memory, to_power_of_two, Buddy, window=load.window),
    ORACLE: lambda name, load: Reserving(name, load.memory, to_true_length, Buddy, window=load.window),
    DOUBLING: lambda name, load: Growing(name, load.memory, power_of_two, Buddy),
    DYNAMIC: lambda name, load: Growing(name, load.memory, lambda length: length, CachingArena, is_split=True),
    LARGE_PAGES: lambda name, load: VirtualMemory(name, load.memory, 2 * MIB),
    SMALL_PAGES: lambda name, load: VirtualMemory(name, load.memory, 64 * KIB),
    UNAWARE: lambda name, load: Live(name, load.memory, BLOCK, window=load.window, gives_back=False),
    **{blocks_of(size): _live(size) for size in BLOCKS},
}
"""variant: a function of its name and the workload."""

PEERS: Final = (MAXIMUM, POWER, ORACLE, DOUBLING, DYNAMIC, LARGE_PAGES, SMALL_PAGES)
MAIN: Final = (*PEERS, OURS)
EVERY_BLOCK: Final = tuple(blocks_of(size) for size in BLOCKS)


@dataclass(frozen=True)
class Cell:
    """A workload with the variants that serve it. quick: its requests with --quick.

    figure: "useful" memory, or memory "saved" by sharing.
    """

    workload: str
    variants: tuple[str, ...]
    quick: int
    figure: str = "useful"


FULL: Final = 3
"""A full run has so many times the requests."""
CELLS: Final = (
    Cell("sharegpt", (*PEERS, *EVERY_BLOCK), 200),
    Cell("alpaca", (MAXIMUM, POWER, ORACLE, SMALL_PAGES, *EVERY_BLOCK[3:]), 700),
    Cell("window", (MAXIMUM, UNAWARE, OURS), 200),
    *(Cell(f"samples-{n}", (ORACLE, OURS), 800 // n + 100, "saved") for n in (2, 4, 6)),
    *(Cell(f"beams-{n}", (ORACLE, OURS), 200 // n + 100, "saved") for n in (2, 4, 6)),
    Cell("samples-6-sharegpt", (ORACLE, OURS), 60, "saved"),
    Cell("beams-6-sharegpt", (ORACLE, OURS), 60, "saved"),
)
TRACED: Final = Cell("mooncake", MAIN, 400)
"""The cell of a trace, which has a file."""

PUBLISHED: Final[dict[tuple[str, str, str], float]] = {
    ("useful", "sharegpt", MAXIMUM): 20.4, ("useful", "sharegpt", POWER): 26.8, ("useful", "sharegpt", ORACLE): 38.2,
    ("useful", "sharegpt", OURS): 96.3,
    ("saved", "samples-2", OURS): 6.09, ("saved", "samples-4", OURS): 8.53, ("saved", "samples-6", OURS): 9.79,
    ("saved", "beams-2", OURS): 37.56, ("saved", "beams-4", OURS): 53.13, ("saved", "beams-6", OURS): 55.16,
    ("saved", "samples-6-sharegpt", OURS): 30.5, ("saved", "beams-6-sharegpt", OURS): 66.3,
}  # fmt: skip
"""(figure, workload, variant): per cent in the paper, ours standing for vLLM. Fig. 2; Fig. 15; the text of 6.3."""

SEQUENCES: Final = {MAXIMUM: 7.00, POWER: 9.81, ORACLE: 13.62, OURS: 30.42}
"""Requests of ShareGPT that ran at once in the paper's Fig. 13, at two requests a second."""

MUSTS: Final[dict[tuple[str, str, str], float]] = {
    ("useful", "sharegpt", OURS): 96.0,
    ("waste", "sharegpt", OURS): 4.0, ("waste", "sharegpt", blocks_of(8)): 2.0, ("waste", "mooncake", OURS): 0.1,
}  # fmt: skip
"""(figure, workload, variant): per cent at least, or at most for waste: slots of mapped frames without a token."""
