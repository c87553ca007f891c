"""Bound and functional writes: equal bytes and errors, and torch sees the calls that it observes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import bind_write, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import checks, cpu, registry
from pagedkv.kernels.args import KVLayer, RotaryTable
from tests.cases import AXES, Case, empty_layer, write_of
from tests.kernels.conftest import Names, objection, one_of
from tests.kernels.test_write import AT, SLOTS, assert_same_bytes, batch_of, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pagedkv import PagedBatch

if cpu._cpu is None:
    pytest.skip(registry.KERNELS[0].refuse(registry.Case())[0], allow_module_level=True)

pytestmark = pytest.mark.usefixtures("unbound")
KEPT = [i for i, slot in enumerate(SLOTS) if slot >= 0]
LAYER = Case(dims=(64, 80))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The writes that the operator checked since."""
    seen, write = [], checks.write
    monkeypatch.setattr(checks, "write", lambda call: (seen.append(call), write(call)))
    return seen


def write_bound(k: Tensor, v: Tensor, layer: KVLayer, batch: PagedBatch, rope: RotaryTable | None = None) -> None:
    bind_write(layer, rope=rope)(k, v, batch)


def write_functional(k: Tensor, v: Tensor, layer: KVLayer, batch: PagedBatch, rope: RotaryTable | None = None) -> None:
    """Make a functional write that a bound call serves: the third of equal calls on one layer."""
    for _ in range(3):
        write_kv(k, v, layer, batch, rope=rope)


each_way = pytest.mark.parametrize("write", [write_bound, write_functional])


def new_tokens() -> tuple[Tensor, Tensor]:
    return torch.randn(7, 2, 64), torch.randn(7, 2, 80)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("kv", AXES["kv"])
def test_a_bound_write_stores_the_bytes_of_the_operator_and_is_not_checked_by_it(
    kv: str, checked: list[object]
) -> None:
    for layout, turned in zip(AXES["layout"], (0, 24, 64), strict=True):
        layers = [scaled(replace(LAYER, kv=kv, layout=layout), 4, 0.5, 0.75) for _ in range(3)]
        batch, (k, v) = replace(batch_of(SLOTS), positions=torch.arange(7)), new_tokens()
        rope = RotaryTable(torch.randn(7, turned // 2), torch.randn(7, turned // 2), turned == 24) if turned else None
        for layer, write, checks_of_it in zip(
            layers, (write_kv, write_bound, write_functional), (1, 0, 1), strict=True
        ):
            checked.clear()
            write(k, v, layer, replace(batch, slots=batch.slots.clone()), rope=rope)
            assert len(checked) == checks_of_it
            assert_same_bytes(layers[0], layer)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("backend", ["numba", "reference", "cpu"])
def test_every_kernel_serves_bound_writes_of_any_strides_and_dtypes(backend: str, checked: list[object]) -> None:
    layer, (k, v) = empty_layer(replace(LAYER, dtype="bfloat16"), 4), new_tokens()
    store = bind_write(layer, backend=backend)
    wide = torch.full((7, 4, 64), torch.nan)
    wide[:, ::2] = k
    for new_k, new_v in ((k, v), (wide[:, ::2], v), (k.bfloat16(), v), (k.half(), v.bfloat16()), (k[:3], v[:3])):
        layer.k.zero_()
        store(new_k, new_v, batch_of(SLOTS[: len(new_k)]))
        kept = [i for i in KEPT if i < len(new_k)]
        assert torch.equal(layer.k.flatten(0, 1)[AT[: len(kept)]], new_k[kept].bfloat16())
    assert not checked


@st.composite
def writes(draw: st.DrawFn) -> tuple[Any, ...]:
    """New tokens, slots and positions, some of them changed in shape, dtype, stride or number; and whether keys are
    turned."""
    pick, (k, v), slots, positions = partial(one_of, draw), new_tokens(), torch.tensor(SLOTS), torch.arange(7)
    turned, strided, fp8 = draw(st.booleans()), k.mT.contiguous().mT, k.to(torch.float8_e5m2)
    k = pick(k, k.half(), k.int(), k[..., :32], k[:5], k[:, :1], k.mT, k[0], strided, fp8)
    v = pick(v, v.double(), v.short(), v[..., :64], v[:5], v[:, :1].expand(7, 2, 80), v.mT.contiguous().mT, v[None])
    slots = pick(slots, slots.int(), slots[:5], slots[:, None], slots.repeat_interleave(2)[::2])
    positions = pick(positions, positions.int(), positions[:5], None, positions.repeat_interleave(2)[::2])
    return k, v, slots, positions if turned else None, turned


@settings(max_examples=100, deadline=None)
@given(call=writes())
def test_the_predicate_of_a_bound_write_agrees_with_the_checks(call: tuple[Any, ...]) -> None:
    k, v, slots, positions, turned = call
    layer = empty_layer(LAYER, 4)
    rope = RotaryTable(torch.ones(7, 16), torch.ones(7, 16)) if turned else None
    kept = cpu._cpu.write(bind_write(layer, rope=rope)._binding, k, v, slots, positions, False)
    why = objection(checks.write, write_of(layer, k, v, slots, rope, positions))
    assert (type(kept) is int) == (why == ""), why  # a kind: only its kernel is missing


@each_way
def test_modes_see_writes_autograd_is_refused_and_negative_views_are_written_out(
    write: Callable[..., None], checked: list[object]
) -> None:
    layer, batch, (k, v) = empty_layer(LAYER, 4), batch_of(SLOTS), new_tokens()
    write(k, v, layer, batch)
    with Names() as names:
        write(k, v, layer, batch)
    assert any("pagedkv.write_kv" in name for name in names.seen)
    with pytest.raises(InvalidRequest, match="k requires grad, and the kernels are for inference only"):
        write(k.clone().requires_grad_(), v, layer, batch)
    write(torch._neg_view(-k), v, layer, batch)
    assert torch.equal(layer.k.flatten(0, 1)[AT], k[KEPT])


def test_a_bound_write_compiles_into_one_graph() -> None:
    layer, batch, (k, v) = empty_layer(LAYER, 4), batch_of(SLOTS), new_tokens()
    store = bind_write(layer)

    def step(k: Tensor, v: Tensor) -> Tensor:
        store(k * 2, v, batch)
        return k + 1

    torch.compile(step, fullgraph=True, backend="aot_eager")(k, v)
    assert torch.equal(layer.k.flatten(0, 1)[AT], 2 * k[KEPT])


@pytest.mark.parametrize("which", [0, 1])
def test_float64_is_refused_whichever_of_the_two_it_is(which: int) -> None:
    layer, batch, new = empty_layer(LAYER, 4), batch_of(SLOTS), list(new_tokens())
    new[which] = new[which].double()
    for write in (partial(write_kv, layer=layer, backend="cpu"), bind_write(layer, backend="cpu")):
        with pytest.raises(Exception, match="k is float64; it takes float32, bfloat16, float16"):
            write(*new, slots=batch)
    bind_write(layer)(*new, batch)  # another kernel serves
    assert torch.equal(layer.v.flatten(0, 1)[AT], new[1][KEPT].float())
