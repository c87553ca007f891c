"""Writes and copies like ones that were checked run at once, and store the same bytes; what differs is checked and refused as ever."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import copy_frames, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import checks, cpu, known, ops, registry
from pagedkv.kernels.args import RotaryTable
from tests.cases import AXES, Case, as_bytes, empty_layer
from tests.kernels.test_known import Names
from tests.kernels.test_write import SLOTS, batch_of

if TYPE_CHECKING:
    from torch import Tensor

if cpu._cpu is None:
    pytest.skip(registry.KERNELS[0].refuse(registry.Case())[0], allow_module_level=True)

EXTENSION = cpu._cpu
pytestmark = pytest.mark.usefixtures("nothing_known")
PAIRS = torch.tensor([[1, 2], [2, 3], [3, 1], [5, 0]], dtype=torch.int32)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The writes and copies that were checked since."""
    seen, write, copies = [], checks.write, checks.copies
    monkeypatch.setattr(checks, "write", lambda call: (seen.append(call), write(call)))
    monkeypatch.setattr(checks, "copies", lambda *args: (seen.append(args), copies(*args)))
    return seen


def fresh(dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (64, 80)) -> tuple[Tensor, Tensor]:
    return torch.randn(7, 2, dims[0]).to(dtype), torch.randn(7, 2, dims[1]).to(dtype)


def bytes_of(layer: Any) -> list[Tensor]:
    tensors = [as_bytes(layer.k), as_bytes(layer.v), *(scale for scale in (layer.k_scale, layer.v_scale) if scale is not None)]
    return [x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in tensors]


@pytest.mark.usefixtures("way_to_read")
@pytest.mark.parametrize("turned", [0, 24, 64])
@pytest.mark.parametrize("layout", AXES["layout"])
@pytest.mark.parametrize("kv", AXES["kv"])
def test_a_known_write_is_not_checked_again_and_stores_the_same_bytes(kv: str, layout: str, turned: int, checked: list[object]) -> None:
    first, second = (empty_layer(Case(kv=kv, layout=layout, dims=(64, 80)), 4) for _ in range(2))
    for layer in (first, second):
        if kv.endswith("/tensor"):
            layer.k_scale.fill_(0.5), layer.v_scale.fill_(0.75)  # type: ignore[union-attr]
    batch = replace(batch_of(SLOTS), positions=torch.arange(7))
    rope = RotaryTable(torch.randn(7, turned // 2), torch.randn(7, turned // 2), turned == 24) if turned else None
    k, v = fresh()
    write_kv(k, v, first, batch, rope=rope)
    count = len(checked)
    assert count
    write_kv(k, v, second, replace(batch, slots=batch.slots.clone()), rope=rope)
    assert len(checked) == count
    assert all(torch.equal(one, other) for one, other in zip(bytes_of(first), bytes_of(second), strict=True))


@pytest.mark.usefixtures("way_to_read")
def test_a_write_that_differs_is_checked_and_obeyed(checked: list[object]) -> None:
    layer, batch, (k, v) = empty_layer(Case(dims=(64, 80), dtype="bfloat16"), 4), batch_of(SLOTS), fresh(torch.bfloat16)
    write_kv(k, v, layer, batch)
    wide = torch.full((7, 4, 64), torch.nan, dtype=torch.bfloat16)
    wide[:, ::2] = k
    other = [(wide[:, ::2], v), (k.float(), v), (k.half(), v.float()), (k[:3], v[:3])]
    want = bytes_of(layer)
    for new_k, new_v in other:
        count = len(checked)
        write_kv(new_k, new_v, layer, batch if len(new_k) == 7 else batch_of(SLOTS[:3]))
        assert len(checked) == count + 1
        if new_k.dtype != torch.float16:
            assert all(torch.equal(one, now) for one, now in zip(want, bytes_of(layer), strict=True))


@pytest.mark.usefixtures("way_to_read")
def test_what_is_wrong_with_a_write_is_named_after_a_known_one_too() -> None:
    layer, batch, (k, v) = empty_layer(Case(dims=(64, 80)), 4), batch_of(SLOTS), fresh()
    write_kv(k, v, layer, batch), write_kv(k, v, layer, batch)
    for call, text in (
        (lambda: write_kv(k[..., :63], v, layer, batch), "layer.k has K=2 kv heads of D=64"),
        (lambda: write_kv(k, v, layer, replace(batch, slots=batch.slots.int())), "batch.slots is int32"),
        (lambda: write_kv(k.mT.contiguous().mT, v, layer, batch), "its last dim must be contiguous"),
        (lambda: write_kv(k, v, layer, batch, rope=RotaryTable(torch.zeros(2, 33), torch.zeros(2, 33))), "R from 2 to D=64"),
    ):
        for _ in range(2):  # what was refused is not remembered
            with pytest.raises(InvalidRequest, match=text):
                call()


def test_slots_are_looked_at_as_soon_as_debugging_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (k, v) = empty_layer(Case(dims=(64, 80)), 4), fresh()
    write_kv(k, v, layer, batch_of(SLOTS))
    monkeypatch.setenv("PAGEDKV_DEBUG", "1")
    write_kv(k, v, layer, batch_of(SLOTS))
    with pytest.raises(InvalidRequest, match=r"batch.slots holds 0 to 64 but there are 64 slots"):
        write_kv(k, v, layer, batch_of([64, *SLOTS[1:]]))


@pytest.mark.usefixtures("way_to_read")
@pytest.mark.parametrize("frame", [(), (3,), (2, 3), (2, 3, 5), (2, 1, 3, 2)], ids=str)
def test_known_copies_are_not_checked_again_and_a_wrong_frame_is_still_named(frame: tuple[int, ...], checked: list[object]) -> None:
    storage = torch.arange(8).view(-1, *[1] * len(frame)).expand(8, *frame).contiguous()
    start = storage.clone()
    copy_frames(storage, PAIRS)
    want, count = storage.clone(), len(checked)
    storage.copy_(start)
    copy_frames(storage, PAIRS.clone())
    assert torch.equal(storage, want)
    assert len(checked) == count + (len(frame) > 3)  # more dims than the extension describes
    for wrong in (8, -1):
        with pytest.raises(InvalidRequest, match="copies holds .* there are 8 frames in storage"):
            copy_frames(storage, torch.tensor([[1, 2], [2, 3], [3, 1], [5, wrong]], dtype=torch.int32))
    assert torch.equal(storage, want)


def test_copies_of_scattered_frames_are_never_remembered(checked: list[object]) -> None:
    storage = torch.arange(48).view(8, 2, 3).mT
    for _ in range(2):
        copy_frames(storage, PAIRS)
    assert len(checked) == 2


def test_whoever_watches_operators_sees_known_writes_and_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, batch, (k, v), storage = empty_layer(Case(dims=(64, 80)), 4), batch_of(SLOTS), fresh(), torch.arange(8)
    for _ in range(2):
        write_kv(k, v, layer, batch), copy_frames(storage, PAIRS)
    with Names() as names:
        write_kv(k, v, layer, batch), copy_frames(storage, PAIRS)
    assert {name.split(".")[1] for name in names.seen if "pagedkv" in name} == {"write_kv", "copy_frames"}
    asked, own = [], known.write_again
    monkeypatch.setattr(ops.known, "write_again", lambda *args: (asked.append(args), own(*args))[1])  # what the operator asks
    write_kv(k, v, layer, batch)
    assert not asked
    write_kv(k.clone().requires_grad_(), v, layer, batch)
    assert len(asked) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_float64_is_refused_whichever_of_the_two_it_is(which: int) -> None:
    layer, batch, new = empty_layer(Case(dims=(64, 80)), 4), batch_of(SLOTS), list(fresh())
    new[which] = new[which].double()
    with pytest.raises(Exception, match="k is float64; it takes float32, bfloat16, float16"):
        write_kv(*new, layer, batch, backend="cpu")
    write_kv(*new, layer, batch)  # another serves
    kept = [i for i, slot in enumerate(SLOTS) if slot >= 0]
    assert torch.equal(layer.v.flatten(0, 1)[[SLOTS[i] for i in kept]], new[1][kept].float())


def test_what_is_no_checked_write_is_refused_by_the_extension() -> None:
    for name in ("write", "write_again", "write_at_once", "remember_write", "copy", "copy_again", "copy_at_once", "remember_copy"):
        with pytest.raises(TypeError, match="takes"):
            getattr(EXTENSION, name)(1)
    with pytest.raises(TypeError, match="no such instruction set"):
        EXTENSION.remember_write(*[None] * 13, "avx1024", 1)
