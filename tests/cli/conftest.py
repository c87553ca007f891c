"""`pagedkv` run inside this process, so that each test saves the seconds of an import of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest

from pagedkv.cli.app import main
from pagedkv.core.warm import warm_up_step


class Outcome(NamedTuple):
    status: object
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile what a step calls: else the first command here would run it uncompiled, and the tests after it."""
    warm_up_step()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `pagedkv` with the arguments given. Its stdin is empty."""
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: real(fd) if fd else os.stat(os.devnull))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*argv: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in argv])
        return Outcome(end.value.code, *capsys.readouterr())

    return run
