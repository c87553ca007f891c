"""Writes, copies and merges like ones that were checked run at once, with the same bytes; what differs is checked and refused as ever."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import copy_frames, merge_states, write_kv
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
    """The writes, copies and merges that were checked since."""
    seen, write, copies, merge = [], checks.write, checks.copies, checks.merge
    monkeypatch.setattr(checks, "merge", lambda *args: (seen.append(args), merge(*args)))
    monkeypatch.setattr(checks, "write", lambda call: (seen.append(call), write(call)))
    monkeypatch.setattr(checks, "copies", lambda *args: (seen.append(args), copies(*args)))
    return seen


def fresh(dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (64, 80)) -> tuple[Tensor, Tensor]:
    return torch.randn(7, 2, dims[0]).to(dtype), torch.randn(7, 2, dims[1]).to(dtype)


def two_states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return torch.randn(5, 3, 80).to(dtype), torch.randn(5, 3), torch.randn(5, 3, 80).to(dtype), torch.randn(5, 3)


def bytes_of(layer: Any) -> list[Tensor]:
    tensors = [
        as_bytes(layer.k),
        as_bytes(layer.v),
        *(scale for scale in (layer.k_scale, layer.v_scale) if scale is not None),
    ]
    return [x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in tensors]


@pytest.mark.usefixtures("way_to_read")
@pytest.mark.parametrize("turned", [0, 24, 64])
@pytest.mark.parametrize("layout", AXES["layout"])
@pytest.mark.parametrize("kv", AXES["kv"])
def test_a_known_write_is_not_checked_again_and_stores_the_same_bytes(
    kv: str, layout: str, turned: int, checked: list[object]
) -> None:
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
        (
            lambda: write_kv(k, v, layer, batch, rope=RotaryTable(torch.zeros(2, 33), torch.zeros(2, 33))),
            "R from 2 to D=64",
        ),
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
def test_known_copies_are_not_checked_again_and_a_wrong_frame_is_still_named(
    frame: tuple[int, ...], checked: list[object]
) -> None:
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


@pytest.mark.usefixtures("way_to_read")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_known_merge_is_not_checked_again_and_gives_the_same_bits(dtype: torch.dtype, checked: list[object]) -> None:
    states = two_states(dtype)
    first = merge_states(*states)
    count = len(checked)
    assert count
    for again in (merge_states(*states), merge_states(*(x.clone() for x in states))):
        assert all(
            torch.equal(one, other) and one.stride() == other.stride() for one, other in zip(first, again, strict=True)
        )
    assert len(checked) == count
    other = merge_states(*states[2:], *states[:2])
    assert len(checked) == count
    assert not torch.equal(merge_states(states[0] * 2, *states[1:])[0], other[0])


@pytest.mark.usefixtures("way_to_read")
def test_a_merge_that_differs_is_checked_and_obeyed(checked: list[object]) -> None:
    out_a, lse_a, out_b, lse_b = two_states()
    want = merge_states(out_a, lse_a, out_b, lse_b)
    turned = out_a.transpose(0, 2).contiguous().transpose(0, 2), lse_a.T.contiguous().T
    for states in ((turned[0], lse_a, out_b, lse_b), (out_a, turned[1], out_b, lse_b), (*turned, out_b, lse_b)):
        for known_now in (False, True):
            count = len(checked)
            out, lse = merge_states(*states)
            assert len(checked) == count + (not known_now)
            assert torch.equal(out, want[0])
            assert torch.equal(lse, want[1])


@pytest.mark.usefixtures("way_to_read")
def test_what_is_wrong_with_a_merge_is_named_after_a_known_one_too() -> None:
    out_a, lse_a, out_b, lse_b = two_states()
    merge_states(out_a, lse_a, out_b, lse_b), merge_states(out_a, lse_a, out_b, lse_b)
    for wrong, text in (
        ((out_a, lse_a, out_b[:2], lse_b), "the two states must match"),
        ((out_a, lse_a.double(), out_b, lse_b), "lse_a is .* float64; it must be float32"),
        ((out_a, lse_a, out_b.half(), lse_b), "the two states must match"),
    ):
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=text):
                merge_states(*wrong)


def test_float64_states_are_merged_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    out_a, lse_a, out_b, lse_b = two_states()
    want = merge_states(out_a, lse_a, out_b, lse_b)[0]
    assert (merge_states(out_a.double(), lse_a, out_b.double(), lse_b)[0] - want).abs().max() < 1e-6
    monkeypatch.setenv("PAGEDKV_KERNELS", "cpu")
    with pytest.raises(Exception, match="out is float64; it takes float32, bfloat16, float16"):
        merge_states(out_a.double(), lse_a, out_b.double(), lse_b)


def test_views_of_negated_memory_are_computed_with_what_they_say() -> None:
    """The imaginary part of a conjugate: its numbers are the negatives of those in memory, which the dispatcher writes out."""
    layer, batch, (k, v) = empty_layer(Case(dims=(64, 80)), 4), batch_of(SLOTS), fresh()
    states, at = two_states(), [slot for slot in SLOTS if slot >= 0]
    plain = merge_states(*states)
    for _ in range(2):
        merge_states(*states), write_kv(k, v, layer, batch)
        negative = torch._neg_view(-k)
        assert negative.is_neg()
        write_kv(negative, v, layer, batch)
        assert torch.equal(layer.k.flatten(0, 1)[at], k[[slot >= 0 for slot in SLOTS]])
        imaginary = torch.complex(torch.zeros_like(states[1]), -states[1]).conj().imag
        assert imaginary.is_neg()
        for other in ((states[0], imaginary, *states[2:]), (torch._neg_view(-states[0]), *states[1:])):
            assert all(torch.equal(one, two) for one, two in zip(merge_states(*other), plain, strict=True))


def test_whoever_watches_operators_sees_known_writes_copies_and_merges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, batch, (k, v), storage = empty_layer(Case(dims=(64, 80)), 4), batch_of(SLOTS), fresh(), torch.arange(8)
    states = two_states()
    for _ in range(2):
        write_kv(k, v, layer, batch), copy_frames(storage, PAIRS), merge_states(*states)
    with Names() as names:
        write_kv(k, v, layer, batch), copy_frames(storage, PAIRS), merge_states(*states)
    assert {name.split(".")[1] for name in names.seen if "pagedkv" in name} == {
        "write_kv",
        "copy_frames",
        "merge_states",
    }
    asked, own = [], known.write_again
    monkeypatch.setattr(
        ops.known, "write_again", lambda *args: (asked.append(args), own(*args))[1]
    )  # what the operator asks
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
    for of in ("write", "copy", "merge"):
        for name in (of, f"{of}_again", f"{of}_at_once", f"remember_{of}"):
            with pytest.raises(TypeError, match="takes"):
                getattr(EXTENSION, name)(1)
    with pytest.raises(TypeError, match="these are not two checked states"):
        EXTENSION.merge(None, None, None, None, "portable", 1)
    with pytest.raises(TypeError, match="no such instruction set"):
        EXTENSION.remember_write(*[None] * 13, "avx1024", 1, None)
