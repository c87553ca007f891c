"""A write stores the given tokens at their slots, and changes no other byte."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv import KernelUnavailable, bind_write, copy_frames, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.args import KVLayer, PagedBatch, RotaryTable
from tests.cases import AXES, Case, as_bytes, empty_layer, moved
from tests.kernels.oracle import stored_values

if TYPE_CHECKING:
    from torch import Tensor

    from tests.kernels.conftest import Runner

HALF_STEP = {"": 0.0, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3, "int8": 0.5 / 127, "int4": 0.5 / 7}
"""The largest error of one stored element, relative to the largest of its vector: half a unit in the last place.

float32 is exact.
"""

SLOTS = [37, -1, 0, 63, 16, -5, 2]


def batch_of(slots: list[int]) -> PagedBatch:
    """A batch of which only the slots are looked at."""
    none = torch.zeros(1, dtype=torch.int32)
    tables = {"block_table": none[None], "seq_lens": none, "cu_seqlens_q": none, "max_seqlen_q": 0, "max_seqlen_k": 0}
    return PagedBatch(**tables, slots=torch.tensor(slots, dtype=torch.int64), positions=torch.zeros(len(slots)).long())


def stored(layer: KVLayer, slots: list[int]) -> tuple[Tensor, Tensor]:
    """K and V at `slots`, as float64 values."""
    layer = moved(layer, "cpu")
    pools = ((layer.k, layer.k_scale), (layer.v, layer.v_scale))
    k, v = (torch.from_numpy(stored_values(*pool)).flatten(0, 1)[slots] for pool in pools)
    return k, v


def test_slots_alone_store_what_a_batch_stores(runner: Runner) -> None:
    case = Case(dims=(64, 80))
    k, v, batch = torch.rand(7, 2, 64), torch.rand(7, 2, 80), batch_of(SLOTS)
    turns, positions = RotaryTable(torch.rand(9, 32), torch.rand(9, 32)), torch.tensor([3, 0, 8, 1, 1, 2, 5])
    for rope, places in ((None, None), (turns, positions)):
        layers = [moved(empty_layer(case, 4), runner.device) for _ in range(3)]
        there = [moved(x, runner.device) for x in (k, v, batch.slots, places)]
        table = rope and RotaryTable(*(moved(x, runner.device) for x in (rope.cos, rope.sin)))
        whole = moved(replace(batch, positions=places), runner.device)
        write_kv(*there[:2], layers[0], whole, rope=table, backend=runner.backend)
        write_kv(*there[:2], layers[1], *there[2:], rope=table, backend=runner.backend)
        bind_write(layers[2], rope=table, backend=runner.backend)(*there[:2], *there[2:])
        for layer in layers[1:]:
            assert layer.k.nan_to_num(9).equal(layers[0].k.nan_to_num(9))
            assert layer.v.nan_to_num(9).equal(layers[0].v.nan_to_num(9))


def test_a_store_without_slots_or_positions_is_refused() -> None:
    layer, new = empty_layer(Case(), 4), torch.rand(7, 2, 64)
    for slots in (replace(batch_of(SLOTS), slots=None), None):
        for store in (partial(write_kv, new, new, layer), partial(bind_write(layer), new, new)):
            with pytest.raises(
                InvalidRequest, match="slots is None; it must be a tensor, or a PagedBatch that has one"
            ):
                store(slots)
    turns = RotaryTable(torch.rand(9, 32), torch.rand(9, 32))
    with pytest.raises(InvalidRequest, match=r"positions is \[0, 1\]; it must be a tensor"):
        write_kv(new, new, layer, torch.tensor(SLOTS), [0, 1], rope=turns)  # type: ignore[arg-type]
    learnt = RotaryTable(torch.rand(9, 32, requires_grad=True), torch.rand(9, 32))
    with pytest.raises(InvalidRequest, match=r"rope\.cos requires grad"):
        write_kv(new, new, layer, torch.tensor(SLOTS), torch.arange(7), rope=learnt)
    with pytest.raises(InvalidRequest, match=r"positions is None; it must be int64 \[T=7\] to turn keys"):
        write_kv(new, new, layer, torch.tensor(SLOTS), rope=turns)


@pytest.mark.parametrize("layout", AXES["layout"])
@pytest.mark.parametrize("kv", AXES["kv"])
def test_what_is_written_reads_back_within_half_a_step(kv: str, layout: str, runner: Runner) -> None:
    case = Case(kv=kv, layout=layout, dims=(64, 80))
    layer = moved(empty_layer(case, 4), runner.device)
    if kv.endswith("/tensor"):
        layer.k_scale.fill_(0.5), layer.v_scale.fill_(0.75)
    k, v = torch.rand(7, 2, 64) * 2 - 1, torch.rand(7, 2, 80) * 2 - 1  # in [-1, 1): no scale above saturates

    write_kv(
        k.to(runner.device), v.to(runner.device), layer, moved(batch_of(SLOTS), runner.device), backend=runner.backend
    )

    kept = [i for i, slot in enumerate(SLOTS) if slot >= 0]
    for given, got, scale in zip((k, v), stored(layer, [SLOTS[i] for i in kept]), (0.5, 0.75), strict=True):
        largest = given[kept].abs().amax(-1, keepdim=True).double()
        integers = kv.startswith("int")
        step = HALF_STEP[kv.partition("/")[0]] * (
            scale * {"int8": 127, "int4": 7}[kv[:4]] if integers and "tensor" in kv else largest
        )
        assert (
            (got - given[kept].double()).abs() <= step * (1 + 1e-4)
        ).all()  # x / scale is rounded before it is rounded


@pytest.mark.parametrize("kv", AXES["kv"])
def test_slots_that_are_not_named_keep_every_bit(kv: str, runner: Runner) -> None:
    layer = moved(empty_layer(Case(kv=kv, layout="HND"), 4), runner.device)
    before = [as_bytes(x).clone() for x in (layer.k, layer.v)]
    k = torch.randn(7, 2, 64, device=runner.device)

    write_kv(k, k, layer, moved(batch_of(SLOTS), runner.device), backend=runner.backend)

    others = [slot for slot in range(64) if slot not in SLOTS]
    for old, new in zip(before, (layer.k, layer.v), strict=True):
        old, new = (as_bytes(x).flatten(0, 1)[others] for x in (old, new))
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_a_vector_of_zeros_has_scale_one_and_others_amax_over_qmax(runner: Runner) -> None:
    layer = moved(empty_layer(Case(kv="int8/token_head"), 1), runner.device)
    k = torch.zeros(1, 2, 64)
    k[0, 1, 5] = -254.0
    write_kv(
        k.to(runner.device), k.to(runner.device), layer, moved(batch_of([3]), runner.device), backend=runner.backend
    )
    assert layer.k_scale is not None
    assert layer.k_scale[0, 3].tolist() == [1.0, 2.0]
    assert layer.k[0, 3, 1, 5] == -127


def test_a_scale_that_rounds_to_zero_is_one(runner: Runner) -> None:
    """Of a vector of subnormals; a zero in it divided by a scale of zero would be stored as NaN."""
    layer = moved(empty_layer(Case(kv="fp8_e5m2/token_head"), 1), runner.device)
    k = torch.zeros(1, 2, 64)
    k[0, :, ::2] = 1e-42
    write_kv(
        k.to(runner.device), k.to(runner.device), layer, moved(batch_of([3]), runner.device), backend=runner.backend
    )
    assert layer.k_scale is not None
    assert layer.k_scale[0, 3].tolist() == [1.0, 1.0]
    assert (stored(layer, [3])[0] == 0).all()


@pytest.mark.parametrize(
    ("kv", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0), ("int8/tensor", 127.0), ("int4/tensor", 7.0)]
)
def test_what_is_too_large_saturates(kv: str, largest: float, runner: Runner) -> None:
    layer = moved(empty_layer(Case(kv=kv), 1), runner.device)
    k = torch.tensor([1e9, -1e9, torch.inf, -torch.inf]).repeat(16).expand(1, 2, 64).to(runner.device)
    write_kv(k, k, layer, moved(batch_of([0]), runner.device), backend=runner.backend)
    assert stored(layer, [0])[0][0, 0, :4].tolist() == [largest, -largest, largest, -largest]


NAN_KINDS = ["", "fp8_e4m3", "fp8_e5m2/token_head", "int8/tensor", "int4/tensor", "int8/token_head", "int4/token_head"]


@pytest.mark.parametrize("kv", NAN_KINDS)
def test_nan_is_stored_as_nan_or_as_zero_by_integers_whose_scale_then_is_nan(kv: str, runner: Runner) -> None:
    """One scale for all stays what it is: then NaN is 0, and what is beside it keeps its value."""
    layer = moved(empty_layer(Case(kv=kv, dims=(70, 70)), 1), runner.device)
    if kv.endswith("/tensor"):
        layer.k_scale.fill_(1.0), layer.v_scale.fill_(1.0)
    k, broken = torch.ones(1, 2, 70), [2, 3, 33, 68]  # of vectors and of what remains; lower and upper halves of bytes
    k[0, 1, broken] = torch.nan
    write_kv(
        k.to(runner.device), k.to(runner.device), layer, moved(batch_of([3]), runner.device), backend=runner.backend
    )
    for values in stored(layer, [3]):
        assert (values[0, 0] - 1).abs().max() <= 1e-6
        others = [i for i in range(70) if i not in broken]
        if kv.endswith("/token_head"):
            assert values[0, 1].isnan().all()
        else:
            assert (values[0, 1, others] == 1).all()
            assert (values[0, 1, broken] == 0).all() if "int" in kv else values[0, 1, broken].isnan().all()


@pytest.mark.parametrize("kv", ["", "fp8_e4m3/tensor", "int8/token_head", "int4/token_head"])
@pytest.mark.parametrize(("turned", "interleaved"), [(64, False), (64, True), (24, False), (2, True)])
def test_a_key_turned_while_it_is_written_is_the_key_turned_before(
    kv: str, turned: int, interleaved: bool, runner: Runner
) -> None:
    draw = torch.Generator().manual_seed(turned)
    angles = torch.rand(50, turned // 2, generator=draw) * 6
    k, v = (torch.randn(7, 2, 64, generator=draw) for _ in range(2))
    batch = replace(
        batch_of(SLOTS), positions=torch.tensor([3, 10**9, 49, 0, 7, -1, 11])
    )  # a token that is skipped may be anywhere
    together, apart = (moved(empty_layer(Case(kv=kv, layout="HND"), 4), runner.device) for _ in range(2))
    if kv.endswith("/tensor"):
        for scale in (together.k_scale, together.v_scale, apart.k_scale, apart.v_scale):
            scale.fill_(0.25)
    k, v, batch, turned_k = (
        moved(x, runner.device) for x in (k, v, batch, turn(k, angles[[3, 0, 49, 0, 7, 0, 11]], interleaved))
    )
    rope = RotaryTable(moved(angles.cos(), runner.device), moved(angles.sin(), runner.device), interleaved)

    try:
        write_kv(k, v, together, batch, rope=rope, backend=runner.backend)
    except KernelUnavailable as refused:
        pytest.skip(str(refused))
    write_kv(turned_k, v, apart, batch, backend=runner.backend)

    at = [slot for slot in SLOTS if slot >= 0]
    (k_together, v_together), (k_apart, v_apart) = stored(together, at), stored(apart, at)
    assert torch.equal(v_together, v_apart)
    step = {"": 1e-6, "fp8": 0.125, "int8": 1 / 127, "int4": 1 / 7}[kv[:4].rstrip("_")] * k_apart.abs().amax(
        -1, keepdim=True
    )
    assert (
        (k_together - k_apart).abs() <= step * 1.001
    ).all()  # a sum that is rounded otherwise may be stored one step away,
    assert ((k_together - k_apart).abs() > 1e-5).double().mean() < 0.01  # rarely


def turn(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [T, K, D] with the pairs of its first dims as complex numbers, times e^(i angle)."""
    half = angles.shape[1]
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    pairs = pairs if interleaved else pairs.mT
    product = (
        torch.view_as_complex(pairs.double().contiguous())
        * torch.polar(torch.ones(()).double(), angles.double())[:, None]
    )
    real = torch.view_as_real(product)
    return torch.cat([(real if interleaved else real.mT).flatten(-2).float(), x[..., 2 * half :]], -1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float8_e4m3fn])
def test_copies_read_every_source_before_one_destination_is_written(dtype: torch.dtype) -> None:
    storage = torch.arange(8).repeat_interleave(3).view(8, 3).to(dtype)
    copy_frames(storage, torch.tensor([[1, 2], [2, 3], [3, 1], [5, 0]], dtype=torch.int32))  # a cycle, and one more
    assert storage[:, 0].float().tolist() == [5, 3, 1, 2, 4, 5, 6, 7]


def test_copying_nothing_is_allowed() -> None:
    storage = torch.arange(4)
    copy_frames(storage, torch.empty(0, 2, dtype=torch.int32))
    assert storage.tolist() == [0, 1, 2, 3]
