"""The bare read of memory that benchmarks compare with: its bytes, and its speed beside numpy's read of them."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from pagedkv.kernels import cpu

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason="the extension is not built")
SETS = () if cpu.missing() else cpu.extension().sets()


@pytest.mark.parametrize("num_bytes", [0, 8, 64, 120, 512, 4096 + 320])
@pytest.mark.parametrize("isa", SETS)
def test_a_read_has_all_whole_vectors_of_each_run(isa: str, num_bytes: int) -> None:
    runs = np.random.default_rng(0).integers(0, 1 << 63, (5, 1024), dtype=np.uint64)
    order = np.array([3, 0, 4], np.int64)
    starts = order * runs.strides[0]
    found = cpu.extension().read(isa, 1, runs.ctypes.data, starts.ctypes.data, len(starts), num_bytes)
    width = 16 if isa == "portable" or "neon" in isa else 32 if "avx2" in isa else 64
    whole = runs[order, : num_bytes // width * width // 8]
    assert found == np.bitwise_xor.reduce(whole, axis=None)


@pytest.mark.parametrize("num_bytes", [256 << 10, 32 << 20], ids=["second cache", "memory"])
@pytest.mark.parametrize("isa", SETS)
def test_a_read_is_as_fast_as_numpys(isa: str, num_bytes: int) -> None:
    """A ceiling that is too low makes every share of it too good: gcc has spilled vectors that the set does not have.

    The median of turns in CPU time, of which load takes little; the best of three tries.
    """
    words = np.zeros(num_bytes // 8, np.uint64)
    again = max(1, (16 << 20) // num_bytes)
    starts = np.zeros(again, np.int64)
    rows = np.broadcast_to(words, (again, len(words)))
    arguments = (isa, 1, words.ctypes.data, starts.ctypes.data, again, num_bytes)

    def share() -> float:
        ratios = []
        for _ in range(9):
            clock = [time.thread_time_ns()]
            for read in (lambda: np.bitwise_xor.reduce(rows, axis=1), lambda: cpu.extension().read(*arguments)):
                read()
                clock.append(time.thread_time_ns())
            ratios.append((clock[1] - clock[0]) / (clock[2] - clock[1]))
        return statistics.median(ratios)

    assert any(share() >= 0.9 for _ in range(3))
