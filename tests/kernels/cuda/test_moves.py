"""The kernels of csrc/cuda that move rows and frames, in the emulator: laws of every backend, and laws of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import pagedkv
from pagedkv import copy_frames, merge_states, write_kv
from pagedkv.kernels import reference, registry
from pagedkv.kernels.args import RotaryTable
from pagedkv.kernels.cuda import specialisation
from tests.cases import Case, as_bytes, empty_layer
from tests.kernels import test_compiled_laws, test_laws, test_write
from tests.kernels.conftest import Runner
from tests.kernels.cuda import backend
from tests.kernels.cuda.emulator import COMPILER, Emulator
from tests.kernels.hostile.test_tables import check_that_nothing_beyond_the_pool_is_written
from tests.kernels.latents import test_latents
from tests.kernels.test_write import SLOTS, batch_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")

# Laws of every backend. They run here with the runner below.
test_a_float64_query_is_refused_with_the_reason = test_compiled_laws.test_a_float64_query_is_refused_with_the_reason
test_what_is_written_has_the_bits_that_the_reference_writes = (
    test_compiled_laws.test_what_is_written_has_the_bits_that_the_reference_writes
)
test_merging_with_nothing_changes_nothing = test_laws.test_merging_with_nothing_changes_nothing
test_what_is_written_reads_back_within_half_a_step = test_write.test_what_is_written_reads_back_within_half_a_step
test_slots_that_are_not_named_keep_every_bit = test_write.test_slots_that_are_not_named_keep_every_bit
test_a_vector_of_zeros_has_scale_one_and_others_amax_over_qmax = (
    test_write.test_a_vector_of_zeros_has_scale_one_and_others_amax_over_qmax
)
test_what_is_too_large_saturates = test_write.test_what_is_too_large_saturates
test_nan_is_stored_as_nan_or_as_zero = (
    test_write.test_nan_is_stored_as_nan_or_as_zero_by_integers_whose_scale_then_is_nan
)
test_a_key_turned_while_it_is_written_is_the_key_turned_before = (
    test_write.test_a_key_turned_while_it_is_written_is_the_key_turned_before
)
test_copies_read_every_source_before_one_destination_is_written = (
    test_write.test_copies_read_every_source_before_one_destination_is_written
)
test_copying_nothing_is_allowed = test_write.test_copying_nothing_is_allowed
test_absorbed_attention_is_the_expanded_attention = test_latents.test_absorbed_attention_is_the_expanded_attention
test_a_store_of_keys_alone_is_a_store_of_keys = test_latents.test_a_store_of_keys_alone_is_a_store_of_keys


@pytest.fixture(params=[900, pytest.param(800, marks=pytest.mark.slow)], ids=["sm_90", "sm_80"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Emulate a GPU that converts 8-bit floats by an instruction, and one that does so by arithmetic."""
    machine = Emulator(arch=request.param)
    monkeypatch.setattr(backend, "machine", machine)
    monkeypatch.setattr(registry, "KERNELS", (backend.KERNEL, *registry.KERNELS))
    monkeypatch.setenv("PAGEDKV_KERNELS", backend.KERNEL.name)
    yield machine
    backend.machine = Emulator()


@pytest.fixture(autouse=True)
def runner(machine: Emulator) -> Runner:
    return Runner(backend.KERNEL.name, "cpu")


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


@pytest.mark.parametrize("dims", [(64, 64), (62, 30), (192, 128), (576, 512)], ids=str)
@pytest.mark.parametrize("kv", ["", "fp8_e4m3/token_head", "fp8_e5m2/tensor", "int8/token_head", "int4/token_head"])
def test_any_dims_and_strides_have_the_bits_of_the_reference(dims: tuple[int, int], kv: str) -> None:
    case = Case(dtype="bfloat16", kv=kv, dims=dims, layout="mixed" if dims[0] != 62 else "HND", heads=(3, 3))
    # Rows of a fused projection, at addresses of any alignment.
    fused = torch.randn(7, 9, dims[0] + 1).to(torch.float16)
    k, v = fused[:, 1:4, : dims[0]], torch.randn(7, 3, dims[1])
    layers = [empty_layer(case, 4) for _ in range(2)]
    for layer, name in zip(layers, (None, "reference"), strict=True):
        if kv.endswith("tensor"):
            layer.k_scale.fill_(0.37), layer.v_scale.fill_(2.5)  # type: ignore[union-attr]
        write_kv(k, v, layer, batch_of(SLOTS), backend=name)
    assert_equal(layers[0].k, layers[1].k)
    assert_equal(layers[0].v, layers[1].v)


@pytest.mark.parametrize(
    "case", [(32, False, (64, 64)), (32, True, (64, 64)), (6, False, (62, 30)), (64, True, (576, 512))], ids=str
)
def test_keys_are_rotated_to_the_bits_of_the_reference(case: tuple[int, bool, tuple[int, int]]) -> None:
    half, interleaved, dims = case
    angles, positions = torch.rand(20, half) * 6, torch.tensor([3, 0, 19, 0, 7, 0, 11])
    rope = RotaryTable(angles.cos(), angles.sin(), interleaved)
    k, v = (torch.randn(7, 2, dim).bfloat16() for dim in dims)
    batch = batch_of(SLOTS)
    batch.positions.copy_(positions)
    layers = [empty_layer(Case(dims=dims, layout="HND"), 4) for _ in range(2)]
    for layer, name in zip(layers, (None, "reference"), strict=True):
        write_kv(k, v, layer, batch, rope=rope, backend=name)
    assert_equal(layers[0].k, layers[1].k)


def test_where_values_lie_in_keys_the_values_are_stored_last(machine: Emulator) -> None:
    layer = empty_layer(Case(dims=(64, 48), layout="mla"), 4)
    write_kv(torch.zeros(7, 2, 64), torch.ones(7, 2, 48), layer, batch_of(SLOTS))
    assert len(machine.launches) == 2
    assert (layer.k[2, 5, :, :48] == 1).all()
    assert (layer.k[2, 5, :, 48:] == 0).all()


COPIES = {
    "one": [[1, 2]],
    "a chain": [[0, 1], [1, 2], [2, 3], [3, 4]],
    "a chain, backwards": [[3, 4], [2, 3], [1, 2], [0, 1]],
    "swaps": [[0, 1], [1, 0], [5, 2], [2, 5]],
    "a cycle, and one to many": [[0, 1], [1, 2], [2, 0], [2, 7], [2, 8]],
    "onto itself": [[4, 4], [4, 6]],
}


FRAMES = [(3, torch.uint8), (16, torch.uint8), (300, torch.bfloat16), (5000, torch.float32), (1, torch.int64)]


@pytest.mark.parametrize("frame", FRAMES, ids=str)
@pytest.mark.parametrize("copies", COPIES)
def test_frames_are_copied_as_if_all_sources_were_read_first(
    copies: str, frame: tuple[int, torch.dtype], machine: Emulator
) -> None:
    pool = torch.arange(9 * frame[0]).view(9, -1).to(frame[1])
    pairs = torch.tensor(COPIES[copies], dtype=torch.int32)
    assert_copied(pool, pairs)
    # Both arguments are views with steps between their elements.
    assert_copied(pool[:, : max(1, frame[0] // 3)], torch.cat([pairs, pairs], 1)[:, 1:3].flip(1))
    assert [kernel.name for kernel in machine.launches] == ["copy_frames"] * 2


@pytest.mark.parametrize("count", [60, 600, 2500])
def test_very_many_copies_take_narrower_runs_and_then_a_scratch_buffer(count: int, machine: Emulator) -> None:
    pool = torch.randn(2600, 36)
    copies = torch.stack([torch.randint(0, 2600, (count,)), torch.randperm(2600)[:count]], 1).int()
    assert_copied(pool, copies)
    assert [kernel.shared_bytes >> 10 for kernel in machine.launches] == {60: [32], 600: [96], 2500: [32, 32]}[count]


def assert_copied(pool: Tensor, copies: Tensor) -> None:
    expected, got = (torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype).copy_(pool) for _ in range(2))
    reference.copy_frames(expected, copies)
    copy_frames(got, copies)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 30, 512])
def test_two_states_merge_as_in_the_reference(dtype: torch.dtype, dim: int) -> None:
    wide = torch.randn(5, 7, dim + 3).to(dtype)
    out_a, out_b = wide[:, 1:4, :dim], torch.randn(5, 3, dim).to(dtype)
    lse_a, lse_b = (torch.randn(3, 5) * 20).T, torch.randn(5, 3) * 20
    lse_a[0], lse_b[0, 1], out_a[0] = -torch.inf, -torch.inf, torch.nan
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    expected, expected_lse = reference.merge_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out, expected, rtol={torch.float32: 4e-6}.get(dtype, 2.0**-7), atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert (lse[0, 1] == -torch.inf).all()
    assert (out[0, 1] == 0).all()


@pytest.mark.parametrize("arch", [800, 900])
def test_each_float_becomes_the_nearest_byte_by_instruction_and_by_arithmetic(arch: int, machine: Emulator) -> None:
    machine.arch = arch
    every = torch.arange(256, dtype=torch.uint8)
    for kv, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        exact = every.view(dtype).float()
        exact = exact[exact.isfinite()].sort().values
        between = (exact[1:] + exact[:-1]) / 2  # ties
        hard = torch.cat([exact, between, between.nextafter(exact[1:]), between.nextafter(exact[:-1])])
        x = torch.nn.functional.pad(hard, (0, -len(hard) % 128)).view(-1, 1, 128)
        layers = [empty_layer(Case(kv=kv, dims=(128, 128), heads=(1, 1)), 1) for _ in range(2)]
        for layer, name in zip(layers, (None, "reference"), strict=True):
            write_kv(x, x, layer, batch_of(list(range(len(x)))), backend=name)
        assert_equal(layers[0].k, layers[1].k)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """Compare all bits, also those that no kernel wrote."""
    assert torch.equal(as_bytes(ours.contiguous()).view(torch.uint8), as_bytes(theirs.contiguous()).view(torch.uint8))


def test_a_vector_longer_than_a_warp_holds_is_refused_with_the_limit() -> None:
    from pagedkv.kernels.cuda import backend

    case = registry.Case("write_kv", "cuda", dtype="float16", head_dim=2048, head_dim_v=64)
    assert backend.case_objections(case) == [f"head_dim is 2048; it takes up to {specialisation.LONGEST_ROW}"]


@pytest.mark.parametrize("num_copies", [5, 400])
def test_nothing_beyond_the_pool_is_written(machine: Emulator, num_copies: int) -> None:
    """400 copies go through a scratch buffer."""
    check_that_nothing_beyond_the_pool_is_written(
        machine.write_kv, lambda frames, copies: machine.copy_frames(frames, copies.repeat(num_copies // 5, 1))
    )
