"""Runs of bytes: copied as they are, and summed on the way, with and without the extension."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from pagedkv.kernels import cpu
from pagedkv.tiers import pool_view

LONG = 256 << 10
"""Runs of so many bytes go past the caches, and so many are copied at a time."""
BLOCK = 1024
"""Bytes after which xxh3 scrambles its sums."""
EDGES = [1, 240, 241, BLOCK - 63, BLOCK, BLOCK + 1, BLOCK + 65, LONG - 1, LONG, LONG + 1, LONG + 63, 3 * LONG + 64]


@pytest.fixture(params=[True, False], ids=["extension", "python"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and cpu.missing():
        pytest.skip(cpu.missing()[0])
    if not request.param:
        monkeypatch.setattr(cpu, "missing", lambda: ["not here"])


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("is_summed", [True, False])
@pytest.mark.parametrize("beyond", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize("size", EDGES)
def test_runs_arrive_with_their_sums_and_nothing_beside_them_changes(size: int, beyond: int, is_summed: bool) -> None:
    """The sums are those that the library computes of the whole run."""
    stride = (size + 2 * 64) // 64 * 64
    source = np.random.default_rng(size).integers(1, 256, (9, stride), np.uint8)
    target = np.zeros((5 * stride + 64,), np.uint8)
    target = target[-target.ctypes.data % 64 :][: 5 * stride].reshape(5, stride)  # begins at a line
    rows, places = np.array([7, 0, 3]), np.array([4, 1, 2])
    to, start = target.ctypes.data + places * stride + beyond, source.ctypes.data + rows * stride + 3
    sums = pool_view._copy_runs(to, start, size, is_summed=is_summed)
    copied, runs = target[places, beyond : beyond + size], source[rows, 3 : 3 + size]
    assert (copied == runs).all()
    assert sums == ([xxhash.xxh3_128_digest(run.tobytes()) for run in runs] if is_summed else [])
    target[places, beyond : beyond + size] = 0
    assert not target.any()
