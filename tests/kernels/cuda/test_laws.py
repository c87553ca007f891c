"""csrc/cuda keeps the laws of every backend, in the emulator. Every stride may exceed 32 bits."""

from __future__ import annotations

import copy
import math
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import paged_attention
from pagedkv.kernels import reference, registry
from pagedkv.kernels.args import RotaryTable
from pagedkv.kernels.cuda import attention, moves
from tests.cases import MASKS, Case, call_of, write_of
from tests.kernels import test_laws as kernel_laws
from tests.kernels.conftest import Runner
from tests.kernels.cuda import backend
from tests.kernels.cuda.emulator import COMPILER, Emulator
from tests.kernels.cuda.test_attention import check
from tests.kernels.hostile.test_values import HIDDEN, check_hidden_tree, check_hidden_values
from tests.kernels.masks import test_padded

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")

test_merging_two_halves_equals_the_whole = kernel_laws.test_merging_two_halves_equals_the_whole
test_moving_frames_changes_no_bit = kernel_laws.test_moving_frames_changes_no_bit
test_with_split_tokens_the_rest_of_the_batch_changes_no_bit = (
    kernel_laws.test_with_split_tokens_the_rest_of_the_batch_changes_no_bit
)
test_with_split_tokens_a_neighbours_tree_mask_changes_no_bit = (
    kernel_laws.test_with_split_tokens_a_neighbours_tree_mask_changes_no_bit
)
test_out_is_filled_where_given_and_padding_is_left_alone = (
    kernel_laws.test_out_is_filled_where_given_and_padding_is_left_alone
)
test_the_default_scale_is_one_over_the_root_of_head_dim = (
    kernel_laws.test_the_default_scale_is_one_over_the_root_of_head_dim
)
test_a_pool_of_more_than_2_31_elements_is_addressed_whole = (
    kernel_laws.test_a_pool_of_more_than_2_31_elements_is_addressed_whole
)
test_small_tensors_of_any_stride_are_read_where_they_are = (
    kernel_laws.test_small_tensors_of_any_stride_are_read_where_they_are
)
test_a_window_or_a_split_beyond_every_length_is_as_good_as_any = (
    kernel_laws.test_a_window_or_a_split_beyond_every_length_is_as_good_as_any
)

MIXED = Case(
    q_lens=(1, 3, 0, 20),
    kv_lens=(100, 33, 9, 40),
    heads=(4, 2),
    dims=(64, 48),
    kv="fp8_e4m3/token_head",
    dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(backend, "machine", Emulator())
    monkeypatch.setattr(registry, "KERNELS", (backend.KERNEL, *registry.KERNELS))
    monkeypatch.setenv("PAGEDKV_KERNELS", backend.KERNEL.name)
    return Runner(backend.KERNEL.name, "cpu")


SOONER = [HIDDEN[i] for i in (1, 4, 6, 7, 13, 14, 16)]


def kinds_of_hidden_values() -> list[Any]:
    """Return (case, number). Some cases with NaN are quick; the others take minutes."""
    every = [(case, number) for case in HIDDEN for number in (torch.nan, torch.inf)]
    return [
        pytest.param(*kind, marks=[] if kind[0] in SOONER and kind[1] != torch.inf else [pytest.mark.slow])
        for kind in every
    ]


@pytest.mark.parametrize(("case", "number"), kinds_of_hidden_values(), ids=str)
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(case: Case, number: float, runner: Runner) -> None:
    check_hidden_values(case, runner, number)


@pytest.mark.parametrize("seen", [False, True])
def test_a_value_that_a_tree_hides_from_a_single_query_does_not_reach_it(seen: bool, runner: Runner) -> None:
    check_hidden_tree(runner, seen=seen)


def far(x: Tensor, dim: int, folder: Path) -> Tensor:
    """Return a copy of `x` in a sparse file; its first and last element along `dim` are over 2^32 elements apart."""
    strides = list(x.contiguous().stride())
    strides[dim] = -(-(2**32 + 4096) // max(1, x.shape[dim] - 1) // 64) * 64
    elements = 1 + sum((count - 1) * stride for count, stride in zip(x.shape, strides, strict=True))
    sparse = torch.from_file(str(folder / "far"), shared=True, size=elements * x.element_size(), dtype=torch.uint8)
    return sparse.view(x.dtype).as_strided(x.shape, strides).copy_(x)


def some(*fields: str) -> pytest.MarkDecorator:
    """Each is a field and one of its dims; every third is quick."""
    given = (field.split() for field in fields)
    return pytest.mark.parametrize(
        ("name", "dim"),
        [pytest.param(x, int(d), marks=[pytest.mark.slow] * (n % 3 > 0)) for n, (x, d) in enumerate(given)],
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
    built = replace(MIXED, padding=3).build()
    expected = call_of(built)
    Emulator().attend(expected)
    wide = torch.full((expected.lse.shape[0], 8), 7.0)
    strided = expected._replace(lse=wide[:, ::2])
    Emulator().attend(strided)
    assert torch.equal(wide[:-3, ::2], expected.lse[:-3])
    assert (wide[-3:] == 7).all()
    assert (wide[:, 1::2] == 7).all()


@pytest.mark.parametrize("split_tokens", [None, 16])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((), ()), ((0, 0), (0, 9)), ((0, 1, 0), (5, 0, 70)), ((1, 0, 5), (0, 0, 5)), ((3,), (2,))],
    ids=str,
)
def test_sequences_without_queries_or_keys_and_batches_without_sequences(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], split_tokens: int | None
) -> None:
    case = Case(
        q_lens=q_lens or (1,),
        kv_lens=kv_lens or (9,),
        mask="all" if kv_lens == (2,) else "causal",
        dims=(64, 64),
        dtype="bfloat16",
        split_tokens=split_tokens,
        padding=2,
    )
    call = call_of(case.build())
    if not q_lens:
        starts, lens, table = call.cu_seqlens_q[:1] * 0, call.seq_lens[:0], call.block_table[:0]
        call = call._replace(cu_seqlens_q=starts, seq_lens=lens, block_table=table, max_seqlen_q=0, max_seqlen_k=0)
    right, machine, rows = (
        call._replace(out=call.out.clone(), lse=call.lse.clone()),
        Emulator(),
        int(call.cu_seqlens_q[-1]),
    )
    reference.paged_attention(right)
    for most in {call.max_seqlen_q, 40}:  # 40: as in a graph that was captured for more
        machine.attend(call._replace(max_seqlen_q=most, max_seqlen_k=max(call.max_seqlen_k, 100)))
        assert call.out[rows:].isnan().all()
        assert torch.allclose(call.out[:rows], right.out[:rows], atol=2**-7, rtol=2**-7)
        assert torch.allclose(call.lse[:rows], right.lse[:rows], atol=1e-4)


def test_a_pool_without_frames_serves_a_query_that_sees_no_key() -> None:
    built = Case(q_lens=(1,), kv_lens=(0,), dims=(64, 64), dtype="bfloat16").build()
    layer = type(built.layer)(built.layer.k[:0], built.layer.v[:0])
    assert (paged_attention(built.q, layer, built.batch) == 0).all()


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


@pytest.mark.parametrize(
    ("scale", "softcap", "fields"),
    [
        (0.5, 0.0, (0.5 / math.log(2), 0.0)),
        (0.5, 30.0, (0.5 / 30, 30.0)),
        (1e30, 1e-30, (attention.FLOAT_MAX, 1e-30)),
        (-1e30, 1e-30, (-attention.FLOAT_MAX, 1e-30)),
        (0.5, 1e-50, (0.5e30, 1e-30)),  # not 0, which is no cap
        (3e38, 0.0, (attention.FLOAT_MAX, 0.0)),
    ],
)
def test_the_host_divides_the_scale_and_stays_within_float32(
    scale: float, softcap: float, fields: tuple[float, float]
) -> None:
    assert attention._scale_and_cap(scale, softcap) == pytest.approx(fields)
    struct.pack("2f", *attention._scale_and_cap(scale, softcap))  # refuses what no float32 holds


@pytest.mark.parametrize("softcap", [1e-50, 1e-31, 1e-12])
def test_a_soft_cap_below_every_score_leaves_equal_weights(softcap: float) -> None:
    call = call_of(Case(dims=(64, 64)).build())
    right = call._replace(scale=0.0, out=call.out.clone(), lse=call.lse.clone())
    Emulator().attend(right)
    Emulator().attend(call._replace(softcap=softcap))
    assert torch.allclose(call.out, right.out, atol=1e-6)


@pytest.mark.parametrize("softcap", [1e29, 1e31, 3e38])
def test_a_soft_cap_beyond_every_score_changes_nothing(softcap: float) -> None:
    call = call_of(Case(dims=(64, 64)).build())
    Emulator().attend(call)
    out = call.out.clone()
    Emulator().attend(call._replace(softcap=softcap))
    assert torch.allclose(call.out, out, atol=1e-6)


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


def test_an_infinite_state_leaves_zeros_and_nan_stays_nan() -> None:
    """As in the reference, an infinite sink takes the whole weight and has no value."""
    out_a, out_b = torch.randn(2, 6, 64), torch.randn(2, 6, 64)
    lse_a = torch.tensor([[torch.inf, torch.inf, 1.0, torch.nan, torch.inf, -torch.inf]] * 2)
    lse_b = torch.tensor([[1.0, torch.inf, torch.inf, 1.0, torch.nan, torch.inf]] * 2)
    out, lse = Emulator().merge_states(out_a, lse_a, out_b, lse_b)
    right, right_lse = reference.merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(lse, right_lse) or torch.equal(lse.nan_to_num(7), right_lse.nan_to_num(7))
    assert torch.allclose(out, right, equal_nan=True)
    assert (out[:, (0, 1, 2, 5)] == 0).all()
    assert out[:, 3:5].isnan().all()


@pytest.mark.parametrize("case", test_padded.CASES, ids=str)
def test_rows_of_a_padded_query_are_those_of_its_tokens(case: Case, runner: Runner) -> None:
    built, mask = case.build(), test_padded.mask_of(case, "both")
    test_padded.padded_is_right(built, mask, test_padded.spread(built.q, mask, torch.nan), runner)


@pytest.mark.parametrize("case", MASKS, ids=str)
def test_a_query_sees_its_window_on_both_sides_and_its_sequence_says_if_it_is_causal(case: Case) -> None:
    check(case, Emulator())


def test_the_widest_window_hides_nothing_from_queries_before_the_first_key() -> None:
    check(
        Case(q_lens=(7, 40, 3), kv_lens=(132, 12, 2), dims=(64, 64), mask="all", window=2**31 - 1, split_tokens=16),
        Emulator(),
    )
