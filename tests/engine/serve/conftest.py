"""One server for all tests of a worker that do not end it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from pagedkv.core.warm import warm_up_step
from pagedkv.engine import Engine
from tests.engine.serve.server import Server, serving


@pytest.fixture(scope="session")
def extra() -> None:
    """Require the extra, and compile what a step calls: a server would run its first steps uncompiled."""
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'pagedkv[serve]'")
    warm_up_step()


@pytest.fixture(scope="session")
def shared(extra: None) -> Iterator[Server]:
    with serving("--num-frames", 320) as server:
        yield server
        status, said = server.end()
        assert (status, said) == (0, ""), "no test left a word in its log"


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """Every test gives all frames back."""
    yield shared
    shared.wait_for_no_frame()


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    yield loaded
    while loaded.has_work:
        loaded.step()
    assert loaded.cache.stats().mapped == 0, "every frame came back"
    loaded.cache.check()
