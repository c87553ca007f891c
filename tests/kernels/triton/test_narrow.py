"""Keys and values of one byte or less become float16 operands, under the interpreter: no query and no scale may leave
the range of float16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pagedkv.kernels import registry
from tests.cases import Case
from tests.kernels.oracle import allowed_error, oracle, same_precision
from tests.kernels.triton.test_triton import INTERPRETER

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"), pytest.mark.usefixtures("interpreting")]
DRAFTS = Case(q_lens=(1, 3), kv_lens=(70, 40), dtype="bfloat16", layout="HND")
KINDS = ("fp8_e4m3", "fp8_e5m2/tensor", "int8/token_head", "int4/token_head")


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield
    registry._resolve.cache_clear()


@pytest.mark.parametrize(
    ("kv", "power"),
    [
        ("int4/token_head", -60),
        *(pytest.param(kv, power, marks=pytest.mark.slow) for kv in KINDS for power in (-60, 60)),
    ],
)
def test_a_power_of_two_in_the_query_is_as_good_as_in_the_scale(kv: str, power: int) -> None:
    built = replace(DRAFTS, kv=kv).build()
    right = INTERPRETER.attend(built)
    found = INTERPRETER.attend(built._replace(q=built.q * 2.0**power), scale=built.q.shape[2] ** -0.5 * 2.0**-power)
    for x, y in zip(found, right, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("power", [-60, pytest.param(60, marks=pytest.mark.slow)])
def test_a_power_of_two_in_the_scales_of_values_is_one_of_the_output(power: int) -> None:
    built = replace(DRAFTS, kv="int8/token_head").build()
    assert built.layer.v_scale is not None
    right = INTERPRETER.attend(built)[0]
    layer = replace(built.layer, v_scale=built.layer.v_scale * 2.0**power)
    assert torch.equal(INTERPRETER.attend(built._replace(layer=layer))[0], right * 2.0**power)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(torch.arange(40), id="larger"),
        pytest.param(torch.arange(40).flip(0), marks=pytest.mark.slow, id="smaller"),
        pytest.param(torch.arange(40) % 3 * 40, id="in turn"),
    ],
)
@pytest.mark.parametrize("kv", ["fp8_e4m3/token_head", pytest.param("int4/token_head", marks=pytest.mark.slow)])
def test_scales_of_values_may_differ_by_any_power_of_two(kv: str, steps: torch.Tensor) -> None:
    """Values of later tokens are larger, or smaller, or both in turn."""
    case = replace(DRAFTS, q_lens=(2,), kv_lens=(160,), kv=kv)
    built = case.build()
    scale, table = built.layer.v_scale, built.batch.block_table
    assert scale is not None
    for t in range(160):
        scale[table[0, t // 16], t % 16] *= 2.0 ** float(steps[t // 4] - 30)
    exact, low = oracle(built), same_precision(built)
    out = INTERPRETER.attend(built)[0].double().numpy()
    assert np.abs(out - exact.out).max() <= allowed_error(case, exact.out, low.out)


def test_many_weights_that_are_small_add_up() -> None:
    """One key has the weight 1, and 2000 keys have 2^-26 each, below all float16 numbers; their values are large."""
    case = Case(q_lens=(1,), kv_lens=(2001,), heads=(2, 1), dtype="bfloat16", kv="fp8_e4m3")
    built = case.build()
    layer, table = built.layer, built.batch.block_table
    at = table[0, torch.arange(2001) // 16].long(), torch.arange(2001) % 16
    layer.k.view(torch.uint8)[at] = torch.zeros(64).to(layer.k.dtype).view(torch.uint8)
    layer.v.view(torch.uint8)[at] = torch.full((64,), 448.0).to(layer.v.dtype).view(torch.uint8)
    first = table[0, 0], 0
    layer.k.view(torch.uint8)[first] = torch.full((64,), 1.0).to(layer.k.dtype).view(torch.uint8)
    layer.v.view(torch.uint8)[first] = torch.zeros(64).to(layer.v.dtype).view(torch.uint8)
    built.q[:] = 1.0
    out = INTERPRETER.attend(built, scale=26 * np.log(2) / 64)[0].double().numpy()
    right = 2000 * 448 * 2.0**-26 / (1 + 2000 * 2.0**-26)
    assert np.abs(out / right - 1).max() < 0.01
