"""A launcher serves each call with its own memory, and computes launches again for each fact that they depend on."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import KVLayer, bind_attention, bind_write
from pagedkv.kernels import checks, cpu, reference, registry
from pagedkv.kernels.args import AttentionCall
from pagedkv.kernels.cuda import moves
from pagedkv.kernels.cuda.attention import AttentionLauncher
from tests.cases import Case, call_of, write_of
from tests.kernels import conftest
from tests.kernels.cuda import backend
from tests.kernels.cuda.emulator import COMPILER, Emulator

if TYPE_CHECKING:
    from torch import Tensor

CASE = Case(q_lens=(1, 1), kv_lens=(300, 77), heads=(4, 2), dims=(64, 64), dtype="bfloat16")
unbound = conftest.unbound
needs_compiler = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")
needs_extension = pytest.mark.skipif(cpu._cpu is None, reason="the extension serves bound calls")


def shifted(x: Tensor, elements: int) -> Tensor:
    """The same tensor, of the same strides. Its memory begins `elements` later than 64 bytes' alignment."""
    buffer = torch.zeros(x.untyped_storage().nbytes() // x.element_size() + elements + 64, dtype=x.dtype)
    begin = -buffer.data_ptr() // x.element_size() % (64 // x.element_size()) + elements
    moved = buffer[begin:].as_strided(x.shape, x.stride())
    return moved.copy_(x)


def launcher_of(call: AttentionCall, machine: Any) -> AttentionLauncher:
    """Return a launcher for calls on the layer of `call` with its options."""
    return AttentionLauncher(*call.split()[:2], machine)


def attended(call: AttentionCall, launcher: AttentionLauncher) -> tuple[Tensor, Tensor]:
    machine: Any = launcher._machine
    if isinstance(machine, Emulator):
        machine._may_touch(*call)
    call.out.fill_(torch.nan)
    launcher(*call.split()[2])
    return call.out.clone(), call.lse.clone()


SPLIT = replace(CASE, q_lens=(1,), kv_lens=(300,), split_tokens=16)


def with_another_sequence(call: AttentionCall) -> dict[str, Any]:
    rows = ("seq_lens", "block_table", "q", "out", "lse")
    return {name: getattr(call, name)[[0, 1, 1]] for name in rows} | {"cu_seqlens_q": torch.arange(4).int()}


CHANGES: dict[str, tuple[Case, Any]] = {
    "queries begin where they cannot be read in fours": (CASE, lambda call: {"q": shifted(call.q, 1)}),
    "queries have other strides": (CASE, lambda call: {"q": call.q.repeat(1, 2, 1)[:, ::2]}),
    "results have other strides": (CASE, lambda call: {"out": call.out.repeat(1, 2, 1)[:, ::2]}),
    "the page table is wider": (CASE, lambda call: {"block_table": call.block_table.repeat(1, 2)}),
    "causality has another stride": (
        replace(CASE, mask="some"),
        lambda call: {"causal_of": call.causal_of.repeat_interleave(2)[::2]},
    ),
    "there is another sequence": (CASE, with_another_sequence),
    "a sequence grew by more chunks": (SPLIT, lambda call: {"seq_lens": call.seq_lens - 270, "max_seqlen_k": 30}),
}


@needs_compiler
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("back", [False, True])
def test_launches_follow_each_fact_that_they_depend_on(change: str, back: bool) -> None:
    """Both orders: the launches of the first call must not serve the second."""
    case, fields = CHANGES[change]
    first = call_of(case.build())
    first = first._replace(q=shifted(first.q, 0))
    second = first._replace(**fields(first))
    calls = (second, first) if back else (first, second)
    launcher = launcher_of(first, Emulator(8))
    for call in (*calls, calls[0]):
        found, expected = attended(call, launcher), attended(call, launcher_of(call, Emulator(8)))
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    assert len(launcher._launches) == 2


ROWS_OF_A_LAUNCHER = {"none": None, "zeros": [0, 0], "counting": [0, 1], "swapped": [1, 0], "ones": [1, 1]}


@needs_compiler
@pytest.mark.parametrize("split_tokens", [None, pytest.param(64, marks=pytest.mark.slow)])
def test_a_launcher_reads_the_rows_of_each_call_whatever_calls_came_before(split_tokens: int | None) -> None:
    """Rows that are absent count from 0. Each pair of calls comes in both orders."""
    case = replace(CASE, kv_lens=(300, 300), split_tokens=split_tokens)
    plain = call_of(case.build())
    given = {name: None if at is None else torch.tensor(at).int() for name, at in ROWS_OF_A_LAUNCHER.items()}
    calls = {name: plain._replace(rows=rows) for name, rows in given.items()}
    right = {name: attended(call, launcher_of(call, Emulator())) for name, call in calls.items()}
    assert not torch.equal(right["none"][0], right["zeros"][0])
    launcher = launcher_of(plain, Emulator())
    for name in (one for pair in itertools.permutations(calls, 2) for one in pair):
        found = attended(calls[name], launcher)
        assert all(torch.equal(mine, other) for mine, other in zip(found, right[name], strict=True)), name


@needs_compiler
@pytest.mark.parametrize("moved", ["k_new", "v_new"])
def test_a_write_is_launched_for_its_own_memory(moved: str) -> None:
    built = replace(CASE, kv="int8/token_head").build()
    k, v = (shifted(torch.randn(2, 2, 64).bfloat16(), 0) for _ in range(2))
    layer, slots, machine = built.layer, built.batch.slots, Emulator()
    launcher = moves.WriteLauncher(layer, None, machine)
    aligned = {"k_new": k, "v_new": v}
    for new in (aligned, aligned | {moved: shifted(aligned[moved], 1)}, aligned):
        right = write_of(copy.deepcopy(layer), new["k_new"], new["v_new"], slots)
        reference.write_kv(right)
        machine._may_touch(*new.values(), layer.k, layer.v, layer.k_scale, layer.v_scale, slots)
        launcher(new["k_new"], new["v_new"], slots, None)
        assert torch.equal(layer.k, right.k)
        assert torch.equal(layer.v, right.v)
    assert len(launcher._launches) == 2


@needs_compiler
def test_rows_of_values_that_lie_in_rows_of_keys_are_written_after_them() -> None:
    pool = torch.zeros(4, 16, 1, 128).bfloat16()
    k, v = torch.ones(2, 1, 128).bfloat16(), torch.full((2, 1, 64), 2.0).bfloat16()
    slots, machine = torch.tensor([3, 40]), Emulator()
    for values in (torch.zeros(4, 16, 1, 128).bfloat16()[..., :64], pool[..., :64]):
        machine.write_kv(write_of(KVLayer(pool, values), k, v, slots))
    assert len(machine.launches) == 3
    assert (pool.view(64, 128)[slots, :64] == 2).all()
    assert (pool.view(64, 128)[slots, 64:] == 1).all()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, unbound: None) -> list[object]:
    """The calls that the operator checked since; "auto" chooses the emulator."""
    monkeypatch.setattr(registry, "KERNELS", (backend.KERNEL, *registry.KERNELS))
    seen: list[object] = []
    for name in ("attention", "write"):
        check = getattr(checks, name)
        monkeypatch.setattr(checks, name, lambda call, check=check: (seen.append(call), check(call)))
    return seen


@needs_compiler
@needs_extension
@pytest.mark.parametrize("name", [None, "cuda-emulated"])
def test_bound_calls_are_served_by_the_emulator(name: str | None, emulated: list[object]) -> None:
    built, launched = CASE.build(), len(backend.machine.launches)
    emulated.clear()  # the operator wrote the layer of the case
    attend, store = bind_attention(built.layer, backend=name), bind_write(built.layer, backend=name)
    q, k, slots = torch.randn_like(built.q), torch.randn(2, 2, 64).bfloat16(), built.batch.slots
    store(k, k * 2, built.batch)
    out, lse = attend(q, built.batch, return_lse=True)
    into = torch.empty_like(out)
    assert attend(q, built.batch, out=into) is into
    assert (len(emulated), len(backend.machine.launches)) == (0, launched + 3)
    expected = call_of(built._replace(q=q))
    Emulator().attend(expected)
    for mine, other in ((out, expected.out), (into, expected.out), (lse, expected.lse)):
        assert torch.equal(mine, other)
    S = built.layer.k.shape[1]
    assert torch.equal(built.layer.k[slots // S, slots % S], k)
    assert torch.equal(built.layer.v[slots // S, slots % S], k * 2)
