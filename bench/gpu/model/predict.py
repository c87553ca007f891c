"""Counts of a kernel and a cell -> the time on an H200, its share of the memory ceiling, and the limit.

    time      = GAP + start + stream + end
    start     = entry * CYCLES_ALONE / clock + loads * LOAD                each CTA starts at once, nothing hides it
    stream    = the longest of
                  bytes / (ceiling, or what the bytes in flight allow: in flight * SMs / LATENCY)
                  tiles of a scheduler * cycles of a tile / clock          the work spread evenly
                  tiles of the busiest CTA * cycles of a tile / clock      its warps at the same pace
    end       = STORE                                                      no unit is shared
              = MERGE + ceil(pieces / at once) * ROUND                     else
                SECOND_LAUNCH in place of both, where a second launch merges
    prefill   = operations of a tile / cycles of a tile, on all schedulers; nothing else
    library   = bytes of the keys, copied out of their pages / ceiling + operations / rate of the library

The limit is memory; or the pipe that is busy for most of the cycles of a tile ("issue", "alu", ...), or "latency" if no
pipe is busy for SATURATED of them; or "start and end" if these take longer than the stream.
The constants are estimates, and say from where. They change no count. This file knows no machine code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from pagedkv.bench.attention.cells import Cell


@dataclass(frozen=True)
class Machine:
    """An H200. clock: Hz under load. ceiling: bytes a second that a kernel reads which does nothing else; an estimate
    (the datasheet says 4.8e12; a copy moved 4.3e12 on such a machine)."""

    sms: int = 132
    clock: float = 1.755e9
    ceiling: float = 4.4e12

    @property
    def schedulers(self) -> int:
        """Schedulers of all SMs."""
        return 4 * self.sms


H200: Final = Machine()

GAP: Final = 1.2
"""Microseconds between two kernels of a graph."""

LATENCY: Final = 1.2
"""Microseconds from a load to its bytes while memory is busy."""

LOAD: Final = 0.55
"""Microseconds of a load that another one waits for, at the start."""

CYCLES_ALONE = 5.0
"""Cycles of an instruction before the first copy: a warp is alone on its scheduler."""

STORE, MERGE, ROUND = 0.5, 1.0, 0.6
"""Microseconds: to store a result; for barriers, fence and ticket of a shared unit; for a round of loads from L2."""

SECOND_LAUNCH: Final = {"triton": 2.0}
"""Microseconds of a merge in a launch of its own, which begins after the first one has ended."""

CUDNN = 580e12
"""Operations a second of cuDNN, causal, with heads of 128: a reviewer's estimate for an H100. No machine code was
counted. The backend `library` calls cuDNN for whole prompts and for chunks of one sequence."""

SATURATED: Final = 0.8
SCALES: Final = 8
"""Bytes of the scales of a key and its value, for each kv head. They are read, but count neither as keys nor values."""


@dataclass(frozen=True)
class Count:
    """A kernel as its machine code shows it.

    instructions, pipes: work of a tile of one warp, see pipes.py.
    cycles:              cycles of a tile, with all warps of an SM resident.
    registers, spills:   registers and spills of a thread.
    rows, keys:          sizes of a tile, which tile_warps warps share.
    warps, ctas:         warps of a CTA, and CTAs of an SM.
    in_flight:           bytes on their way into an SM.
    entry:               instructions that run before the first copy.    loads: dependent ones before the first key.
    at_once:             pieces that a merge loads together.
    """

    backend: str
    kind: str
    kv: str
    instructions: int
    pipes: dict[str, int]
    cycles: float
    registers: int
    spills: int
    rows: int
    keys: int
    tile_warps: int
    warps: int
    ctas: int
    in_flight: int
    entry: int
    loads: int
    at_once: int

    @property
    def warps_of_scheduler(self) -> float:
        """Warps that share a scheduler."""
        return self.warps * self.ctas / 4

    @property
    def tiles_of_cta(self) -> float:
        """Tiles that a CTA works on at the same time."""
        return self.warps / self.tile_warps


class Cut(NamedTuple):
    """A line of work cut into shares. busiest: steps of the CTA with the most. pieces: the most of a unit."""

    busiest: int
    pieces: int
    shared: int


class Prediction(NamedTuple):
    """The time of a cell in microseconds, the share of the ceiling (decode) or TFLOP/s (prefill), and the limit."""

    us: float
    of_ceiling: float | None
    tflops: float | None
    limit: str


def cut(units: list[int], ctas: int, overhead: int) -> Cut:
    """Return how a partition cuts units of so many steps: csrc/cuda/partition.cuh, and triton_kernels/partition.py with
    overhead 0. The former has even cuts, too."""
    widths = [overhead + steps for steps in units]
    share, longest = max(1, -(-sum(widths) // ctas)), max(widths)
    if longest > share and not overhead:
        share = longest if 16 * longest <= 17 * share else share
    elif longest > share:
        even = max(1, -(-(longest - overhead) // (longest // share)))
        if sum(max(1, -(-steps // even)) for steps in units) <= ctas and 16 * even <= 17 * share:
            share, overhead, widths = even, 0, [max(1, -(-steps // even)) * even for steps in units]
    place, work, most, shared = 0, [0] * (ctas + 1), 1, 0
    for steps, width in zip(units, widths, strict=True):
        owners = [min((place + overhead + i) // share, ctas) for i in range(steps)]
        for owner in owners:
            work[owner] += 1
        pieces = owners[-1] - owners[0] + 1 if owners else 1
        most, shared, place = max(most, pieces), shared + (pieces > 1), place + width
    return Cut(max(work), most, shared)


def cut_of(count: Count, cell: Cell, machine: Machine) -> Cut:
    """Return how the partition of a backend cuts a cell. A step is one tile of each team."""
    step = int(count.keys * count.tiles_of_cta)
    steps = [-(-n // step) for n in cell.lens()]
    ctas = machine.sms * count.ctas
    if count.backend == "triton":  # each kv head has programs of its own
        return cut(steps, max(1, ctas // cell.kv_heads), 0)
    return cut([n for n in steps for _ in range(cell.kv_heads)], ctas, 2)


def start(count: Count, machine: Machine) -> float:
    """Return the microseconds from the start of a CTA until its first key is on its way and has come."""
    return count.entry * CYCLES_ALONE / machine.clock * 1e6 + count.loads * LOAD


def end(count: Count, how: Cut) -> float:
    """Return the microseconds from the last key to the result."""
    second = SECOND_LAUNCH.get(count.backend)
    if how.pieces == 1 and second is None:
        return STORE
    return (MERGE if second is None else second) + math.ceil(how.pieces / count.at_once) * ROUND


def predict(count: Count, cell: Cell, machine: Machine = H200) -> Prediction:
    """Return the prediction for one cell."""
    return _prefill(count, cell, machine) if count.kind == "prefill" else _decode(count, cell, machine)


def _decode(count: Count, cell: Cell, machine: Machine) -> Prediction:
    bits = {"": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int4": 4}[cell.kv]
    pairs = sum(cell.lens()) * cell.kv_heads
    payload = pairs * 2 * cell.head_dim * bits // 8
    read = payload + (pairs * SCALES if cell.kv else 0)
    how = cut_of(count, cell, machine)
    tile = count.cycles / machine.clock * 1e6  # microseconds
    of_scheduler = pairs / count.keys * count.tile_warps / machine.schedulers
    memory = read / machine.ceiling * 1e6
    flight = read / (count.in_flight * machine.sms) * LATENCY
    even, busiest = of_scheduler * tile / count.warps_of_scheduler, how.busiest * tile
    stream = max(memory, flight, even, busiest)
    fixed = GAP + start(count, machine) + end(count, how)
    limit = "memory" if stream == memory else "bytes in flight" if stream == flight else limit_of(count)
    us = fixed + stream
    return Prediction(us, payload / machine.ceiling * 1e6 / us, None, "start and end" if fixed > stream else limit)


def limit_of(count: Count) -> str:
    """Return the pipe that limits a tile, or "latency"."""
    pipe = max(count.pipes, key=lambda name: count.pipes[name])
    busy = count.pipes[pipe] * count.warps_of_scheduler / count.cycles
    return pipe if busy >= SATURATED else "latency"


def _prefill(count: Count, cell: Cell, machine: Machine) -> Prediction:
    """Return the prediction of a chunk. Tiles at the edge of the mask are computed whole; that is not counted."""
    tile = 4 * count.rows * count.keys * cell.head_dim  # operations
    per_cycle = count.warps_of_scheduler / count.tile_warps * tile / count.cycles
    rate = per_cycle * machine.schedulers * machine.clock
    return Prediction(flop(cell) / rate * 1e6, None, rate / 1e12, limit_of(count))


def flop(cell: Cell) -> int:
    """Return the operations that a causal chunk needs: two for each product and sum, over the pairs that are seen."""
    pairs = cell.new * (cell.context - cell.new) + cell.new * (cell.new + 1) // 2
    return 4 * cell.heads * cell.head_dim * pairs


def library(cell: Cell, machine: Machine = H200) -> Prediction:
    """Return the prediction of a chunk by the backend `library`. Keys are read and written once by the copy."""
    copied = 2 * cell.context * cell.kv_heads * 2 * cell.head_dim * 2
    us = flop(cell) / CUDNN * 1e6 + copied / machine.ceiling * 1e6
    return Prediction(us, None, flop(cell) / us / 1e6, "the library")
