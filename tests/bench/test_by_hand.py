"""Cases without pytest: `python -m tests.kernels.by_hand`, as `make gpu` runs them."""

from __future__ import annotations

import sys

import pytest

from tests.cases import GRID, SMALL
from tests.kernels import by_hand


def test_cases_without_pytest_are_judged_as_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(by_hand, "SMALL", SMALL[:3])
    monkeypatch.setattr(by_hand, "GRID", GRID[:1])
    monkeypatch.setattr(
        sys, "argv", ["by_hand", "--backend", "reference", "--device", "cpu", "--cases", "small", "grid", "--jobs", "2"]
    )
    assert by_hand.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 cases, 0 failed"
    monkeypatch.setattr(by_hand, "ratios", lambda *of: {"out": 0.5, "lse": float("nan")})
    monkeypatch.setattr(sys, "argv", ["by_hand", "--backend", "reference", "--device", "cpu", "--cases", "grid"])
    assert by_hand.main() == 1
