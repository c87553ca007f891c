"""Fixtures: the small manager with which most laws of core begin."""

from __future__ import annotations

import pytest

from pagedkv.core import MemoryManager


@pytest.fixture
def mm() -> MemoryManager:
    return MemoryManager(num_frames=16, block_size=4)
