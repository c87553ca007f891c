"""Attention whose long shares have tails: the results, and that no bit depends on which CTA takes a tail."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv.kernels import reference
from pagedkv.kernels.cuda import attention
from tests.cases import Case, call_of
from tests.kernels.cuda.emulator import COMPILER, Emulator

if TYPE_CHECKING:
    from pagedkv.kernels.args import AttentionCall

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")

LONG = Case(
    q_lens=(1, 1), kv_lens=(6000, 5900), heads=(2, 1), dims=(32, 32), dtype="bfloat16", layout="HND", sinks=True
)
"""Two units on four CTAs: each has two shares of 47 steps, the last of them with a tail of 5."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a call on a GPU of two SMs, with tails or without, and returns its result."""
    real = attention.specialise

    def run(call: AttentionCall, machine: Emulator, tails: int) -> torch.Tensor:
        monkeypatch.setattr(attention, "specialise", lambda *of: replace(real(*of), tails=tails))
        call.out.fill_(torch.nan)
        machine.attend(call)
        return call.out.clone()

    return run


def test_results_are_right_and_the_same_whether_shares_are_kept_or_computed(calls: Any) -> None:
    call, machine = call_of(LONG.build()), Emulator(2)
    want = call._replace(out=torch.empty_like(call.out), lse=torch.empty_like(call.lse))
    reference.paged_attention(want)
    first = calls(call, machine, 8)
    assert (first.float() - want.out.float()).abs().max() <= 2**-7
    assert (call.lse - want.lse).abs().max() <= 1e-4
    shorter = call._replace(seq_lens=torch.tensor([4700, 5900], dtype=torch.int32))
    for other in (call, shorter, call):
        again = calls(other, machine, 8)
        assert torch.equal(again, first) == (other is call)
    assert not torch.equal(calls(call, Emulator(2), 0), first), "tails change nothing"
