"""Runs of neighbouring frames: the bytes per second of a copy in pieces, and the frames that a smaller pool moves.

A frame is one contiguous run of bytes with all layers (2 MiB for 16 tokens of Llama 3 8B), and neighbouring frames are
one run. So a sequence moves in as many copies as it has runs. In a layout with the layers outermost, the piece is a
layer's part of a frame: 64 KiB for K and V of the same model, or 32 KiB for one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pagedkv.bench.clock import Timing, compare, in_turn
from pagedkv.bench.fragmentation.arenas import KIB, MIB
from pagedkv.bench.fragmentation.live import Live
from pagedkv.bench.fragmentation.simulation import Simulation
from pagedkv.bench.fragmentation.workloads import WORKLOADS

BYTES: Final = 128 * MIB
PIECES: Final = (4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB, BYTES)
"""Bytes of a piece. 2 MiB are a frame, 16 MiB a run of eight; the last is one copy of everything."""


def copy_speeds(repetitions: int) -> list[dict[str, Any]]:
    """Measure a copy of BYTES, gathered from pieces in random order; return a row for each size of a piece."""
    source, target = np.ones(BYTES, np.uint8), np.zeros(BYTES, np.uint8)
    random = np.random.default_rng(0)

    def step(piece: int) -> Callable[[], Callable[[], object]]:
        order = random.permutation(BYTES // piece)
        pieces, out = source.reshape(-1, piece), target.reshape(-1, piece)
        return lambda: lambda: np.take(pieces, order, axis=0, out=out, mode="clip")

    timings = in_turn({piece: step(piece) for piece in PIECES}, repetitions)
    whole = timings[BYTES]
    return [_speed(piece, timing, whole) for piece, timing in timings.items()]


def _speed(piece: int, timing: Timing, whole: Timing) -> dict[str, Any]:
    row = {"case": "memcpy", "piece_bytes": piece, "variant": "numpy", "unit": "GB/s"}
    row |= timing.fields(lambda seconds: BYTES / seconds / 1e9)
    return row | {"ratio": compare(whole, timing, lambda one, pieces: one / pieces)}


def resized(requests: int) -> dict[str, Any]:
    """Halve the load of a full pool, shrink the pool to what is mapped, and return a row with the frames that moved."""
    load = WORKLOADS["sharegpt"]
    live = Live("", load.memory, 16)
    simulation = Simulation(load.requests(requests), live, observe_every=10**9)
    for tally in simulation.steps():
        if tally.finished >= requests // 2:
            break
    for sequence in list(live.spaces)[::2]:
        live.free(sequence)
    manager = live.manager
    before, frames, mapped = manager.mean_run(), manager.num_frames, manager.stats().mapped
    moves = manager.resize(mapped)
    return {
        "case": "resize", "workload": "sharegpt", "variant": "pagedkv", "unit": "% of mapped frames moved",
        "median": 100 * len(moves) / mapped, "frames_before": frames, "frames_after": mapped, "moved": len(moves),
        "mean_run_before": before, "mean_run_after": manager.mean_run(),
    }  # fmt: skip
