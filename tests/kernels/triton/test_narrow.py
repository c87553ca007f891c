"""Keys and values of one byte or less become float16 operands, under the interpreter: no query and no scale may leave
the range of float16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.cases import Case

if TYPE_CHECKING:
    from tests.kernels.conftest import Runner

DRAFTS = Case(q_lens=(1, 3), kv_lens=(70, 40), dtype="bfloat16", layout="HND")
KINDS = ("fp8_e4m3", "fp8_e5m2/tensor", "int8/token_head", "k5v4/token_head")


@pytest.mark.parametrize(
    ("kv", "power"),
    [
        ("k5v4/token_head", -60),
        *(pytest.param(kv, power, marks=pytest.mark.slow) for kv in KINDS for power in (-60, 60)),
    ],
)
def test_a_power_of_two_in_the_query_is_as_good_as_in_the_scale(kv: str, power: int, interpreter: Runner) -> None:
    built = replace(DRAFTS, kv=kv).build()
    right = interpreter.attend(built)
    found = interpreter.attend(built._replace(q=built.q * 2.0**power), scale=built.q.shape[2] ** -0.5 * 2.0**-power)
    for x, y in zip(found, right, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("power", [-6, pytest.param(16, marks=pytest.mark.slow)])
def test_a_power_of_two_in_the_scales_of_values_is_one_of_the_output(power: int, interpreter: Runner) -> None:
    built = replace(DRAFTS, kv="int8/token_head").build()
    right = interpreter.attend(built)[0]
    layer = replace(built.layer, v_scale=built.layer.v_scale * 2.0**power)
    assert torch.equal(interpreter.attend(built._replace(layer=layer))[0], right * 2.0**power)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(torch.arange(40) // 2, marks=pytest.mark.slow, id="larger"),
        pytest.param(torch.arange(40).flip(0) // 2, marks=pytest.mark.slow, id="smaller"),
        pytest.param(torch.arange(40) % 3 * 12, id="in turn"),
    ],
)
@pytest.mark.parametrize("kv", ["fp8_e4m3/token_head", pytest.param("k5v4/token_head", marks=pytest.mark.slow)])
def test_scales_of_values_may_differ_by_any_power_of_two(kv: str, steps: torch.Tensor, interpreter: Runner) -> None:
    """Values of later tokens are larger, or smaller, or both in turn."""
    case = replace(DRAFTS, q_lens=(2,), kv_lens=(160,), kv=kv)
    built = case.build()
    scale, table = built.layer.v_scale, built.batch.block_table
    for t in range(160):
        scale[table[0, t // 16], t % 16] *= 2.0 ** float(steps[t // 4] - 12)
    interpreter.check(case, built)
