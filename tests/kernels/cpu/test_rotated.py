"""Rotated keys and values on each instruction set: all numbers of rows in a pass, and sums as large as they can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedkv.kernels import ops, quant
from tests.cases import Case
from tests.kernels.conftest import SETS, Runner
from tests.kernels.oracle import assert_right, oracle, same_precision

KINDS = ("k8v4/calibrated", "k5v4/calibrated")
CASE = Case(kv_lens=(300, 16, 33), dtype="bfloat16")
SHAPES = [
    *(replace(CASE, heads=(2 * G, 2), block_size=16 if G % 2 else 128) for G in range(1, 9)),
    *(replace(CASE, heads=(8, 2), dims=dims) for dims in ((80, 80), (96, 64), (128, 128), (192, 128), (256, 256))),
    replace(CASE, q_lens=(40, 3, 5), dims=(128, 64), block_size=5, softcap=5.0, sinks=True),
    replace(CASE, q_lens=(2, 5, 1), heads=(8, 1), window=20, alibi=True, split_tokens=32, punched=True),
]


@pytest.mark.parametrize("case", [replace(case, kv=kv) for kv in KINDS for case in SHAPES], ids=str)
def test_a_centre_far_from_0_costs_no_digits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    built = case.build()
    assert built.layer.calibration is not None
    built.layer.calibration[:, 0] *= 5
    right, low = oracle(built), same_precision(built)
    for isa in SETS:
        runner = Runner("cpu", way=isa)
        runner.prepare(monkeypatch)
        assert_right(case, runner.attend(built), right, low)


@pytest.mark.parametrize("kind", ["k8v4", "k5v4"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_no_sum_of_integers_is_too_large(kind: str, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All integers of the keys and of the query are as large as they can be."""
    built = Case(heads=(4, 1), dims=(D, D), dtype="bfloat16", kv=f"{kind}/token_head").build()
    layer = built.layer
    assert layer.k_scale is not None
    layer.k.fill_(127 if kind == "k8v4" else 0xFF)
    layer.k_scale.fill_(0.001)
    q = quant.rotate(torch.ones(3, 4, D) * torch.tensor([1.0, -1.0, 0.5, -0.25])[:, None], back=True).bfloat16()
    want = ops.paged_attention(q, layer, built.batch, return_lse=True, backend="reference")
    for isa in SETS:
        monkeypatch.setenv("PAGEDKV_CPU_ISA", isa)
        got = ops.paged_attention(q, layer, built.batch, return_lse=True, backend="cpu")
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
