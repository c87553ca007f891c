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

from pagedkv import PagedKVError, bind_attention, bind_write, paged_attention
from pagedkv.errors import InvalidRequest, KernelUnavailable
from pagedkv.kernels import bound, checks, cpu, reference, registry
from pagedkv.kernels.args import AttentionCall, AttentionOptions, bound_fields, tables_of
from tests.cases import SMALL, Built, Case
from tests.kernels.conftest import Names, objection, one_of
from tests.kernels.test_checks import CASE, WRONG_VALUES

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
    usual = {name: x for name, x in options.items() if name in PER_CALL}
    if isinstance(options["causal"], torch.Tensor):
        usual["causal"], options["causal"] = options["causal"], False
    attend = bind_attention(built.layer, **{name: x for name, x in options.items() if name not in PER_CALL})
    return lambda other=built, **changes: attend(other.q, other.batch, **usual | changes)


def bound_functional(built: Built, **changes: Any) -> Callable[..., Any]:
    """Return the functional call; the layer has a bound call for it already."""
    for _ in range(2):
        functional(built, **changes)
    return lambda other=built, **others: functional(other, **changes | others)


each_way = pytest.mark.parametrize("prepare", [bind, bound_functional])


def refused(call: Callable[[], object]) -> str:
    with pytest.raises((PagedKVError, RuntimeError, TypeError)) as why:
        call()
    return str(why.value)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, case in enumerate(SMALL)], ids=str
)
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
        count, got = len(checked), attend(other)
        assert len(checked) == count
        assert (got - functional(other._replace(layer=replace(built.layer)), backend="reference")).abs().max() < 1e-5


def test_each_kind_of_call_has_its_kernel_which_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = replace(CASE, kv="int8/token_head").build()
    kinds: list[tuple[Any, dict[str, Any]]] = [(built.q.double(), {}), (built.q.bfloat16(), {}), (built.q[:, :4], {})]
    kinds += [(built.q, {"tree_mask": torch.ones(5, 4, dtype=torch.bool).tril()}), (built.q, {})]
    attend, asked, resolve = bind(built), [], registry.resolve
    monkeypatch.setattr(registry, "resolve", lambda *case: (asked.append(case), resolve(*case))[1])
    got = [attend(built._replace(q=q), **options) for _ in range(2) for q, options in kinds]
    assert len(asked) == len(kinds)
    for (q, options), *outs in zip(kinds, got, got[len(kinds) :], strict=False):
        want = functional(built._replace(q=q, layer=replace(built.layer)), **options)
        assert all(torch.equal(out, want) for out in outs)


def test_with_split_tokens_one_kernel_serves_prefills_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = bind_attention(CASE.build().layer, split_tokens=16)
    monkeypatch.setattr(registry, "resolve", None)  # a second choice would fail
    attend._server(attend._case()._replace(device="cuda"), attend.kernel)


@each_way
def test_values_are_checked_as_soon_as_debugging_asks_for_it(
    prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = CASE.build()
    attend, (change, text) = prepare(built), WRONG_VALUES[0]
    attend()
    monkeypatch.setenv("PAGEDKV_DEBUG", "1")
    attend()
    assert text in refused(lambda: attend(change(built)))


@st.composite
def calls(draw: st.DrawFn) -> tuple[Built, dict[str, Any]]:
    """A case, some of its arguments changed in shape, dtype, stride or number."""
    built = replace(CASE, kv=draw(st.sampled_from(["", "int8/token_head"])), rows=draw(st.booleans())).build()
    pick, q, x = partial(one_of, draw), built.q, built.batch
    lens, starts, table, wide = x.seq_lens, x.cu_seqlens_q, x.block_table, torch.zeros(5, 6, 128)
    strided, narrow = wide[..., ::2], wide[:, :, :64]
    q = pick(q, q.half(), q.double(), q.bfloat16(), q.int(), q[0], q[:, :5], q[:, :0], q[:0], strided, narrow)
    lens = pick(lens, lens.long(), lens[:1], lens.repeat(2)[::2], lens[None])
    starts = pick(starts, starts[:2], starts.repeat(2)[::2], starts.bool())
    table = pick(table, table[:1], table.mT, table[0], table.long())
    rows = x.rows if x.rows is None else pick(x.rows, x.rows[:1], x.rows.long(), None)
    T, H = (*q.shape, 1, 1)[:2]
    each = torch.tensor([True, False, True])
    causal = pick(None, each[:2], each, each[:1], each.int(), each[None], each.repeat_interleave(2)[::2])
    trees, outs = torch.ones(T, 4, dtype=torch.bool), torch.zeros(T, 2 * H, 64, dtype=q.dtype)
    tree = pick(None, trees, trees[:, :3], trees.byte(), trees.repeat(1, 2)[:, ::2], trees[:-1])
    whole = outs[:, :H].clone()
    out = pick(None, whole, whole[..., :32], whole[:, :1].expand(T, H, 64), whole.short(), outs[:, ::2])
    max_q = pick(4, 5, 3)
    tables = replace(x, seq_lens=lens, cu_seqlens_q=starts, block_table=table, rows=rows, max_seqlen_q=max_q)
    return built._replace(q=q, batch=tables), {"tree_mask": tree, "causal": causal, "out": out}


@settings(max_examples=100, deadline=None)
@given(call=calls())
def test_the_predicate_of_a_bound_call_agrees_with_the_checks(call: tuple[Built, dict[str, Any]]) -> None:
    built, changes = call
    q, x, out = built.q, built.layer, changes.pop("out")
    shape, masks = (*q.shape, 1, 1)[:2], (changes["tree_mask"], changes["causal"])
    results = (torch.zeros(*shape, 64, dtype=q.dtype) if out is None else out, torch.zeros(*shape))
    flat = AttentionCall(*bound_fields(x, AttentionOptions(0.125)), q, *tables_of(built.batch), *masks, *results)
    kept = cpu._cpu.attend(bind_attention(x)._binding, *flat[13:-2], out, False)
    why = objection(checks.attention, flat) or objection(checks.table_values, flat)
    assert (type(kept) is int) == (why == ""), why  # a kind: only its kernel is missing


def test_a_variable_acts_on_the_next_functional_call(monkeypatch: pytest.MonkeyPatch) -> None:
    built = CASE.build()
    attend = bound_functional(built)
    for variable, value, text in (
        ("PAGEDKV_KERNELS", "fats", "there is no kernel 'fats'"),
        ("PAGEDKV_CPU_ISA", "avx1024", "PAGEDKV_CPU_ISA is 'avx1024'"),
        ("PAGEDKV_NUM_THREADS", "0", "PAGEDKV_NUM_THREADS is '0'"),
        ("PAGEDKV_NUM_THREADS", "2147483648", "a number of threads, 1 to 4096"),
        ("PAGEDKV_DEBUG", "4", "PAGEDKV_DEBUG is '4'"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            for _ in range(3):
                assert text in refused(attend)
        attend()
    served, own = [], reference.paged_attention
    monkeypatch.setattr(reference, "paged_attention", lambda call: (served.append(call), own(call)))
    attend(backend="reference"), attend(backend="cpu"), attend(backend="reference")
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    attend(), attend(backend="cpu"), attend()
    assert len(served) == 4


def test_binding_reads_the_variables_and_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = CASE.build()
    monkeypatch.setenv("PAGEDKV_KERNELS", "reference")
    assert "kernel='reference'" in repr(bind_attention(built.layer))
    with pytest.raises(KernelUnavailable, match="runs on cuda"):
        bind_attention(built.layer, backend="cuda")


@each_way
def test_modes_traces_and_the_profiler_see_the_operator(prepare: Callable[..., Any]) -> None:
    built = CASE.build()
    attend = prepare(built)
    attend()
    with Names() as names:
        attend()
    assert any("pagedkv.paged_attention" in name for name in names.seen)
    with torch.profiler.profile() as profile:
        attend()
    assert any(event.key == "pagedkv::paged_attention" for event in profile.key_averages())
    graph = make_fx(lambda q: attend(built._replace(q=q)))(built.q)
    assert "pagedkv.paged_attention" in graph.code


def test_a_bound_call_compiles_into_one_graph_and_exports() -> None:
    built = CASE.build()
    attend = bind_attention(built.layer, window=3)
    expected = attend(built.q * 2, built.batch)

    class Module(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return attend(q * 2, built.batch) + 0

    assert torch.equal(torch.compile(Module(), fullgraph=True, backend="aot_eager")(built.q), expected)
    exported = torch.export.export(Module(), (built.q,), strict=False)
    assert "pagedkv.paged_attention" in str(exported.graph)
    assert torch.equal(exported.module()(built.q), expected)


@each_way
def test_a_call_that_autograd_would_record_is_refused(prepare: Callable[..., Any], checked: list[object]) -> None:
    built, slopes = CASE.build(), torch.zeros(6)
    attend, wanting = prepare(built), built._replace(q=built.q.clone().requires_grad_())
    want, count = attend(), len(checked)
    with pytest.raises(InvalidRequest, match=r"q requires grad, and the kernels are for inference only.*no_grad"):
        attend(wanting)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert torch.equal(attend(wanting), want)
    assert len(checked) == count, "without gradients the call is a bound call"
    with pytest.raises(InvalidRequest, match="alibi_slopes requires grad"):
        prepare(built, alibi_slopes=slopes.requires_grad_())()
    pool = replace(built.layer, k=built.layer.k.clone().requires_grad_())
    with pytest.raises(InvalidRequest, match=r"layer\.k requires grad"):
        prepare(built._replace(layer=pool))()


class Mine(torch.Tensor):
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@each_way
def test_a_subclass_of_tensor_gets_the_call_handed_to_it(prepare: Callable[..., Any]) -> None:
    built = CASE.build()
    attend = prepare(built)
    for call in (
        lambda: attend(built._replace(q=built.q.as_subclass(Mine))),
        lambda: prepare(built._replace(layer=replace(built.layer, k=built.layer.k.as_subclass(Mine))))(),
    ):
        Mine.seen.clear()
        call()
        assert any("pagedkv.paged_attention" in name for name in Mine.seen)


@pytest.mark.usefixtures("reader")
@each_way
def test_functional_tensors_and_negative_views_are_the_dispatchers(prepare: Callable[..., Any]) -> None:
    built, slopes = CASE.build(), torch.linspace(0, 1, 6)
    attend = prepare(built)
    want = attend()
    wrapped = torch._to_functional_tensor(built.q)  # a plain torch.Tensor to Python, without an address
    assert torch.equal(torch._from_functional_tensor(attend(built._replace(q=wrapped))), want)
    assert torch.equal(attend(built._replace(q=torch._neg_view(-built.q))), want)
    imaginary = torch.complex(torch.zeros(6), -slopes).conj().imag
    assert imaginary.is_neg()
    assert torch.equal(prepare(built, alibi_slopes=imaginary)(), prepare(built, alibi_slopes=slopes)())


@each_way
def test_a_layer_whose_memory_moved_is_read_where_it_is_now(prepare: Callable[..., Any]) -> None:
    built, other = CASE.build(), CASE.build()
    attend = prepare(built)
    attend()
    built.layer.k.set_(torch.randn_like(other.layer.k))
    assert torch.equal(attend(), functional(built._replace(layer=replace(built.layer))))


@each_way
def test_a_layer_or_query_whose_memory_was_freed_is_named(prepare: Callable[..., Any]) -> None:
    built = CASE.build()
    attend = prepare(built)
    attend()
    freed = built.q.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidRequest, match=r"^q spans \d+ bytes but its storage has 0"):
        attend(built._replace(q=freed))
    storage = built.layer.k.untyped_storage()
    storage.resize_(storage.nbytes() - 4)
    with pytest.raises(InvalidRequest, match=r"^layer\.k spans \d+ bytes but its storage has \d+:"):
        attend()


def test_a_copy_of_a_bound_call_serves_a_layer_of_its_own() -> None:
    """A copy of a layer has none of the bound calls of the first."""
    built = CASE.build()
    bound_functional(built)
    assert built.layer._bound
    for layer in (copy.copy(built.layer), copy.deepcopy(built.layer), pickle.loads(pickle.dumps(built.layer))):
        assert layer._bound is None
    attend, store = bind_attention(built.layer, window=3), bind_write(built.layer)
    want = attend(built.q, built.batch)
    attends = [copy.deepcopy(attend), pickle.loads(pickle.dumps(attend))]
    stores = [copy.deepcopy(store), pickle.loads(pickle.dumps(store))]
    built.layer.k.zero_()
    for other in attends:
        assert torch.equal(other(built.q, built.batch), want)
    tables = replace(built.batch, slots=torch.zeros(1, dtype=torch.int64))
    for other in stores:
        other(torch.ones(1, 2, 64), torch.ones(1, 2, 64), tables)
    assert not built.layer.k.any()


def test_bound_calls_neither_grow_without_bound_nor_keep_a_layer_alive() -> None:
    built = CASE.build()
    for window in range(1, 3 * bound.MOST_BOUND):
        bound_functional(built, window=window)
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
