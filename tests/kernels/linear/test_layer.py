"""`pagedkv.linear`: which rows our operation computes, and that it is torch's linear layer in all else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv import linear
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu as extension
from pagedkv.kernels.linear import cpu

pytestmark = pytest.mark.skipif(bool(extension.missing()), reason="the C++ extension is not built")


@pytest.fixture
def calls(monkeypatch: Any) -> list[int]:
    """The rows of each call of our operation."""
    found, computed = [], cpu.Body._linear

    def noted(self: Any, mode: str, x: Tensor, *rest: Any) -> Tensor:
        found.append(len(x))
        return computed(self, mode, x, *rest)

    monkeypatch.setattr(cpu.Body, "_linear", noted)
    return found


def operands(*leading: int, k: int = 96, n: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(*shape).to(dtype) for shape in ((*leading, k), (n, k), (n,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("leading", [(), (1,), (2, 1), (3, 2, 5), (32,)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_are_ours_and_as_exact(
    leading: tuple[int, ...], dtype: torch.dtype, has_bias: bool, calls: list[int]
) -> None:
    x, w, b = operands(*leading, dtype=dtype)
    bias = b if has_bias else None
    found = linear(x, w, bias)
    truth = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    assert found.shape == truth.shape
    assert found.dtype == dtype
    error, torchs = ((y.double() - truth).abs().max() for y in (found, F.linear(x, w, bias)))
    assert error <= 2 * torchs + 1e-6
    assert calls == [max(1, x.numel() // 96)]


def test_parameters_are_served_without_gradients(calls: list[int]) -> None:
    x, w, b = operands(2)
    weights, bias = torch.nn.Parameter(w), torch.nn.Parameter(b)
    with torch.no_grad():
        assert linear(x, weights, bias).equal(linear(x, w, b))
    assert calls == [2, 2]
    linear(x, weights, bias).sum().backward()
    assert calls == [2, 2]
    assert weights.grad is not None
    assert weights.grad.equal(x.sum(0).expand(40, 96))


@pytest.mark.parametrize("case", ["33 rows", "float64", "autocast", "reference", "columns", "empty", "no columns"])
def test_what_torch_computes(case: str, calls: list[int], monkeypatch: Any) -> None:
    x, w, b = operands(33 if case == "33 rows" else 0 if case == "empty" else 4, k=0 if case == "no columns" else 96)
    if case == "float64":
        x, w, b = x.double(), w.double(), b.double()
    if case == "columns":
        w = w.t().contiguous().t()
    if case == "reference":
        monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        found, expected = linear(x, w, b), F.linear(x, w, b)
    assert found.dtype == expected.dtype
    assert found.equal(expected)
    assert calls == ([len(x)] if case in ("columns", "empty", "no columns") else [])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_calls_one_operator(backend: str, calls: list[int]) -> None:
    _, w, b = operands(1)
    compiled = torch.compile(lambda x: linear(x, w, b).relu(), backend=backend, fullgraph=True, dynamic=True)
    for num_rows in (4, 7, 40):
        x, _, _ = operands(num_rows)
        assert compiled(x).equal(linear(x, w, b).relu())
    assert calls == [4, 4, 7, 7]


def test_a_compiled_gradient_is_torchs() -> None:
    x, w, _ = operands(4)
    x.requires_grad_()
    torch.compile(lambda x: linear(x, w).sum(), backend="aot_eager", fullgraph=True)(x).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, w.sum(0).expand(4, 96))


@pytest.mark.parametrize("shape", [(95,), (2, 97), ()])
def test_columns_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    _, w, b = operands(1)
    with pytest.raises(InvalidRequest, match=r"give x \[\.\.\., K\] and weights \[N, K\]"):
        linear(torch.zeros(shape), w, b)


def test_strided_rows_are_read_where_they_are() -> None:
    x, w, b = operands(4, 2)
    assert linear(x[:, 1], w, b).equal(linear(x[:, 1].contiguous(), w, b))
    assert linear(x.transpose(0, 1), w, b).equal(linear(x, w, b).transpose(0, 1))
