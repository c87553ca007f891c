"""The tiers of all worlds that a test has made are closed at its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiers.world import close_all


@pytest.fixture(autouse=True)
def _closing() -> Iterator[None]:
    yield
    close_all()
