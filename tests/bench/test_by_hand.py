"""Cases without pytest: `python -m tests.kernels.by_hand`, as `make gpu` runs them."""

from __future__ import annotations

import sys

import pytest

from pagedkv.bench.gpu import timing
from tests.cases import GRID, SMALL, Case
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


def test_cases_for_racecheck_run_with_one_team(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def ratios(case: Case, *_: object) -> dict[str, float]:
        calls.append("case")
        return {}

    monkeypatch.setattr(by_hand, "use_one_team", lambda: calls.append("one team"))
    monkeypatch.setattr(by_hand, "ratios", ratios)
    monkeypatch.setattr(by_hand, "SMALL", SMALL[:1])
    monkeypatch.setattr(sys, "argv", ["by_hand", "--one-team", "--cases", "small"])
    assert by_hand.main() == 0
    assert calls == ["one team", "case"]


def test_cases_after_a_gpu_error_count_as_lost_and_the_compilers_log_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> dict[str, float]:
        why = RuntimeError("CUDA error: an illegal memory access was encountered")
        why.add_note("paged_attention.cuh(7): error: of the compiler")
        raise why

    monkeypatch.setattr(by_hand, "_lost", [])
    monkeypatch.setattr(by_hand, "ratios", broken)
    good, line = by_hand.judged((SMALL[0], "cuda", "cuda"))
    assert not good
    assert line.endswith("of the compiler")
    good, line = by_hand.judged((SMALL[1], "cuda", "cuda"))
    assert not good
    assert line.startswith("LOST")
    assert str(SMALL[0]) in line
    assert timing.error_line(KernelUnavailableWithNotes()) == "KernelUnavailableWithNotes: no; the compiler says why"


class KernelUnavailableWithNotes(Exception):
    def __init__(self) -> None:
        super().__init__("no\nand more")
        self.add_note("the compiler says why\nand where")
