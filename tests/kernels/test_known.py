"""A call like one that was checked runs at once, with the same results; one that differs is checked, chosen for and refused as ever."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pagedkv import PagedKVError, paged_attention
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import checks, cpu, ops, reference, registry
from tests.cases import SMALL, Case
from tests.kernels.test_checks import CASE, WRONG_SHAPES, WRONG_VALUES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cases import Built

if cpu._cpu is None:
    pytest.skip(registry.KERNELS[0].refuse(registry.Case())[0], allow_module_level=True)

EXTENSION = cpu._cpu
pytestmark = pytest.mark.usefixtures("nothing_known")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that were checked since."""
    seen, check = [], checks.attention
    monkeypatch.setattr(checks, "attention", lambda call: (seen.append(call), check(call)))
    return seen


def attend(built: Built, **changes: Any) -> Any:
    return paged_attention(built.q, built.layer, built.batch, **built.options | changes)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((PagedKVError, RuntimeError, TypeError)) as why:
        call()
    return f"{type(why.value).__name__}: {why.value}"


@pytest.mark.usefixtures("way_to_read")
@pytest.mark.parametrize("case", [case for case in SMALL if case.dtype != "float64"], ids=str)
def test_a_known_call_is_not_checked_again_and_gives_the_same_bits(case: Case, checked: list[object]) -> None:
    built = case.build()
    rows = sum(case.q_lens)
    first = attend(built, return_lse=True)
    count, into = len(checked), torch.full_like(first[0], 3)
    second, third, fourth = attend(built, return_lse=True), attend(built), attend(built, out=into)
    assert len(checked) == count
    assert fourth is into
    for out in (second[0], third, fourth):
        assert torch.equal(first[0][:rows], out[:rows])
        assert (out.shape, out.dtype, out.stride()) == (first[0].shape, first[0].dtype, first[0].stride())
    assert torch.equal(first[1][:rows], second[1][:rows])
    assert (second[1].dtype, second[1].shape) == (torch.float32, first[1].shape)


@pytest.mark.usefixtures("way_to_read")
def test_a_known_call_computes_with_the_tensors_it_is_given(checked: list[object]) -> None:
    built = CASE.build()
    attend(built)
    count, other = (
        len(checked),
        built._replace(q=torch.randn_like(built.q), batch=replace(built.batch, max_seqlen_k=41)),
    )
    other.batch.seq_lens[0] -= 1
    got = attend(other)
    assert len(checked) == count  # a longer bound is no other kind of call
    assert (got - attend(other, backend="reference")).abs().max() < 1e-5
    assert not torch.equal(got, attend(built._replace(batch=other.batch)))


@pytest.mark.usefixtures("way_to_read")
def test_other_strides_of_equal_shapes_are_checked_and_obeyed(checked: list[object]) -> None:
    built = CASE.build()
    want = attend(built)
    wider = torch.full((5, 12, 64), torch.nan)
    wider[:, ::2] = built.q
    turned = built.layer.k.transpose(1, 2).contiguous().transpose(1, 2)
    for changed in (built._replace(q=wider[:, ::2]), built._replace(layer=replace(built.layer, k=turned))):
        count = len(checked)
        assert torch.equal(attend(changed), want)
        assert len(checked) == count + 1


@pytest.mark.usefixtures("way_to_read")
@pytest.mark.parametrize(("change", "text"), WRONG_SHAPES, ids=[text[:50] for _, text in WRONG_SHAPES])
def test_what_is_wrong_is_named_after_a_known_call_too(change: Callable[[Built], Built], text: str) -> None:
    built = CASE.build()
    attend(built), attend(built)
    assert text in refused(lambda: attend(change(built)))
    assert text in refused(lambda: attend(change(built)))  # what was refused is not remembered


@pytest.mark.parametrize(("change", "text"), WRONG_VALUES, ids=[text[:50] for _, text in WRONG_VALUES])
def test_values_are_looked_at_as_soon_as_debugging_asks_for_it(
    change: Callable[[Built], Built], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = CASE.build()
    attend(built)
    monkeypatch.setenv("PAGEDKV_DEBUG", "1")
    attend(built)
    assert text in refused(lambda: attend(change(built)))
    monkeypatch.setenv("PAGEDKV_DEBUG", "4")
    assert "PAGEDKV_DEBUG is '4'" in refused(lambda: attend(built))


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("PAGEDKV_KERNELS", "fats", "there is no kernel 'fats'"),
        ("PAGEDKV_CPU_ISA", "avx1024", "PAGEDKV_CPU_ISA is 'avx1024'"),
        ("PAGEDKV_NUM_THREADS", "0", "PAGEDKV_NUM_THREADS is '0'"),
        ("PAGEDKV_NUM_THREADS", "2147483648", "a number of threads, 1 to 4096"),
    ],
)
def test_a_variable_acts_between_two_calls(
    variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = CASE.build()
    attend(built), attend(built)
    monkeypatch.setenv(variable, value)
    assert text in refused(lambda: attend(built))
    monkeypatch.delenv(variable)
    attend(built)


def test_another_backend_between_two_calls_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    served, own = [], reference.paged_attention
    monkeypatch.setattr(reference, "paged_attention", lambda call: (served.append(call), own(call)))
    built = CASE.build()
    attend(built), attend(built, backend="cpu")
    attend(built, backend="reference")
    assert len(served) == 1
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    attend(built)
    assert len(served) == 2
    attend(built, backend="cpu")
    assert len(served) == 2
    monkeypatch.delenv("PAGEDKV_KERNELS")
    monkeypatch.setattr(registry, "KERNELS", registry.KERNELS[-1:])
    attend(built)
    assert len(served) == 3


@pytest.mark.parametrize(
    "options",
    [{"window": 2.5}, {"window": True}, {"causal": 1}, {"softcap": "5"}, {"sinks": True}, {"window": 1 << 70}],
    ids=str,
)
def test_an_option_of_a_wrong_type_is_refused_as_the_operator_refuses_it(options: dict[str, Any]) -> None:
    built = CASE.build()
    plain = built.options | {"window": 2, "softcap": 5.0}
    attend(built, **plain), attend(built, **plain)

    def raw() -> object:
        chosen = plain | options
        tables = (built.batch.block_table, None, built.batch.seq_lens, built.batch.cu_seqlens_q, 4, 40)
        rules = (0.125, chosen["causal"], chosen["window"], chosen["softcap"], chosen.get("sinks"), None, None, None)
        return torch.ops.pagedkv.paged_attention.default(
            built.q, built.layer.k, built.layer.v, None, None, *tables, *rules, "auto"
        )

    try:
        raw()
    except Exception as why:
        with pytest.raises(type(why)):
            attend(built, **plain | options)
    else:  # torch converts it
        assert torch.equal(raw()[0], attend(built, **plain | options))


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_watches_operators_sees_known_calls_too() -> None:
    built = CASE.build()
    attend(built), attend(built)
    with Names() as names, Functions() as functions:
        attend(built)
    assert any("pagedkv.paged_attention" in name for name in names.seen)
    assert any("pagedkv.paged_attention" in name for name in functions.seen)
    with torch.profiler.profile() as profile:
        attend(built)
    assert any(event.key == "pagedkv::paged_attention" for event in profile.key_averages())
    graph = make_fx(lambda q: attend(built._replace(q=q)))(built.q)
    assert "pagedkv.paged_attention" in graph.code


def test_autograd_hears_of_a_known_call_whose_arguments_want_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    built = CASE.build()
    attend(built), attend(built)
    asked, own = [], ops.known.again
    monkeypatch.setattr(ops.known, "again", lambda *args: (asked.append(args), own(*args))[1])  # what the operator asks
    attend(built)
    assert not asked
    wanting = built._replace(q=built.q.clone().requires_grad_())
    assert torch.equal(attend(wanting).detach(), attend(built))
    assert len(asked) == 1
    slopes = torch.zeros(6)
    attend(built, alibi_slopes=slopes), attend(built, alibi_slopes=slopes)
    assert len(asked) == 2
    attend(built, alibi_slopes=slopes.clone().requires_grad_())
    assert len(asked) == 3
    with torch.no_grad():
        attend(wanting)
    assert len(asked) == 3


def test_a_subclass_of_tensor_gets_the_call_handed_to_it() -> None:
    seen: list[str] = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    built = CASE.build()
    attend(built), attend(built)
    attend(built._replace(q=built.q.as_subclass(Mine)))
    assert any("pagedkv.paged_attention" in name for name in seen)


def test_a_tensor_without_memory_of_its_own_is_the_dispatchers() -> None:
    built = CASE.build()
    attend(built), attend(built)
    wrapped = torch._to_functional_tensor(built.q)  # a plain torch.Tensor to Python, and no address
    assert torch.equal(torch._from_functional_tensor(attend(built._replace(q=wrapped))), attend(built))


@pytest.mark.usefixtures("way_to_read")
def test_views_of_negated_memory_are_computed_with_what_they_say() -> None:
    built = CASE.build()
    want = attend(built)
    for _ in range(2):
        attend(built)
        assert torch.equal(attend(built._replace(q=torch._neg_view(-built.q))), want)
        slopes = torch.linspace(0, 1, 6)
        imaginary = torch.complex(torch.zeros(6), -slopes).conj().imag
        assert imaginary.is_neg()
        attend(built, alibi_slopes=torch.stack([slopes, slopes], -1)[:, 1])  # known, of the same strides
        assert torch.equal(attend(built, alibi_slopes=imaginary), attend(built, alibi_slopes=slopes))


def test_what_is_no_checked_call_is_refused_by_the_extension() -> None:
    with pytest.raises(TypeError, match="again takes the arguments of the operator"):
        EXTENSION.again(1, 2)
    with pytest.raises(TypeError, match="attention takes a call's fields"):
        EXTENSION.attention(1, 2)
    with pytest.raises(TypeError, match="no such instruction set"):
        EXTENSION.remember(*[None] * 23, "avx1024", 1, None)


def test_results_of_a_wrong_shape_are_refused_by_the_operator() -> None:
    built = CASE.build()
    tables = (built.batch.block_table, None, built.batch.seq_lens, built.batch.cu_seqlens_q, 4, 40)
    call = (built.q, built.layer.k, built.layer.v, None, None, *tables, 0.125, True, None, 0.0, None, None, None, None)
    for lse in (torch.zeros(5, 5), torch.zeros(5, 6, dtype=torch.float64)):
        with pytest.raises(InvalidRequest, match=r"lse is .*; it must be float32 \[T=5, H=6\]"):
            torch.ops.pagedkv.paged_attention_out.default(*call, torch.zeros(5, 6, 64), lse, "auto")
