"""The attention kernel in the emulator, where the cases of every backend show too little: long contexts, many CTAs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkv.kernels import registry
from pagedkv.kernels.cuda import attention, backend
from tests.cases import GRID, LARGE, SMALL, Case, call_of
from tests.kernels import by_hand
from tests.kernels.cuda.emulator import COMPILER, Emulator
from tests.kernels.oracle import assert_right, oracle, same_precision

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")


def test_every_case_of_the_shared_grid_is_served() -> None:
    """A kernel that objects would skip the case."""
    for case in (*SMALL, *GRID, *LARGE):
        asked = registry.Case(dtype=case.dtype, head_dim=case.dims[0], head_dim_v=case.dims[1])
        assert backend.case_objections(asked) == []


def check(case: Case, machine: Emulator, sharpness: float = 1.0) -> None:
    """Compare with the oracle. sharpness: a factor of all scores; a real model's are sharper than random ones."""
    built = case.build()
    built.q.mul_(sharpness)
    call = call_of(built)
    machine.attend(call)
    assert call.out[sum(case.q_lens) :].isnan().all(), "rows of padding are written"
    assert_right(case, (call.out, call.lse), oracle(built), same_precision(built))


LONG = Case(q_lens=(1, 1), kv_lens=(900, 500), heads=(4, 1), dtype="bfloat16", layout="HND")


@pytest.mark.parametrize(
    ("case", "num_sms"),
    [
        pytest.param(LONG, 2, marks=pytest.mark.slow),
        *(pytest.param(replace(LONG, kv=kv), 2, marks=pytest.mark.slow) for kv in ("fp8_e4m3", "int8/token_head")),
        pytest.param(replace(LONG, dims=(128, 128), split_tokens=512), 2, marks=pytest.mark.slow),
        *(
            pytest.param(
                Case((1, 5), (32768, 700), heads=(8, 1), dims=(128, 128), dtype="bfloat16", kv=kv, layout="HND"),
                16,
                marks=pytest.mark.slow,
            )
            for kv in ("", "fp8_e4m3/token_head")
        ),
    ],
    ids=str,
)
def test_long_contexts_with_sharp_scores_are_as_accurate_in_several_pieces(case: Case, num_sms: int) -> None:
    """Each CTA goes several times round its stages, and units have several pieces."""
    check(case, Emulator(num_sms), sharpness=6.0)


def test_the_order_of_ctas_and_threads_changes_no_bit_of_a_merge() -> None:
    call, results = call_of(replace(LONG, kv_lens=(500, 90)).build()), []
    for seed in range(4):
        Emulator(4, seed=seed).attend(call)
        results.append((call.out.clone(), call.lse.clone()))
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def has_several_wide_teams(kernel: Any) -> bool:
    """Return whether a CTA of this kernel has several teams of several warps."""
    return kernel.warps_m * kernel.warps_d > 1 and kernel.warps_n > 1


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((5,), (70,), heads=(8, 2)), marks=pytest.mark.slow),
        pytest.param(Case((1,), (70,), dims=(192, 128)), marks=pytest.mark.slow),
        pytest.param(next(case for case in SMALL if case.layout == "mla"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_team_of_several_warps_is_as_accurate(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """racecheck runs such kernels, see docs/explanation/cuda-kernels.md."""
    machine = Emulator()
    launches = attention._launches_of(call_of(case.build()), machine)
    assert any(has_several_wide_teams(launch.kernel) for launch in launches)
    monkeypatch.setattr(attention, "specialise", attention.specialise)  # the code's own, after the test
    by_hand.use_one_team()
    check(case, machine)
    assert machine.launches
    assert not any(map(has_several_wide_teams, machine.launches))
