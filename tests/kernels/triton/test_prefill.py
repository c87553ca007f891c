"""The Triton prefill kernel under the interpreter, where one call of the contract does not show a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cases import Case, call_of
from tests.kernels.oracle import oracle
from tests.kernels.triton.test_triton import backend, prefill

CHUNKS = Case(q_lens=(20, 3, 33), kv_lens=(150, 40, 133), heads=(4, 2), sinks=True)


@pytest.mark.parametrize("splits", [1, 4])
def test_sequences_that_are_left_out_keep_their_rows(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
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
