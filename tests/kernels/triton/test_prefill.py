"""The Triton prefill kernel under the interpreter, where one call of the contract does not show a case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.cases import Case, call_of
from tests.kernels.conftest import Runner
from tests.kernels.oracle import oracle
from tests.kernels.triton.test_triton import backend, prefill, sized_for, tuning

CHUNKS = Case(q_lens=(20, 3, 33), kv_lens=(150, 40, 133), heads=(4, 2), sinks=True)


@pytest.mark.parametrize(
    "case",
    [
        replace(CHUNKS, punched=True, block_size=4, dtype="bfloat16"),
        pytest.param(replace(CHUNKS, punched=True, block_size=64, dtype="float16", rows=True), marks=pytest.mark.slow),
        pytest.param(replace(CHUNKS, softcap=20.0, alibi=True, dtype="bfloat16"), marks=pytest.mark.slow),
        pytest.param(replace(CHUNKS, mask="some", punched=True, dtype="bfloat16"), marks=pytest.mark.slow),
        pytest.param(replace(CHUNKS, mask="all", window=(None, 4), punched=True), marks=pytest.mark.slow),
        pytest.param(
            replace(CHUNKS, q_lens=(20, 3, 90), kv_lens=(150, 40, 3), mask="all", kv="int8/token_head", punched=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_tiles_that_all_rows_see_are_computed_like_the_masked_ones(case: Case, interpreter: Runner) -> None:
    interpreter.check(case)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.usefixtures("interpreter")
def test_sequences_that_are_left_out_keep_their_rows(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "num_splits", lambda *sizes: splits)
    built = CHUNKS.build()
    call = call_of(built)
    call.out.fill_(7.0), call.lse.fill_(7.0)
    backend.attend_only(call, torch.tensor([0, 2, 1], dtype=torch.int32))
    assert (call.out[:20] == 7).all()
    assert (call.lse[:20] == 7).all()
    exact = oracle(built)
    assert np.abs(call.out[20:].double().numpy() - exact.out[20:]).max() <= 2e-6
    assert np.abs(call.lse[20:].double().numpy() - exact.lse[20:]).max() <= 1e-5


TREES = Case(q_lens=(20, 3, 90), kv_lens=(150, 40, 90), heads=(4, 2), mask="tree", dtype="bfloat16", split_tokens=100)


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (replace(TREES, kv="int8/token_head", window=60, q_lens=(20, 3, 40)), "sm_90"),
        *(
            pytest.param(case, arch, marks=pytest.mark.slow)
            for arch in (tuning.INTERPRETER, "sm_90")
            for case in (
                TREES,
                replace(TREES, punched=True, block_size=4, rows=True, padding=2, sinks=True),
                replace(TREES, heads=(8, 1), q_lens=(8, 3, 17), softcap=20.0),
            )
        ),
    ],
    ids=str,
)
def test_a_tree_mask_with_split_tokens_keeps_the_contract(
    case: Case, arch: str, interpreter: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word of 32 or of 64 bits holds what a row may see of a tile."""
    sized_for(arch, monkeypatch)
    interpreter.check(case)
