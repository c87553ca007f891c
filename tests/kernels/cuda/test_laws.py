"""csrc/cuda in the emulator, beyond the laws of every backend. Every stride may exceed 32 bits."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import pagedkv
from pagedkv import copy_frames, merge_states, write_kv
from pagedkv.kernels import reference
from pagedkv.kernels.args import RotaryTable
from pagedkv.kernels.cuda import attention, moves
from tests.cases import Case, call_of, write_of
from tests.kernels import test_write
from tests.kernels.conftest import EMULATED, Runner
from tests.kernels.cuda import backend
from tests.kernels.cuda.emulator import COMPILER, Emulator

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")
MIXED = Case(
    q_lens=(1, 3, 0, 20),
    kv_lens=(100, 33, 9, 40),
    heads=(4, 2),
    dims=(64, 48),
    kv="fp8_e4m3/token_head",
    dtype="bfloat16",
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """Let the registry choose the emulator."""
    Runner(EMULATED).prepare(monkeypatch)
    return backend.machine


def test_every_operation_runs_its_own_kernel(machine: Emulator) -> None:
    built = Case().build()
    pagedkv.paged_attention(built.q, built.layer, built.batch)
    write_kv(torch.randn(3, 2, 64), torch.randn(3, 2, 64), built.layer, built.batch)
    merge_states(torch.randn(3, 4, 64), torch.randn(3, 4), torch.randn(3, 4, 64), torch.randn(3, 4))
    copy_frames(built.layer.k, torch.tensor([[0, 1]], dtype=torch.int32))
    assert [kernel.name for kernel in machine.launches] == [
        "paged_attention",
        "write_kv",
        "merge_states",
        "copy_frames",
    ]


def far(x: Tensor, dim: int, folder: Path) -> Tensor:
    """Return a copy of `x` in a sparse file; its first and last element along `dim` are over 2^32 elements apart."""
    strides = list(x.contiguous().stride())
    strides[dim] = -(-(2**32 + 4096) // max(1, x.shape[dim] - 1) // 64) * 64
    elements = 1 + sum((count - 1) * stride for count, stride in zip(x.shape, strides, strict=True))
    sparse = torch.from_file(str(folder / "far"), shared=True, size=elements * x.element_size(), dtype=torch.uint8)
    return sparse.view(x.dtype).as_strided(x.shape, strides).copy_(x)


def some(*fields: str) -> pytest.MarkDecorator:
    """Each is a field and one of its dims; every fifth is quick."""
    given = (field.split() for field in fields)
    return pytest.mark.parametrize(
        ("name", "dim"),
        [pytest.param(x, int(d), marks=[pytest.mark.slow] * (n % 5 > 0)) for n, (x, d) in enumerate(given)],
    )


@some(
    "q 0", "q 1", "v 0", "k 0", "k 1", "v 1", "k 2", "v 2", "k_scale 0", "k_scale 1", "k_scale 2", "v_scale 1",
    "out 0", "v_scale 0", "v_scale 2", "block_table 0", "out 1", "tree_mask 0",
)  # fmt: skip
def test_strides_beyond_32_bits_are_read_right(name: str, dim: int, tmp_path: Path) -> None:
    call = call_of(replace(MIXED, dims=(64, 64), mask="tree", rows=True).build())
    expected, machine = call._replace(out=torch.full_like(call.out, torch.nan)), Emulator()
    Emulator().attend(expected)
    apart = call._replace(**{name: far(getattr(call, name), dim, tmp_path)})
    machine.attend(apart)
    rows = int(call.cu_seqlens_q[-1])
    assert torch.equal(apart.out[:rows], expected.out[:rows])
    assert torch.equal(apart.lse, expected.lse)


@some(
    "k_new 0", "k_new 1", "v_new 0", "k 0", "k 1", "v_new 1", "v 2", "k 2", "v 0", "k_scale 0", "v 1", "k_scale 1",
    "slots 0", "v_scale 2", "positions 0", "cos 0", "sin 0",
)  # fmt: skip
def test_strides_beyond_32_bits_are_written_right(name: str, dim: int, tmp_path: Path) -> None:
    layer = MIXED.build().layer
    k, v, angles = torch.randn(5, 2, 64).bfloat16(), torch.randn(5, 2, 48).bfloat16(), torch.rand(9, 16)
    slots, positions = torch.tensor([3, 40, -1, 17, 60]), torch.tensor([8, 0, 3, 4, 1])
    rope = RotaryTable(angles.cos(), angles.sin())
    call, expected = (write_of(copy.deepcopy(layer), k, v, slots, rope, positions) for _ in range(2))
    Emulator().write_kv(expected)
    apart = call._replace(**{name: far(getattr(call, name), dim, tmp_path)})
    Emulator().write_kv(apart)
    for field in ("k", "v", "k_scale", "v_scale"):
        mine, right = (getattr(x, field).contiguous().view(torch.uint8) for x in (apart, expected))
        assert torch.equal(mine, right)


def test_an_lse_of_any_stride_is_filled_and_its_padding_left_alone() -> None:
    built = replace(MIXED, dims=(64, 64), mask="tree", rows=True, padding=3).build()  # kernels that were compiled above
    expected = call_of(built)
    Emulator().attend(expected)
    wide = torch.full((expected.lse.shape[0], 8), 7.0)
    strided = expected._replace(lse=wide[:, ::2])
    Emulator().attend(strided)
    assert torch.equal(wide[:-3, ::2], expected.lse[:-3])
    assert (wide[-3:] == 7).all()
    assert (wide[:, 1::2] == 7).all()


@pytest.mark.parametrize("block_size", [1, pytest.param(3, marks=pytest.mark.slow), 1000, 2**20 + 1])
def test_very_small_and_very_large_block_sizes_are_served(block_size: int) -> None:
    case = Case(q_lens=(1, 5), kv_lens=(70, 9), heads=(2, 1), dims=(64, 64), dtype="bfloat16")
    built = replace(case, block_size=min(block_size, 1000)).build()
    call = call_of(built)
    if block_size > 1000:  # one frame for each sequence, mostly unused
        pools = [torch.zeros(2, block_size, 1, 64, dtype=torch.bfloat16) for _ in "kv"]
        for sequence, (pool, of) in (
            (i, pair) for i in range(2) for pair in zip(pools, (built.layer.k, built.layer.v), strict=True)
        ):
            pool[sequence, :1000] = of[call.block_table[sequence, 0]]
        call = call._replace(k=pools[0], v=pools[1], block_table=torch.tensor([[0], [1]], dtype=torch.int32))
    right = call_of(built)
    reference.paged_attention(right)
    Emulator().attend(call)
    assert torch.allclose(call.out, right.out, atol=2**-7, rtol=2**-7)


def test_chunks_with_too_many_partial_states_are_folded_by_one_cta_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(q_lens=(1,), kv_lens=(200,), heads=(2, 1), dims=(64, 64), dtype="bfloat16", split_tokens=16)
    call, few, many = call_of(case.build()), Emulator(4), Emulator(4)
    many.attend(call)
    out = call.out.clone()
    monkeypatch.setattr(attention, "MOST_PARTIALS", 1000)
    few.attend(call)
    assert torch.equal(call.out, out)
    assert few.memory[-2].numel() < many.memory[-2].numel(), "partial states; the memory that is kept comes after them"
    monkeypatch.undo()
    longest = call._replace(max_seqlen_k=1 << 20, split_tokens=1)
    assert sum(4 * launch.floats for launch in attention._launches_of(longest, few)) <= attention.MOST_PARTIALS
    launch = attention._launches_of(longest, few)[0]
    assert launch.words == attention.RECORD_WORDS * launch.blocks, "no CTA shares a unit, so there are no tickets"


@pytest.mark.parametrize("word", [1, 16])
def test_many_copies_go_through_a_scratch_buffer_of_bounded_size(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "MOST_SCRATCH", 100_000)
    width = 200 * word + (word == 1)
    pool = torch.randint(0, 255, (3000, width), dtype=torch.uint8)
    sources = torch.randperm(3000)
    copies = torch.stack([sources, sources.roll(1)], 1).int()[: 2900 if word == 1 else 3000]
    expected, machine = pool.clone(), Emulator(shared=(20 << 10, 21 << 10))
    reference.copy_frames(expected, copies)
    machine.copy_frames(pool, copies)
    assert torch.equal(pool, expected)
    assert max(x.numel() for x in machine.memory[2:]) <= max(100_000, 32 * 3000 * word)
    assert len(machine.launches) > 2


@pytest.mark.parametrize("count", [60, 600, 2500])
def test_very_many_copies_take_narrower_runs_and_then_a_scratch_buffer(count: int, machine: Emulator) -> None:
    pool = torch.randn(2600, 36)
    copies = torch.stack([torch.randint(0, 2600, (count,)), torch.randperm(2600)[:count]], 1).int()
    expected = pool.clone()
    reference.copy_frames(expected, copies)
    copy_frames(pool, copies)
    assert torch.equal(pool, expected)
    assert [kernel.shared_bytes >> 10 for kernel in machine.launches] == {60: [32], 600: [96], 2500: [32, 32]}[count]


@pytest.mark.parametrize(("kv", "limit"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_each_float_becomes_the_nearest_byte_without_the_instruction(kv: str, limit: float, machine: Emulator) -> None:
    """As on sm_80, by arithmetic."""
    machine.arch = 800
    law = test_write.test_every_bfloat16_and_every_tie_becomes_the_fp8_that_torch_says
    law(kv, limit, Runner(EMULATED))
