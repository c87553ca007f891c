"""Bound and functional attention calls: equal results, equal errors, and torch sees each call that it observes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from pagedkv import KVLayer, PagedKVError, bind_attention, paged_attention
from pagedkv.errors import InvalidRequest, KernelUnavailable
from pagedkv.kernels import bound, checks, cpu, reference, registry
from pagedkv.kernels.args import AttentionCall
from tests.cases import SMALL, Built, Case
from tests.kernels.conftest import Names
from tests.kernels.test_checks import CASE, WRONG_SHAPES, WRONG_VALUES

if TYPE_CHECKING:
    from collections.abc import Callable

if cpu._cpu is None:
    pytest.skip(registry.KERNELS[0].refuse(registry.Case())[0], allow_module_level=True)

PER_CALL = ("tree_mask", "out", "return_lse")
pytestmark = pytest.mark.usefixtures("unbound")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that the operator checked since."""
    seen, check = [], checks.attention
    monkeypatch.setattr(checks, "attention", lambda call: (seen.append(call), check(call)))
    return seen


def functional(built: Built, **changes: Any) -> Any:
    return paged_attention(built.q, built.layer, built.batch, **built.options | changes)


def bind(built: Built, **changes: Any) -> Callable[..., Any]:
    """Return the bound call of a case: it takes another case of the same layer and options, and arguments of a call."""
    options = built.options | changes
    attend = bind_attention(built.layer, **{name: x for name, x in options.items() if name not in PER_CALL})
    usual = {name: x for name, x in options.items() if name in PER_CALL}
    return lambda other=built, **changes: attend(other.q, other.batch, **usual | changes)


def attend_bound(built: Built, **changes: Any) -> Any:
    return bind(built, **changes)()


def bound_functional(built: Built, **changes: Any) -> Any:
    """Make a functional call that a bound call serves: the third of equal calls on one layer."""
    for _ in range(2):
        functional(built, **changes)
    return functional(built, **changes)


WAYS = {"bound": attend_bound, "functional": bound_functional}
each_way = pytest.mark.parametrize("attend", WAYS.values(), ids=WAYS.keys())


def prepared(attend: Callable[..., Any], built: Built) -> Callable[..., Any]:
    """Return one call of a way, without the calls before it."""
    return bind(built) if attend is attend_bound else partial(functional, built)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((PagedKVError, RuntimeError, TypeError)) as why:
        call()
    return f"{type(why.value).__name__}: {why.value}"


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("case", [case for case in SMALL if case.dtype != "float64"], ids=str)
def test_a_bound_call_gives_the_bits_of_the_operator_and_is_not_checked_by_it(
    case: Case, checked: list[object]
) -> None:
    built, rows = case.build(), sum(case.q_lens)
    first = functional(built, return_lse=True)
    count, into, attend = len(checked), torch.full_like(first[0], 3), bind(built)
    for again in (attend, partial(functional, built)):
        second, third, fourth = again(return_lse=True), again(), again(out=into)
        assert fourth is into
        for out in (second[0], third, fourth):
            assert torch.equal(first[0][:rows], out[:rows])
            assert (out.shape, out.dtype, out.stride()) == (first[0].shape, first[0].dtype, first[0].stride())
        assert torch.equal(first[1][:rows], second[1][:rows])
        assert (second[1].dtype, second[1].shape) == (torch.float32, first[1].shape)
    assert len(checked) == count


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("backend", ["numba", "reference", "cpu"])
def test_every_kernel_serves_bound_calls_with_the_tensors_it_is_given(backend: str, checked: list[object]) -> None:
    built = CASE.build()
    attend = bind(built, backend=backend)
    wider = torch.full((5, 12, 64), torch.nan)
    wider[:, ::2] = torch.randn_like(built.q)
    others = [built._replace(q=wider[:, ::2]), built._replace(batch=replace(built.batch, max_seqlen_k=41))]
    others[1].batch.seq_lens[0] -= 1
    for other in (built, *others):
        count = len(checked)
        got = attend(other)
        assert len(checked) == count
        assert (got - functional(other._replace(layer=replace(built.layer)), backend="reference")).abs().max() < 1e-5


@pytest.mark.usefixtures("reader")
@each_way
@pytest.mark.parametrize(("change", "text"), WRONG_SHAPES, ids=[text[:50] for _, text in WRONG_SHAPES])
def test_a_wrong_argument_is_refused_with_the_same_text(
    attend: Callable[..., Any], change: Callable[[Built], Built], text: str
) -> None:
    built = CASE.build()
    attend(built)
    for _ in range(2):
        assert text in refused(lambda: attend(change(built)))


def test_a_wrong_argument_of_a_call_is_refused_by_a_call_that_was_bound_before() -> None:
    built = CASE.build()
    attend = bind(built)
    attend()
    for change, text in WRONG_SHAPES:
        wrong = change(built)
        if wrong.layer is built.layer and set(wrong.options) <= {*built.options, *PER_CALL}:
            arguments = {name: x for name, x in wrong.options.items() if name in PER_CALL}
            if wrong.options | arguments == built.options | arguments:
                assert text in refused(lambda wrong=wrong, arguments=arguments: attend(wrong, **arguments))
    attend()


@pytest.mark.parametrize(("change", "text"), WRONG_VALUES, ids=[text[:50] for _, text in WRONG_VALUES])
def test_values_are_checked_as_soon_as_debugging_asks_for_it(
    change: Callable[[Built], Built], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = CASE.build()
    attend, wrong = bind(built), change(built)
    attend(), functional(built)
    monkeypatch.setenv("PAGEDKV_DEBUG", "1")
    attend(), functional(built)
    assert text in refused(lambda: functional(wrong))
    assert text in refused(lambda: attend(wrong))
    monkeypatch.setenv("PAGEDKV_DEBUG", "4")
    assert "PAGEDKV_DEBUG is '4'" in refused(attend)


def objection(check: Callable[[Any], None], call: object) -> str:
    """Return the text of the error that `check` raises, "" if it raises none."""
    try:
        check(call)
    except InvalidRequest as why:
        return str(why)
    return ""


def one_of(draw: st.DrawFn, good: Any, *others: Any) -> Any:
    """Draw `good` nine times out of ten."""
    return good if draw(st.integers(0, 9)) or not others else draw(st.sampled_from(others))


@st.composite
def calls(draw: st.DrawFn) -> tuple[Built, dict[str, Any]]:
    """A case, some of its arguments changed in shape, dtype, stride or number."""
    built = replace(CASE, kv=draw(st.sampled_from(["", "int8/token_head"])), rows=draw(st.booleans())).build()
    pick, q, batch = partial(one_of, draw), built.q, built.batch
    wide = torch.zeros(5, 6, 128)
    q = pick(
        q, q.half(), q.double(), q.bfloat16(), q.int(), q[0], q[:, :5], q[:, :0], q[:0], wide[..., ::2], wide[:, :, :64]
    )
    lens = pick(
        batch.seq_lens, batch.seq_lens.long(), batch.seq_lens[:1], batch.seq_lens.repeat(2)[::2], batch.seq_lens[None]
    )
    starts = pick(
        batch.cu_seqlens_q, batch.cu_seqlens_q[:2], batch.cu_seqlens_q.repeat(2)[::2], batch.cu_seqlens_q.bool()
    )
    table = pick(
        batch.block_table, batch.block_table[:1], batch.block_table.mT, batch.block_table[0], batch.block_table.long()
    )
    rows = batch.rows if batch.rows is None else pick(batch.rows, batch.rows[:1], batch.rows.long(), None)
    T, H = (*q.shape, 1, 1)[:2]
    trees = torch.ones(T, 4, dtype=torch.bool)
    tree = pick(None, trees, trees[:, :3], trees.byte(), torch.ones(T, 8, dtype=torch.bool)[:, ::2], trees[:-1])
    outs = torch.zeros(T, H, 64, dtype=q.dtype)
    out = pick(
        None,
        outs,
        outs[..., :32],
        outs[:, :1].expand(T, H, 64),
        outs.short(),
        torch.zeros(T, 2 * H, 64, dtype=q.dtype)[:, ::2],
    )
    max_q = pick(4, 5, 3)
    tables = replace(batch, seq_lens=lens, cu_seqlens_q=starts, block_table=table, rows=rows, max_seqlen_q=max_q)
    return built._replace(q=q, batch=tables), {"tree_mask": tree, "out": out}


@settings(max_examples=300, deadline=None)
@given(call=calls())
def test_the_predicate_of_a_bound_call_agrees_with_the_checks(call: tuple[Built, dict[str, Any]]) -> None:
    (q, layer, batch, _), given = call[0][:4], call[1]
    attend = bind_attention(layer)._attend
    tables = (batch.block_table, batch.rows, batch.seq_lens, batch.cu_seqlens_q, batch.max_seqlen_q, batch.max_seqlen_k)
    kept = (
        type(attend(q, *tables, given["tree_mask"], given["out"], False)) is int
    )  # a kind: only its kernel is missing
    options = (0.125, True, None, 0.0, None, None, given["tree_mask"], None)
    out = given["out"]
    if out is None:
        out = torch.zeros(*(*q.shape, 1, 1)[:2], 64, dtype=q.dtype)
    pool = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    call_of_it = AttentionCall(q, *pool, *tables, *options, out, torch.zeros(*(*q.shape, 1, 1)[:2]))
    why = objection(checks.attention, call_of_it)
    assert kept == (why == ""), why


def test_a_variable_acts_on_the_next_functional_call(monkeypatch: pytest.MonkeyPatch) -> None:
    built = CASE.build()
    bound_functional(built)
    for variable, value, text in (
        ("PAGEDKV_KERNELS", "fats", "there is no kernel 'fats'"),
        ("PAGEDKV_CPU_ISA", "avx1024", "PAGEDKV_CPU_ISA is 'avx1024'"),
        ("PAGEDKV_NUM_THREADS", "0", "PAGEDKV_NUM_THREADS is '0'"),
        ("PAGEDKV_NUM_THREADS", "2147483648", "a number of threads, 1 to 4096"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            for _ in range(3):
                assert text in refused(lambda: functional(built))
        functional(built)


def test_variables_that_are_too_long_to_compare_leave_calls_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    built = CASE.build()
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", "x" * 2000)
    bound_functional(built)
    assert not built.layer._bound


def test_binding_reads_the_variables_and_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = CASE.build()
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    assert "kernel='reference'" in repr(bind_attention(built.layer))
    with pytest.raises(KernelUnavailable, match="runs on cuda"):
        bind_attention(built.layer, backend="cuda")
    with pytest.raises(InvalidRequest, match="window is 0; it must be at least 1"):
        bind_attention(built.layer, window=0)


def test_another_backend_between_two_functional_calls_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    served, own = [], reference.paged_attention
    monkeypatch.setattr(reference, "paged_attention", lambda call: (served.append(call), own(call)))
    built = CASE.build()
    bound_functional(built), bound_functional(built, backend="cpu")
    for expected, change in enumerate((lambda: {"backend": "reference"},) * 3, start=1):
        functional(built, **change())
        assert len(served) == expected
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    functional(built)
    assert len(served) == 4
    functional(built, backend="cpu")
    assert len(served) == 4
    monkeypatch.delenv("PAGEDKV_KERNELS")
    monkeypatch.setattr(registry, "KERNELS", registry.KERNELS[-1:])
    functional(built)
    assert len(served) == 5


@pytest.mark.parametrize(
    "options",
    [{"window": 2.5}, {"window": True}, {"causal": 1}, {"softcap": "5"}, {"sinks": True}, {"window": 1 << 70}],
    ids=str,
)
def test_an_option_of_a_wrong_type_is_treated_as_the_operator_treats_it(options: dict[str, Any]) -> None:
    built = CASE.build()
    plain = built.options | {"window": 2, "softcap": 5.0}
    bound_functional(built, **plain)
    chosen = plain | options
    tables = (built.batch.block_table, None, built.batch.seq_lens, built.batch.cu_seqlens_q, 4, 40)
    rules = (0.125, chosen["causal"], chosen["window"], chosen["softcap"], chosen.get("sinks"), None, None, None)
    call = (built.q, built.layer.k, built.layer.v, None, None, *tables, *rules, "auto")
    try:
        expected = torch.ops.pagedkv.paged_attention.default(*call)[0]
    except Exception as why:
        for _ in range(3):
            with pytest.raises((type(why), TypeError)):
                functional(built, **chosen)
    else:  # torch converts it
        for _ in range(3):
            assert torch.equal(functional(built, **chosen), expected)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@each_way
def test_modes_traces_and_the_profiler_see_the_operator(attend: Callable[..., Any]) -> None:
    built = CASE.build()
    attend(built)
    with Names() as names, Functions() as functions:
        attend(built)
    assert any("pagedkv.paged_attention" in name for name in names.seen)
    assert any("pagedkv.paged_attention" in name for name in functions.seen)
    with torch.profiler.profile() as profile:
        attend(built)
    assert any(event.key == "pagedkv::paged_attention" for event in profile.key_averages())
    graph = make_fx(lambda q: attend(built._replace(q=q)))(built.q)
    assert "pagedkv.paged_attention" in graph.code


def test_a_bound_call_compiles_into_one_graph_and_exports() -> None:
    built = CASE.build()
    attend = bind_attention(built.layer, window=3)
    expected = attend(built.q * 2, built.batch)

    def step(q: torch.Tensor) -> torch.Tensor:
        return attend(q * 2, built.batch) + 0

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(built.q), expected)

    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return step(q)

    exported = torch.export.export(Module(), (built.q,), strict=False)
    assert "pagedkv.paged_attention" in str(exported.graph)
    assert torch.equal(exported.module()(built.q), expected)


@each_way
def test_autograd_sees_a_call_whose_arguments_require_gradients(
    attend: Callable[..., Any], checked: list[object]
) -> None:
    built, slopes = CASE.build(), torch.zeros(6)
    want, wanting = attend(built), built._replace(q=built.q.clone().requires_grad_())
    attend(built, alibi_slopes=slopes)
    again, count = prepared(attend, wanting), len(checked)
    assert torch.equal(again().detach(), want)
    assert len(checked) == count + 1
    with torch.no_grad():
        again()
    assert len(checked) == count + 1
    attend(built, alibi_slopes=slopes.clone().requires_grad_())
    assert len(checked) > count + 1


@each_way
def test_a_subclass_of_tensor_gets_the_call_handed_to_it(attend: Callable[..., Any]) -> None:
    seen: list[str] = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    built = CASE.build()
    attend(built)
    attend(built._replace(q=built.q.as_subclass(Mine)))
    assert any("pagedkv.paged_attention" in name for name in seen)
    seen.clear()
    attend(built._replace(layer=replace(built.layer, k=built.layer.k.as_subclass(Mine))))
    assert any("pagedkv.paged_attention" in name for name in seen)


@pytest.mark.usefixtures("reader")
@each_way
def test_functional_tensors_and_negative_views_are_the_dispatchers(attend: Callable[..., Any]) -> None:
    built = CASE.build()
    want = attend(built)
    wrapped = torch._to_functional_tensor(built.q)  # a plain torch.Tensor to Python, without an address
    assert torch.equal(torch._from_functional_tensor(attend(built._replace(q=wrapped))), want)
    assert torch.equal(attend(built._replace(q=torch._neg_view(-built.q))), want)
    slopes = torch.linspace(0, 1, 6)
    imaginary = torch.complex(torch.zeros(6), -slopes).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(attend(built, alibi_slopes=imaginary), attend(built, alibi_slopes=slopes))


@each_way
def test_a_layer_whose_memory_moved_is_read_where_it_is_now(attend: Callable[..., Any]) -> None:
    built, other = CASE.build(), CASE.build()
    attend(built)
    again = prepared(attend, built)
    again()
    built.layer.k.set_(torch.randn_like(other.layer.k))
    want = functional(built._replace(layer=replace(built.layer)))
    assert torch.equal(again(), want)


def test_a_copy_of_a_layer_has_no_bound_calls_of_the_first() -> None:
    built = CASE.build()
    bound_functional(built)
    assert built.layer._bound
    for other in (copy.copy(built.layer), copy.deepcopy(built.layer), pickle.loads(pickle.dumps(built.layer))):
        assert other._bound is None
        assert isinstance(other, KVLayer)
    deep = copy.deepcopy(built.layer)
    built.layer.k.zero_()
    assert not torch.equal(bound_functional(built._replace(layer=deep)), functional(built))


def test_bound_calls_neither_grow_without_bound_nor_keep_a_layer_alive() -> None:
    built = CASE.build()
    for window in range(1, 3 * bound.MOST_BOUND):
        for _ in range(2):
            functional(built, window=window)
        assert len(built.layer._bound) <= bound.MOST_BOUND
    layer = replace(built.layer)
    bound_functional(built._replace(layer=layer))
    gone = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert gone() is None  # at once: a pool of many GiB must not wait for the garbage collector
    finally:
        gc.enable()


def test_wrong_arguments_of_the_extension_are_type_errors() -> None:
    built = CASE.build()
    binding = bind_attention(built.layer)._binding
    for call in (cpu._cpu.bind_attention, binding.attend, binding.attend_checked, binding.add_server, binding.write):
        with pytest.raises(TypeError, match="takes"):
            call(1)
    with pytest.raises(TypeError, match="no such instruction set"):
        binding.add_server(1, "avx1024", 1, None)
    with pytest.raises(TypeError, match="not the checked arguments"):
        binding.attend_checked(*[None] * 10, cpu.isa(), 1)
    assert cpu._cpu.bind_attention(None, *[None] * 5, 1.0, True, None, 0.0, None) is None


def test_results_of_a_wrong_shape_are_refused_by_the_operator() -> None:
    built = CASE.build()
    tables = (built.batch.block_table, None, built.batch.seq_lens, built.batch.cu_seqlens_q, 4, 40)
    call = (built.q, built.layer.k, built.layer.v, None, None, *tables, 0.125, True, None, 0.0, None, None, None, None)
    for lse in (torch.zeros(5, 5), torch.zeros(5, 6, dtype=torch.float64)):
        with pytest.raises(InvalidRequest, match=r"lse is .*; it must be float32 \[T=5, H=6\]"):
            torch.ops.pagedkv.paged_attention_out.default(*call, torch.zeros(5, 6, 64), lse, "auto")
