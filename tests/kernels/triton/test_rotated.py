"""The kinds k8v4 and k5v4 under the interpreter: the rotation, the codes of values, stores, gathers, and attention."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedkv.kernels import quant, reference
from pagedkv.kernels.args import GatherCall, GatherSource, KVLayer, RotaryTable, bound_fields
from tests.cases import Case, empty_layer, write_of
from tests.kernels.conftest import INTERPRETS, Runner

if not INTERPRETS:
    pytest.skip("Triton is not installed, or its kernels belong to the GPU", allow_module_level=True)

from pagedkv.kernels.triton import backend, elements

KINDS = ("k8v4/calibrated", "k5v4/calibrated", "k5v4/token_head")
CALL = Case(kv="k5v4/calibrated", dtype="bfloat16", heads=(4, 2))


def test_each_code_is_its_level_with_fused_products_or_without() -> None:
    """A compiler may fuse any product with the sum that follows."""

    def half(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float16).astype(np.float64)

    z, slope = np.arange(16) - 7.5, elements.SLOPE.value
    for fused in itertools.product((True, False), repeat=3):
        x = np.full(16, slope[0])
        for factor, more, is_fused in zip((z * z, z * z, z), (*slope[1:], 1536.0), fused, strict=True):
            x = half((x * factor if is_fused else half(x * factor)) + more)
        assert tuple(half(x - 1536.0)) == quant.LEVELS


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kv", ["k5v4/calibrated", *(pytest.param(kv, marks=pytest.mark.slow) for kv in KINDS[::2])])
@pytest.mark.parametrize("dims", [(80, 64), *(pytest.param(d, marks=pytest.mark.slow) for d in ((8, 256), (128, 40)))])
def test_stores_and_gathers_give_the_bits_of_the_reference(kv: str, dims: tuple[int, int]) -> None:
    S, T, case = 5, 12, Case(kv=kv, dims=dims, heads=(6, 3), block_size=5)
    new = torch.randn(T, 3, dims[0]) * 3, torch.randn(T, 3, dims[1])
    for x in new:
        x[3], x[4], x[5] = 0, x[4] * 1e7, x[5] * 1e-8
        x[6, 0, 1], x[7, 1, 2] = torch.nan, torch.inf
    slots = torch.randperm(7 * S)[:T]
    slots[0] = -1
    rope = RotaryTable(torch.rand(99, 2), torch.rand(99, 2))
    statistics = torch.rand(3, 2, dims[0]) + 0.5 if kv.endswith("calibrated") else None
    layers = [replace(empty_layer(case, 7), calibration=statistics) for _ in range(2)]
    for layer, kernels in zip(layers, (backend, reference), strict=True):
        kernels.write_kv(write_of(layer, *new, slots, rope, torch.arange(T)))
    for name in ("k", "v", "k_scale", "v_scale"):
        stored, right = (getattr(layer, name) for layer in layers)
        assert torch.equal(stored.nan_to_num(7), right.nan_to_num(7)), name
    gathered = [_gathered(layers[0], kernels, dims) for kernels in (backend, reference)]
    for found, right in zip(*gathered, strict=True):
        assert torch.equal(found.nan_to_num(7), right.nan_to_num(7))


def _gathered(layer: KVLayer, kernels: object, dims: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    table = torch.tensor([[3, -1, 2], [0, 5, 1]], dtype=torch.int32)
    lens, first = torch.tensor([14, 10], dtype=torch.int32), torch.tensor([-1, 2], dtype=torch.int32)
    source = GatherSource(*bound_fields(layer, None)[:5], table, None, lens, first)
    starts = source.starts()
    out = tuple(torch.full((int(starts[-1]), 3, dim), 9.0) for dim in dims)
    kernels.gather_kv(GatherCall(source, starts, *out))  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize(
    "case",
    [
        replace(CALL, softcap=5.0, sinks=True, q_lens=(20, 3, 1), kv_lens=(60, 33, 16)),
        replace(CALL, kv="k8v4/calibrated", dims=(80, 96), alibi=True, sinks=True, window=30, punched=True),
        *(
            pytest.param(replace(CALL, kv=kv, dims=dims, dtype=dtype), marks=pytest.mark.slow)
            for kv in KINDS
            for dims, dtype in (((128, 128), "float16"), ((96, 40), "float32"), ((192, 128), "bfloat16"))
        ),
        pytest.param(replace(CALL, dims=(256, 256), q_lens=(3, 2, 1), mask="tree"), marks=pytest.mark.slow),
        pytest.param(replace(CALL, split_tokens=32, block_size=5, rows=True, padding=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention_over_rotated_keys_and_values(case: Case, interpreter: Runner) -> None:
    interpreter.check(case)
