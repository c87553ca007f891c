"""Each registered kernel keeps the contract of DESIGN section 6, on the grid of tests/cases.py: against float64, memory
poisoned."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.cases import GRID, LARGE, MASKS, SMALL, Case
from tests.kernels.conftest import RUNNERS, SETS, Runner, param

if TYPE_CHECKING:
    from collections.abc import Iterator

_DRAFTS = Case(q_lens=(1, 4, 3), kv_lens=(70, 4, 33))
_NARROW = replace(_DRAFTS, dtype="bfloat16", layout="HND")
_LATENT = Case(q_lens=(2, 1), kv_lens=(40, 9), heads=(16, 1), dims=(576, 512), dtype="bfloat16")
SAMPLE = (
    Case(),
    Case(q_lens=(1,), kv_lens=(0,)),
    Case(q_lens=(3, 0, 4), kv_lens=(2, 5, 17), heads=(5, 1), sinks=True, mask="all"),
    replace(_NARROW, heads=(28, 4), dims=(80, 80), block_size=5, layout="mixed", window=20, alibi=True),
    replace(_DRAFTS, dims=(192, 128), block_size=64, dtype="float16", layout="HND", mask="tree", softcap=50.0),
    replace(_DRAFTS, block_size=4, punched=True, sinks=True, rows=True, padding=2, split_tokens=32),
    *(replace(_NARROW, kv=kv) for kv in ("fp8_e4m3/tensor", "fp8_e5m2/token_head", "int8/token_head")),
    replace(_DRAFTS, dtype="float16", kv="k8v4/calibrated", dims=(96, 96), mask="all", window=64, split_tokens=100),
    replace(_LATENT, layout="mla", kv="fp8_e4m3/token_head"),
    replace(_NARROW, kv="k5v4/calibrated", dims=(64, 64), softcap=50.0, sinks=True),
    Case(q_lens=(1, 33), kv_lens=(130, 50), heads=(4, 1), dtype="bfloat16", sinks=True),
    Case(q_lens=(20,), kv_lens=(150,), heads=(2, 1), window=30, block_size=128, alibi=True),
    Case((17, 2, 40), (30, 2, 40), heads=(7, 1), mask="tree", kv="k5v4/token_head", punched=True, rows=True, padding=1),
    Case(q_lens=(1, 2, 0, 1, 1), kv_lens=(200, 33, 7, 64, 0), heads=(2, 1), window=150, sinks=True),
    *MASKS,
    # the first position is -28; the position less the window must not overflow
    Case(q_lens=(7, 40, 3), kv_lens=(132, 12, 2), mask="all", window=2**31 - 1, split_tokens=16),
)
"""Every feature, most of them with others, in shapes that take the emulator and the interpreter little time."""


def jobs() -> Iterator[Any]:
    """Yield (case, runner): all runners of a case, then the next, as `solved` keeps the last.

    Quick are the small cases and a third of the grid; with the emulator a third of the sample, and with the
    interpreter another third. Instruction sets other than the best of this processor are quick with small cases.
    """
    sets = [param(Runner("cpu", way=name)) for name in SETS[1:]]
    for number, case in enumerate(dict.fromkeys((*SMALL, *SAMPLE, *GRID, *LARGE))):
        for each in [*RUNNERS, *sets]:
            (runner,) = each.values
            if runner.is_slow:
                is_quick = case in SAMPLE[runner.backend == "triton" :: 3]
            else:
                is_quick = case in SMALL or (case in GRID and number % 3 == 0 and not runner.way)
            marks = [*each.marks, *[pytest.mark.slow] * (not is_quick)]
            yield pytest.param(case, runner, id=f"{case}-{runner}", marks=marks)


@pytest.mark.parametrize(("case", "runner"), list(jobs()), indirect=["runner"])
def test_out_and_lse_are_as_right_as_plain_torch(case: Case, runner: Runner) -> None:
    runner.check(case)


def test_the_grid_is_hostile() -> None:
    """Of what the cases claim to contain, nothing is missing: else the law above would prove less than it says."""
    built = [case.build() for case in (*SMALL, *GRID)]
    assert any(b.layer.k.stride(1) > b.layer.k.stride(2) for b in built)
    assert any(b.layer.k.stride(1) < b.layer.k.stride(2) for b in built)
    assert all((b.batch.block_table >= len(b.layer.k)).any() for b in built if b.batch.block_table.numel())
    assert any((b.batch.block_table == -1).any() for b in built)
    assert all(b.layer.k.isnan().any() for b in built if b.layer.k.is_floating_point() and b.layer.k.element_size() > 1)
