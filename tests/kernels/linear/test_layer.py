"""`pagedkv.linear`: which rows our operation computes, and that it is torch's linear layer in all else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from pagedkv import linear
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu as extension
from pagedkv.kernels.linear import cpu
from tests.kernels.conftest import Names

pytestmark = [
    pytest.mark.skipif(bool(extension.missing()), reason="the C++ extension is not built"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning"),  # torch.func calls it
]


@pytest.fixture
def calls(monkeypatch: Any) -> list[int]:
    """The rows of each call of our operation."""
    found, computed = [], cpu.Native._linear

    def noted(self: Any, mode: str, x: Tensor, *rest: Any) -> Tensor:
        found.append(len(x))
        return computed(self, mode, x, *rest)

    monkeypatch.setattr(cpu.Native, "_linear", noted)
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
    assert weights.grad.equal(x.sum(0).expand(40, 96))
    alone = torch.nn.Parameter(b)  # a bias alone may have a gradient
    linear(x, w, alone).sum().backward()
    assert calls == [2, 2]
    assert alone.grad.equal(torch.full((40,), 2.0))


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


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_calls_one_operator(backend: str, calls: list[int]) -> None:
    _, w, b = operands(1)
    compiled = torch.compile(lambda x: linear(x, w, b).relu(), backend=backend, fullgraph=True, dynamic=True)
    for num_rows in (4, 7, 40):
        x, _, _ = operands(num_rows)
        assert compiled(x).equal(linear(x, w, b).relu())
    assert calls == [4, 4, 7, 7]


@pytest.mark.parametrize("shape", [(95,), (2, 97), ()])
def test_columns_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    _, w, b = operands(1)
    with pytest.raises(InvalidRequest, match=r"give x \[\.\.\., K\] and weights \[N, K\]"):
        linear(torch.zeros(shape), w, b)
    with pytest.raises(InvalidRequest, match=r"give x \[\.\.\., K\] and weights \[N, K\]"):
        linear(torch.zeros(shape), torch.zeros(shape[-1:]))


def test_strided_rows_are_read_where_they_are() -> None:
    x, w, b = operands(4, 2)
    assert linear(x[:, 1], w, b).equal(linear(x[:, 1].contiguous(), w, b))
    assert linear(x.transpose(0, 1), w, b).equal(linear(x, w, b).transpose(0, 1))


# -- calls that torch must see -----------------------------------------------------------------------------------------


def test_a_negative_view_is_read_with_its_sign() -> None:
    x, w, b = operands(2)
    for given in ((-x, w, b), (x, -w, b), (x, w, -b)):
        views = [torch._neg_view(-t) if t is not s else t for t, s in zip(given, (x, w, b), strict=True)]
        torch.testing.assert_close(linear(*views), F.linear(*given), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_transforms_of_torch_func_are_torchs(place: int, calls: list[int]) -> None:
    given = operands(2)

    def changed(function: Any) -> Any:
        return lambda t: function(*given[:place], t, *given[place + 1 :])

    one, many = given[place], torch.stack([given[place], -given[place]])
    for transform in (
        lambda f: torch.func.vmap(f)(many),
        lambda f: torch.func.grad(lambda t: f(t).sum())(one),
        lambda f: torch.func.jvp(f, (one,), (one,))[1],
    ):
        torch.testing.assert_close(transform(changed(linear)), transform(changed(F.linear)))
    assert calls == []


def test_a_derivative_of_forward_mode_is_kept() -> None:
    x, w, b = operands(2)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, x), w, b)).tangent
    torch.testing.assert_close(found, F.linear(x, w))


def test_a_trace_has_the_operation() -> None:
    x, w, b = operands(2)
    traced = make_fx(lambda x: linear(x, w, b))(x)
    assert traced(-x).equal(linear(-x, w, b))


def test_modes_and_the_profiler_see_one_operator() -> None:
    x, w, b = operands(2)
    with Names() as names:
        linear(x, w, b)
    assert names.seen == ["pagedkv.linear.default"]
    with torch.profiler.profile() as profiler:
        linear(x, w, b)
    assert "pagedkv::linear" in [event.key for event in profiler.key_averages()]


class Quantised(Tensor):
    """Weights that compute for themselves, as those of torchao: they know torch's operators alone."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.namespace == "aten"
        return function(*(x.held if isinstance(x, Quantised) else x for x in args), **(kwargs or {}))


def test_weights_that_compute_for_themselves_are_torchs(calls: list[int]) -> None:
    x, w, _ = operands(2)
    with torch.profiler.profile():  # which would see our operator otherwise
        found = linear(x, Quantised(w))
    assert found.equal(F.linear(x, w))
    assert calls == []


# -- the choice --------------------------------------------------------------------------------------------------------


def test_a_change_of_the_environment_and_of_threads_acts_at_once(monkeypatch: Any) -> None:
    x, w, b = operands(2)
    made = []
    monkeypatch.setattr(cpu.Native, "_linear", lambda self, _, x, *rest: made.append(self) or x @ w.T)
    before = torch.get_num_threads()
    linear(x, w, b)
    try:
        torch.set_num_threads(before + 1)
        linear(x, w, b)
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", "3")
        linear(x, w, b)
        monkeypatch.setenv("PAGEDKV_CPU_ISA", "portable")
        linear(x, w, b)
        monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
        linear(x, w, b)
        monkeypatch.setenv("PAGEDKV_KERNELS", "cpu")
        monkeypatch.setenv("PAGEDKV_CPU_ISA", "none")
        with pytest.raises(InvalidRequest, match="PAGEDKV_CPU_ISA"):
            linear(x, w, b)
    finally:
        torch.set_num_threads(before)
    assert [ops._threads for ops in made] == [before, before + 1, 3, 3]
    assert made[-1]._isa == "portable"
