"""Launches of attention follow from integers of the host, fit the SM, and have workspaces that are long enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import KernelUnavailable
from pagedkv.kernels import registry
from pagedkv.kernels.args import AttentionCall
from pagedkv.kernels.cuda import attention, backend
from pagedkv.kernels.cuda.attention import RECORD_WORDS
from pagedkv.kernels.cuda.specialisation import KeyLayout, RowClass, specialise
from pagedkv.spec import NUMBERS
from tests.cases import Case, call_of
from tests.kernels.cuda.emulator import COMPILER, Emulator
from tests.kernels.cuda.test_attention import check

if TYPE_CHECKING:
    from collections.abc import Sequence

H200, AD102 = (227 << 10, 228 << 10), (99 << 10, 100 << 10)
BF16 = (NUMBERS["bfloat16"],) * 3
needs_compiler = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")


def results(
    case: Case, machine: Emulator, rows: slice = slice(None), **changes: object
) -> tuple[torch.Tensor, torch.Tensor]:
    call = call_of(case.build(), **changes)
    machine.attend(call)
    return call.out[rows], call.lse[rows]


SPLIT = Case(q_lens=(1, 3, 1), kv_lens=(400, 250, 77), heads=(8, 2), dtype="bfloat16", sinks=True, split_tokens=64)


def splits_are_equal(one: Emulator, other: Emulator) -> bool:
    """Return whether both machines give the same bits with split_tokens."""
    return all(torch.equal(mine, right) for mine, right in zip(results(SPLIT, other), results(SPLIT, one), strict=True))


@needs_compiler
@pytest.mark.parametrize("num_sms", [1, 2, 7, 40])
def test_with_split_tokens_no_bit_depends_on_how_many_ctas_share_the_work(num_sms: int) -> None:
    """On 40 SMs each chunk goes to another CTA, and the last CTA merges; on 1 SM, one CTA folds all chunks."""
    assert splits_are_equal(Emulator(3), Emulator(num_sms, seed=num_sms))


@needs_compiler
def test_chunks_of_the_last_unit_have_memory_for_their_partial_states() -> None:
    """Indices of partial states follow from places on the line, where a unit is wider than its chunks by two: units *
    chunks partial states would be too few."""
    check(Case((1,), (640,), heads=(8, 2), dtype="bfloat16", split_tokens=64), Emulator(40))


@needs_compiler
@pytest.mark.parametrize("moved", ["address", "stride"])
@pytest.mark.parametrize("pool", ["k", "v"])
def test_the_worse_aligned_of_both_pools_decides_the_bytes_of_a_copy(pool: str, moved: str) -> None:
    call, expected = (call_of(Case(dims=(64, 64), dtype="bfloat16").build()) for _ in range(2))
    old, machine = getattr(call, pool), Emulator()
    wide = torch.full((old.numel() // 64 + 1, 68), torch.nan, dtype=old.dtype)
    new = wide.view(-1)[4 : 4 + old.numel()].view(old.shape) if moved == "address" else wide[:-1, :64].view(old.shape)
    new.copy_(old)
    odd = call._replace(**{pool: new})
    machine.attend(odd)
    Emulator().attend(expected)
    assert [kernel.copy for kernel in machine.launches] == [8]
    assert torch.equal(odd.out, expected.out)
    assert torch.equal(odd.lse, expected.lse)


@needs_compiler
def test_a_decode_is_one_launch_and_long_queries_take_one_for_each_class() -> None:
    machine = Emulator()
    results(Case(dtype="bfloat16"), machine)
    assert [kernel.rows for kernel in machine.launches] == [8]
    machine.launches.clear()
    results(Case(q_lens=(40, 1), kv_lens=(64, 16), dtype="bfloat16"), machine)
    assert [kernel.rows for kernel in machine.launches] == [8, 16, 32, 64]


def test_layers_of_a_step_are_launches_of_one_kind_and_steps_of_other_options_are_not() -> None:
    def kind(**changes: Any) -> int:
        return attention._launches_of(call_of(Case(dtype="bfloat16", **changes).build()), Emulator())[0].kind

    assert kind() == kind(q_lens=(1, 1), kv_lens=(40, 40)) == kind(block_size=32)
    assert len({kind(), kind(window=16), kind(split_tokens=16), kind(heads=(4, 4)), kind(mask="all")}) == 5


STEP = Case((1, 3, 1, 1), (90, 333, 40, 200), heads=(4, 1), dims=(64, 64), dtype="bfloat16", rows=True)


def steps() -> list[AttentionCall]:
    """Return two layers of a step, and a layer each of steps that differ from the one before in one of queries, lengths
    and rows. The last three find a smaller page table, rows of zeros after no rows, and the reverse."""
    first = call_of(STEP.build())
    rows = first.rows
    assert rows is not None
    swapped = first._replace(rows=rows[[1, 0, 2, 3]], block_table=first.block_table.clone())
    swapped.block_table[rows[[1, 0]].long()] = first.block_table[rows[[0, 1]].long()]
    bare = first._replace(rows=None, block_table=first.block_table[rows.long()], seq_lens=torch.full_like(rows, 40))
    return [
        first,
        first._replace(q=first.q * 2),
        first._replace(cu_seqlens_q=torch.tensor([0, 2, 4, 5, 6], dtype=torch.int32)),
        first,
        first._replace(seq_lens=first.seq_lens - torch.tensor([0, 0, 30, 0], dtype=torch.int32)),
        swapped,
        first,
        bare._replace(block_table=bare.block_table[:, :3].contiguous()),
        bare._replace(rows=torch.zeros_like(rows)),
        bare,
    ]


def steps_are_right(machine: Emulator) -> bool:
    """Return whether launches that find what the one before left give the bits of launches that find zeros."""
    right = True
    for call in steps():
        found, expected = (call._replace(out=call.out.clone(), lse=call.lse.clone()) for _ in "ab")
        machine.attend(found)
        Emulator(machine.num_sms).attend(expected)
        right &= torch.equal(found.out.view(torch.int16), expected.out.view(torch.int16))
        right &= torch.equal(found.lse, expected.lse)
    return right


@needs_compiler
def test_launches_with_other_lengths_do_not_use_the_shares_of_earlier_ones() -> None:
    assert steps_are_right(Emulator(8))


@needs_compiler
def test_tickets_that_an_earlier_launch_left_count_for_nothing() -> None:
    """Lengths that change while a launch runs would leave such tickets."""
    machine, call = Emulator(8), call_of(STEP.build())
    machine.attend(call)
    right = call.out.clone()
    for kept in machine.sets.values():
        kept[RECORD_WORDS * 2 * machine.num_sms :] = torch.randint(0, 1 << 20, (4 * machine.num_sms,))
    for _ in range(3):
        call.out.fill_(torch.nan)
        machine.attend(call)
        assert torch.equal(call.out, right)


LATEST = 2**43 - 1
"""The last number of a launch that a ticket holds: 10,000 launches of a kind a second reach it in 27 years."""


def late_launches_are_right(
    machine: Emulator, call: AttentionCall, numbers: Sequence[int] = (2**32 - 1, 2**32, 2**32 + 1)
) -> bool:
    """Return whether launches of these numbers give what the first one gives, and find what the one before left."""
    machine.attend(call)
    expected, right = (call.out.clone(), call.lse.clone()), True
    sizes = {launch.kind: RECORD_WORDS * launch.blocks for launch in attention._launches_of(call, machine)}
    counts = [machine.sets[kind][:size].view(-1, RECORD_WORDS)[:, 1] for kind, size in sizes.items()]
    assert all((count == 1).all() for count in counts), "each CTA has counted one launch"
    for number in numbers:
        for count in counts:
            count[:] = number
        call.out.fill_(torch.nan)
        call.lse.fill_(torch.nan)
        machine.attend(call)
        right &= all(torch.equal(mine, one) for mine, one in zip((call.out, call.lse), expected, strict=True))
    return right


LATE = {
    "free cut": STEP,
    "even cut": Case((1,), (900,), heads=(4, 1), dims=(64, 64), dtype="bfloat16"),
    "many chunks": Case((1,), (2100,), heads=(4, 2), dims=(64, 64), dtype="bfloat16", split_tokens=40),
    "long queries": Case((40,), (400,), heads=(4, 1), dims=(64, 64), dtype="bfloat16"),
}


@needs_compiler
@pytest.mark.parametrize(
    "number",
    [
        2**32,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (2**24, 2**31, 2**40, 2**42, LATEST - 1)),
    ],
)
@pytest.mark.parametrize("case", LATE)
def test_each_launch_of_a_kind_gives_what_the_first_one_gave(case: str, number: int) -> None:
    assert late_launches_are_right(Emulator(8), call_of(LATE[case].build()), (number - 1, number, number + 1))


@pytest.mark.parametrize("shared", [H200, AD102])
def test_specialisations_fit_the_sm(shared: tuple[int, int]) -> None:
    for dims in ((64, 64), (128, 128), (256, 256), (576, 512)):
        for row_class in RowClass.of(BF16, dims):
            kernel = specialise(BF16, dims, row_class, KeyLayout(), shared)
            assert kernel.shared_bytes <= shared[0]
            assert kernel.blocks * (kernel.shared_bytes + 1024) <= shared[1]
            assert kernel.stages >= 2


def test_heads_that_do_not_fit_the_gpu_are_refused_before_the_call() -> None:
    wide = registry.Case(device="cuda", dtype="float32", kv_dtype="float32", head_dim=576, head_dim_v=512)
    assert backend._shared_memory_objections(wide, H200) == []
    assert backend._shared_memory_objections(wide._replace(dtype="bfloat16", kv_dtype="bfloat16"), AD102) == []
    assert backend._shared_memory_objections(wide._replace(kv_dtype=None), AD102) == [], "the dtype is not known yet"
    (found,) = backend._shared_memory_objections(wide, AD102)
    assert "head dims (576, 512) need more shared memory than the 101376 bytes of this GPU" in found


@needs_compiler
def test_rows_that_begin_at_odd_addresses_are_copied_two_bytes_at_a_time() -> None:
    call, expected = (call_of(Case(dims=(64, 64), kv="fp8_e4m3", dtype="bfloat16").build()) for _ in range(2))
    pool = torch.zeros(call.k.numel() + 1, dtype=torch.uint8)[1:].view(call.k.shape).copy_(call.k.view(torch.uint8))
    odd, machine = call._replace(k=pool.view(call.k.dtype)), Emulator()
    machine.attend(odd)
    Emulator().attend(expected)
    assert [kernel.copy for kernel in machine.launches] == [2]
    assert torch.equal(odd.out, expected.out)


@pytest.mark.parametrize(
    ("op", "dims", "dtype", "why"),
    [
        ("paged_attention", (200, 192), "bfloat16", "head_dim is 200; with head dims 200/192 it takes multiples of 16"),
        (
            "paged_attention",
            (192, 176),
            "float32",
            "head_dim_v is 176; with head dims 192/176 it takes multiples of",
        ),
        ("paged_attention", (640, 512), "bfloat16", "head_dim is 640; with head dims 640/512 it takes multiples of 64"),
        ("write_kv", (2048, 64), "float16", "head_dim is 2048; it takes up to "),
    ],
)
def test_heads_of_other_widths_are_refused(op: str, dims: tuple[int, int], dtype: str, why: str) -> None:
    (found,) = backend.case_objections(registry.Case(op, "cuda", dtype, head_dim=dims[0], head_dim_v=dims[1]))
    assert found.startswith(why)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 256), ("float32", 128)])
def test_rotated_rows_are_not_shared_by_warps(dtype: str, most: int) -> None:
    case = registry.Case(device="cuda", dtype=dtype, kv_dtype="k5v4", head_dim=most, head_dim_v=most)
    assert backend.case_objections(case) == []
    (found,) = backend.case_objections(case._replace(head_dim=most + 64))
    assert f"up to {most}" in found


def test_a_machine_without_a_gpu_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(KernelUnavailable, match="torch (finds no CUDA device|.* is built without CUDA)"):
        registry.resolve(registry.Case(device="cuda"), "cuda")
