"""Fixtures: the small manager with which most laws of core begin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedkv.core import MemoryManager


@pytest.fixture
def mm() -> Iterator[MemoryManager]:
    """Return a manager that is whole at the end of the test."""
    made = MemoryManager(num_frames=16, block_size=4)
    yield made
    made.check()
