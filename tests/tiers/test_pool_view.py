"""Runs of bytes: copied as they are, with and without the extension."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.kernels import cpu
from pagedkv.tiers.pool_view import copy_runs


@pytest.mark.parametrize("size", [100, (256 << 10) + 2, (256 << 10) + 63])
@pytest.mark.parametrize("by_extension", [True, False])
def test_runs_arrive_and_nothing_beside_them_changes(
    by_extension: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 256 KiB and more go past the caches, in lines of 64 bytes."""
    if by_extension and cpu.missing():
        pytest.skip(cpu.missing()[0])
    if not by_extension:
        monkeypatch.setattr(cpu, "missing", lambda: ["not here"])
    source, target = np.random.default_rng(0).integers(1, 256, (9, size), np.uint8), np.zeros((5, size), np.uint8)
    rows, places = np.array([7, 0, 3]), np.array([4, 1, 2])
    copy_runs(target.ctypes.data + places * size + 1, source.ctypes.data + rows * size + 1, size - 2)
    assert (target[places, 1 : size - 1] == source[rows, 1 : size - 1]).all()
    target[places, 1 : size - 1] = 0
    assert not target.any()
