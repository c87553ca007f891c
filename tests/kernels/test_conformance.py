"""Each registered kernel keeps the contract of DESIGN section 6, on the grid of tests/cases.py: against float64, memory
poisoned."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.cases import GRID, LARGE, SMALL, Built, Case
from tests.kernels.conftest import RUNNERS
from tests.kernels.oracle import State, allowed_error, oracle, same_precision

if TYPE_CHECKING:
    from tests.kernels.conftest import Runner


@lru_cache(maxsize=2)
def right(case: Case) -> tuple[Built, State, State]:
    """The case, what is right, and what plain torch makes of it: once for all kernels."""
    built = case.build()
    return built, oracle(built), same_precision(built)


@pytest.mark.parametrize("runner", RUNNERS, indirect=True)  # all of them for a case, then the next: see `right`
@pytest.mark.parametrize(
    "case", [*SMALL, *GRID, *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE)], ids=str
)
def test_out_and_lse_are_as_right_as_plain_torch(case: Case, runner: Runner) -> None:
    built, exact, plain = right(case)

    out, lse = (x.double().numpy()[: sum(case.q_lens)] for x in runner.attend(built))

    blind = np.isneginf(exact.lse[: len(lse)])  # queries that see nothing
    assert (np.isneginf(lse) == blind).all()
    assert (out[blind] == 0).all()
    for name, got, want, yardstick in (
        ("out", out, exact.out, plain.out),
        ("lse", lse[~blind], exact.lse[: len(lse)][~blind], None),
    ):
        yardstick = plain.lse[: len(lse)][~blind] if yardstick is None else yardstick
        error, allowed = np.abs(got - want[: len(got)]).max(initial=0.0), allowed_error(case, want, yardstick)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def test_the_grid_is_hostile() -> None:
    """Of what the cases claim to contain, nothing is missing: else the law above would prove less than it says."""
    built = [case.build() for case in (*SMALL, *GRID)]
    assert any(b.layer.k.stride(1) > b.layer.k.stride(2) for b in built)
    assert any(b.layer.k.stride(1) < b.layer.k.stride(2) for b in built)
    assert all((b.batch.block_table >= len(b.layer.k)).any() for b in built if b.batch.block_table.numel())
    assert any((b.batch.block_table == -1).any() for b in built)
    assert all(b.layer.k.isnan().any() for b in built if b.layer.k.is_floating_point() and b.layer.k.element_size() > 1)
