"""A call like one before is launched again: what was computed for its signature serves it, and what is in no signature is looked at."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import KVLayer, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import checks, cpu, known, ops, reference, registry
from pagedkv.kernels.args import AttentionCall, WriteCall
from pagedkv.kernels.cuda import attention, moves
from pagedkv.kernels.cuda.attention import PARAMS, POINTERS, Launch, Ready
from tests.cases import Built, Case
from tests.kernels import conftest
from tests.kernels.cuda import backend
from tests.kernels.cuda.emulator import COMPILER, Emulator, call_of
from tests.kernels.cuda.test_driver import Recorder

if TYPE_CHECKING:
    from torch import Tensor

CASE = Case(q_lens=(1, 1), kv_lens=(300, 77), heads=(4, 2), dims=(64, 64), dtype="bfloat16")
POOL = ("k", "v", "k_scale", "v_scale")
nothing_known = conftest.nothing_known
needs_compiler = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")
needs_extension = pytest.mark.skipif(cpu._cpu is None, reason="calls are remembered by the extension")


def changed(call: AttentionCall, **fields: object) -> AttentionCall:
    return AttentionCall(*(fields.get(name, getattr(call, name)) for name in call.__slots__))  # type: ignore[arg-type]


def shifted(x: Tensor, elements: int) -> Tensor:
    """The same tensor, of the same strides, whose memory begins `elements` later than 64 bytes' alignment."""
    room = torch.zeros(x.untyped_storage().nbytes() // x.element_size() + elements + 64, dtype=x.dtype)
    begin = -room.data_ptr() // x.element_size() % (64 // x.element_size()) + elements
    moved = room[begin:].as_strided(x.shape, x.stride())
    return moved.copy_(x)


def attended(call: AttentionCall, machine: Emulator) -> tuple[Tensor, Tensor]:
    call.out.fill_(torch.nan)
    machine.attend(call)
    return call.out.clone(), call.lse.clone()


CHANGES: dict[str, tuple[Case, Any]] = {
    "pools begin where only 8 bytes can be copied at once": (
        CASE,
        lambda call: {"k": shifted(call.k, 4), "v": shifted(call.v, 4)},
    ),
    "queries begin where they cannot be read in fours": (CASE, lambda call: {"q": shifted(call.q, 1)}),
    "values are the keys themselves": (CASE, lambda call: {"v": call.k}),
    "a sequence grew by more chunks": (
        replace(CASE, q_lens=(1,), kv_lens=(300,), split_tokens=16),
        lambda call: {"seq_lens": torch.full_like(call.seq_lens, 30), "max_seqlen_k": 30},
    ),
}


@needs_compiler
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("back", [False, True])
def test_what_no_signature_says_is_looked_at_in_each_call(change: str, back: bool) -> None:
    """Both ways: what was computed for one must not serve the other."""
    case, fields = CHANGES[change]
    first = call_of(case.build())
    first = changed(first, k=shifted(first.k, 0), v=shifted(first.v, 0), q=shifted(first.q, 0))
    second = changed(first, **fields(first))
    calls = (second, first) if back else (first, second)
    machine = Emulator(8)
    same = [attention.ready(call, machine) for call in calls]
    assert same[0] is same[1], "no signature says it"
    for call in (*calls, calls[0]):
        found, expected = attended(call, machine), attended(call, Emulator(8))
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


@needs_compiler
@pytest.mark.parametrize("moved", ["k_new", "v_new", "k", "v"])
def test_a_write_of_the_same_signature_is_launched_for_its_own_memory(moved: str) -> None:
    built = replace(CASE, kv="int8/token_head").build()
    k, v = (torch.randn(2, 2, 64).bfloat16() for _ in range(2))
    layer = built.layer
    aligned = WriteCall(
        *(shifted(x, 0) for x in (k, v, layer.k, layer.v)),
        layer.k_scale,
        layer.v_scale,
        built.batch.slots,
        None,
        None,
        None,
        False,
    )
    fields = [getattr(aligned, name) for name in WriteCall.__slots__]
    calls = (
        aligned,
        WriteCall(
            *(shifted(x, 1) if name == moved else x for name, x in zip(WriteCall.__slots__, fields, strict=True))
        ),
    )
    machine = Emulator()
    assert moves.ready(calls[0], machine) is moves.ready(calls[1], machine)
    for call in (*calls, calls[0]):
        right = WriteCall(
            *(getattr(call, name).clone() if name in POOL else getattr(call, name) for name in WriteCall.__slots__)
        )
        reference.write_kv(right)
        machine.write_kv(call)
        assert torch.equal(call.k, right.k)
        assert torch.equal(call.v, right.v)


@needs_compiler
def test_rows_of_values_that_come_to_lie_in_rows_of_keys_are_written_after_them() -> None:
    pool = torch.zeros(4, 16, 1, 128).bfloat16()
    k, v = torch.ones(2, 1, 128).bfloat16(), torch.full((2, 1, 64), 2.0).bfloat16()
    slots, machine = torch.tensor([3, 40]), Emulator()
    for values in (torch.zeros(4, 16, 1, 128).bfloat16()[..., :64], pool[..., :64]):
        machine.write_kv(WriteCall(k, v, pool, values, None, None, slots, None, None, None, False))
    assert [len(machine.ready), len(machine.launches)] == [1, 3]
    assert (pool.view(64, 128)[slots, :64] == 2).all()
    assert (pool.view(64, 128)[slots, 64:] == 1).all()


def test_threads_share_what_was_computed_and_each_launches_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, call = Recorder(monkeypatch), call_of(CASE.build())
    calls = [changed(call, k=shifted(call.k, by), v=shifted(call.v, by), q=shifted(call.q, by)) for by in (0, 4) * 3]
    seen: list[tuple[int, int, int]] = []

    def launch(shape: Any, blocks: int, params: bytes, *, early: bool = False) -> None:
        said = dict(zip(PARAMS, POINTERS.unpack(params[: POINTERS.size]), strict=False))
        seen.append((said["q"], said["k"], shape.copy))

    monkeypatch.setattr(recorder.driver, "launch", launch)
    assert len({attention.ready(each, recorder.driver) for each in calls}) == 1
    together = threading.Barrier(len(calls))

    def attend(each: AttentionCall) -> None:
        together.wait()
        for _ in range(50):
            attention.attend(each, recorder.driver)

    threads = [threading.Thread(target=attend, args=(each,)) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {(each.q.data_ptr(), each.k.data_ptr(), 8 if i % 2 else 16) for i, each in enumerate(calls)}
    assert len(seen) == 300
    assert set(seen) == expected


def test_signatures_that_are_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_READY", 3)
    recorder = Recorder(monkeypatch)
    for tokens in range(1, 9):
        attention.attend(call_of(replace(CASE, q_lens=(tokens,), kv_lens=(9,)).build()), recorder.driver)
        assert len(recorder.driver.ready) <= 3
    assert len(recorder.launches) == 8


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, nothing_known: None) -> list[object]:
    """The calls that were checked since; "auto" comes to the emulator."""
    monkeypatch.setattr(registry, "KERNELS", (backend.KERNEL, *registry.KERNELS))
    seen: list[object] = []
    for name in ("attention", "write"):
        check = getattr(checks, name)
        monkeypatch.setattr(checks, name, lambda call, check=check: (seen.append(call), check(call)))
    return seen


def attend(built: Built, **changes: Any) -> Any:
    return paged_attention(built.q, built.layer, built.batch, **built.options | changes)


@needs_compiler
@needs_extension
@pytest.mark.parametrize("name", [None, "cuda-emulated"])
def test_a_known_call_of_another_kernel_is_not_checked_again_and_is_served_by_it(
    name: str | None, emulated: list[object]
) -> None:
    built, other = CASE.build(), CASE.build()
    other = other._replace(q=torch.randn_like(other.q))
    first = attend(built, return_lse=True, backend=name)
    before, launched, into = len(emulated), len(backend.machine.launches), torch.empty_like(first[0])
    second, third = attend(built, return_lse=True, backend=name), attend(other, backend=name)
    assert attend(other, out=into, backend=name) is into
    raw = torch.ops.pagedkv.paged_attention.default(*_flat(other), name or "auto")
    assert (len(emulated), len(backend.machine.launches)) == (before, launched + 4)
    for mine, same in zip(first, second, strict=True):
        assert torch.equal(mine, same)
    expected = call_of(other)
    Emulator().attend(expected)
    for out in (third, into, raw[0]):
        assert torch.equal(out, expected.out)
    assert torch.equal(raw[1], expected.lse)
    attend(built, backend="reference")
    assert len(emulated) == before + 1, "who names another kernel gets that one"
    assert len(backend.machine.launches) == launched + 4


def _flat(built: Built) -> tuple[Any, ...]:
    call = call_of(built)
    return tuple(getattr(call, name) for name in call.__slots__[:-2])


@needs_compiler
@needs_extension
def test_a_known_write_of_another_kernel_is_not_checked_again_and_stores_the_same_bytes(emulated: list[object]) -> None:
    built = CASE.build()
    k = torch.randn(2, 2, 64).bfloat16()
    write_kv(k, k, built.layer, built.batch)
    before = len(emulated)
    write_kv(-k, k * 2, built.layer, built.batch)
    assert len(emulated) == before
    S = built.layer.k.shape[1]
    assert torch.equal(built.layer.k[built.batch.slots // S, built.batch.slots % S], -k)
    assert torch.equal(built.layer.v[built.batch.slots // S, built.batch.slots % S], k * 2)


@needs_compiler
@needs_extension
def test_what_a_kernel_refuses_in_a_known_call_is_told_to_the_caller(emulated: list[object]) -> None:
    built = CASE.build()
    attend(built)
    before = len(emulated)
    odd = built._replace(layer=KVLayer(shifted(built.layer.k, 1), built.layer.v))
    with pytest.raises(InvalidRequest, match="no multiple of 4 bytes; align the strides"):
        attend(odd)
    assert len(emulated) == before
    attend(built)


@needs_extension
def test_who_serves_a_known_call_is_kept_until_another_does(nothing_known: None) -> None:
    class Server:
        def __init__(self) -> None:
            self.seen: list[tuple[Any, ...]] = []

        def __call__(self, *fields: Any) -> None:
            self.seen.append(fields)

    built = CASE.build()
    call, first, second = call_of(built), Server(), Server()
    arguments = [getattr(call, name) for name in call.__slots__]
    known.remember(*arguments, "auto", registry.KERNELS, serve=first)
    gone = weakref.ref(first)
    scaleless = [None if name == "scale" else x for name, x in zip(call.__slots__, arguments, strict=True)]
    out, lse = known.again(*scaleless[:-2], None, True, "auto", registry.KERNELS)
    fields = first.seen.pop()
    assert fields[-2] is out
    assert fields[-1] is lse
    assert AttentionCall(*fields).scale == call.scale
    assert known.again(*scaleless[:-2], None, None, "auto", registry.KERNELS) is first.seen.pop()[-2], (
        "out alone; its lse is thrown away"
    )
    assert known.again(*arguments, "other", registry.KERNELS) is None
    del first, fields
    assert gone() is not None
    known.remember(*arguments, "auto", registry.KERNELS, serve=second)
    assert gone() is None
    assert known.again(*arguments, "auto", registry.KERNELS) == (call.out, call.lse)
    assert len(second.seen) == 1


def test_a_kernel_that_serves_no_known_calls_is_asked_each_time(
    monkeypatch: pytest.MonkeyPatch, nothing_known: None
) -> None:
    served: list[object] = []
    own = reference.paged_attention
    monkeypatch.setattr(reference, "paged_attention", lambda call: (served.append(call), own(call)))
    built = CASE.build()
    for _ in range(2):
        ops.paged_attention(built.q, built.layer, built.batch, backend="reference")
    assert len(served) == 2


def test_launches_are_computed_once_for_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Launch, ...]] = []
    own = attention.launches_of
    monkeypatch.setattr(attention, "launches_of", lambda *given: made.append(found := own(*given)) or found)
    recorder, call = Recorder(monkeypatch), call_of(CASE.build())
    for _ in range(3):
        attention.attend(call, recorder.driver)
    assert (len(made), len(recorder.launches)) == (1, 3)
    Ready(recorder.driver)(*(getattr(call, name) for name in call.__slots__))
    assert len(made) == 2
