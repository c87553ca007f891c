"""Weights of integers: their values, and what the laws of test_linear.py do not show of their operations."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.kernels import cpu as extension
from pagedkv.kernels.linear import Matrix, cpu
from tests.kernels.linear.test_linear import DTYPES, EPS, compare, isa, native, numbers, reference, wide

__all__ = ["isa", "native"]  # fixtures

KINDS = ("int8", "int4")
LARGEST = {"int8": 127, "int4": 7}
needs_extension = pytest.mark.skipif(bool(extension.missing()), reason="the C++ extension is not built")


def matrix(n: int, k: int, kind: str, seed: int = 1) -> Matrix:
    return Matrix.quantised(numbers(n, k, dtype=torch.float32, seed=seed, scale=k**-0.5), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_at_most_half_a_step_from_the_weight(kind: str) -> None:
    weights = numbers(70, 320, dtype=torch.float32)
    made = Matrix.quantised(weights, kind)
    groups, values = weights.view(70, 5, 64), made.dense(torch.float32).view(70, 5, 64)
    steps = groups.abs().amax(-1, keepdim=True) / LARGEST[kind]
    assert ((values - groups).abs() <= 0.5001 * steps).all()
    torch.testing.assert_close(made.scales, steps[..., 0])
    assert (len(made), made.num_columns) == (70, 320)
    assert made.nbytes == 70 * (320 if kind == "int8" else 160) + 70 * 5 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_integers_times_scales_survive(kind: str) -> None:
    integers = torch.randint(-LARGEST[kind], LARGEST[kind] + 1, (9, 3, 64))
    integers[..., 0] = LARGEST[kind]
    weights = (integers * torch.tensor([0.5, 2.0, 0.0])[:, None]).flatten(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(Matrix.quantised(weights, kind).dense(dtype), weights.to(dtype))


def test_rows_are_stored_in_parts() -> None:
    weights = numbers(20_000, 64, dtype=torch.bfloat16)  # more than a piece
    whole = Matrix.quantised(weights, "int8")
    parts = Matrix(torch.empty_like(whole.stored), torch.empty_like(whole.scales))
    for first, end in ((7000, 20_000), (0, 7000)):
        parts.store(first, weights[first:end])
    assert torch.equal(parts.stored, whole.stored)
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_is_no_number_becomes_nan(kind: str, bad: float) -> None:
    weights = numbers(2, 128, dtype=torch.float32)
    weights[1, 70] = bad
    values = Matrix.quantised(weights, kind).dense(torch.float32)
    assert values[1, 64:].isnan().all()
    assert values[0].isfinite().all()
    assert values[1, :64].isfinite().all()


@needs_extension
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_integer_in_every_column_is_multiplied(native: cpu.Native, dtype: torch.dtype, kind: str) -> None:
    """For an x that is 1 in one column, y is that column of W."""
    largest = LARGEST[kind]
    integers = (torch.arange(2 * largest + 1)[:, None] + torch.arange(128)) % (2 * largest + 1) - largest
    weights = Matrix.quantised(integers.float(), kind)
    weights.scales.fill_(1.0)
    stored = integers.to(torch.int8)
    weights.stored.copy_(stored if kind == "int8" else (stored[:, ::2] + 8) | (stored[:, 1::2] + 8) << 4)
    for first in range(0, 128, 32):
        x = torch.eye(128, dtype=dtype)[first : first + 32]
        assert torch.equal(
            native.norm_linear(x, None, weights, None, EPS).float(), integers.float().T[first : first + 32]
        )


@needs_extension
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_x_may_be_far_from_zero_and_have_tiny_groups(native: cpu.Native, dtype: torch.dtype, kind: str) -> None:
    """AVX2 multiplies int4 + 8 and subtracts 8 times the sum of x."""
    x, weights = 100.0 + numbers(3, 1344, dtype=dtype), matrix(34, 1344, kind)
    compare(native.norm_linear, reference.norm_linear, x, None, weights, None, EPS, dtype=dtype)
    if dtype != torch.float16:
        x[:, 64:128] *= 1e-37
        x[:, 128:192] = 0.0
        compare(native.norm_linear, reference.norm_linear, x, None, weights, None, EPS, dtype=dtype)


@needs_extension
@pytest.mark.parametrize("kind", KINDS)
def test_avx_vnni_gives_the_bits_of_avx2(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx2_vnni" not in extension.extension().sets():
        pytest.skip("not run: this processor has no AVX-VNNI, or the set is not compiled")
    x, weights, found = numbers(11, 1344, dtype=torch.bfloat16), matrix(34, 1344, kind), []
    for name in ("avx2_vnni", "avx2"):
        monkeypatch.setenv("PAGEDKV_CPU_ISA", name)
        found.append(cpu.Native().norm_linear(x, None, weights, None, EPS))
    assert torch.equal(*found)


@needs_extension
@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump here")
def test_the_set_of_avx_vnni_has_its_instruction() -> None:
    """Processors without AVX-512 know only the form with a VEX prefix."""
    path = Path(extension.extension().__file__)
    if b"avx2_vnni" not in path.read_bytes():
        pytest.skip("this build has no set avx2_vnni")
    code = subprocess.run(["objdump", "-d", path], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert code.count("{vex} vpdpwssd") > 100
    assert not re.search(r"\tvpdpwssd .*%ymm", code)


@needs_extension
def test_calls_that_cpp_refuses_are_answered_by_the_definition() -> None:
    x, weights = numbers(3, 128, dtype=torch.float32), matrix(10, 128, "int8")
    wanted = reference.norm_linear(x, None, weights, None, EPS)
    columns = Matrix(weights.stored.T.contiguous().T, weights.scales)  # rows are no runs
    halved = Matrix(weights.stored, weights.scales.double())
    for other in (columns, halved):
        torch.testing.assert_close(cpu.Native().norm_linear(x, None, other, None, EPS), wanted)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        cpu.Native().norm_linear(x[:, :64], None, weights, None, EPS)


def test_the_definition_rounds_the_values_to_the_dtype_of_x() -> None:
    x, weights = numbers(3, 128, dtype=torch.bfloat16), matrix(10, 128, "int4")
    given: Any = (x, None, weights.dense(torch.bfloat16), None, EPS)
    assert torch.equal(reference.norm_linear(x, None, weights, None, EPS), reference.norm_linear(*given))
    exact = reference.norm_linear(*wide((x, None, weights)), None, EPS)
    assert exact.dtype == torch.float64
