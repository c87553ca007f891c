"""A write stores the given tokens at their slots, and changes no other byte."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv import KernelUnavailable, bind_write, copy_frames, write_kv
from pagedkv.kernels import quant
from pagedkv.kernels.args import KVLayer, PagedBatch, RotaryTable
from tests.cases import AXES, DTYPES, Case, as_bytes, empty_layer, moved
from tests.kernels.conftest import COMPILED, WAYS, Runner, param
from tests.kernels.oracle import rotation, stored_values

if TYPE_CHECKING:
    from torch import Tensor

each_compiled = pytest.mark.parametrize("runner", COMPILED, indirect=True)
HALF_STEP = {"": 0.0, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3, "int8": 0.5 / 127, "k8v4": 0.5 / 127, "k5v4": 0.5 / 15}
"""The largest error of one stored element, relative to the largest of its vector: half a unit in the last place.

float32 is exact. Of the rotated kinds it is that of a rotated key.
"""

SLOTS = [37, -1, 0, 63, 16, -5, 2]
AT = [slot for slot in SLOTS if slot >= 0]
REFERENCE = Runner("reference")


def batch_of(slots: list[int]) -> PagedBatch:
    """A batch of which only the slots are looked at."""
    none = torch.zeros(1, dtype=torch.int32)
    tables = {"block_table": none[None], "seq_lens": none, "cu_seqlens_q": none, "max_seqlen_q": 0, "max_seqlen_k": 0}
    return PagedBatch(**tables, slots=torch.tensor(slots, dtype=torch.int64), positions=torch.zeros(len(slots)).long())


def written(
    layer: KVLayer, k: Tensor, v: Tensor, batch: PagedBatch, runner: Runner, rope: RotaryTable | None = None
) -> KVLayer:
    """Write on the runner's device; return the layer, where the kernel wrote."""
    layer, k, v, batch = (moved(x, runner.device) for x in (layer, k, v, batch))
    table = rope and replace(rope, cos=moved(rope.cos, runner.device), sin=moved(rope.sin, runner.device))
    try:
        write_kv(k, v, layer, batch, rope=table, backend=runner.backend)
    except KernelUnavailable as refused:
        pytest.skip(str(refused))
    return layer


def scaled(case: Case, num_frames: int, k_scale: float, v_scale: float) -> KVLayer:
    """An empty layer. Its scales are these, if it has one for K and one for V."""
    layer = empty_layer(case, num_frames)
    if case.kv.endswith("/tensor"):
        layer.k_scale.fill_(k_scale), layer.v_scale.fill_(v_scale)  # type: ignore[union-attr]
    return layer


def bytes_of(layer: KVLayer) -> list[Tensor]:
    """All bytes of a layer and of its scales; those of rotated values are apart (`assert_same_bytes`)."""
    values = () if quant.is_rotated(layer.v) else (layer.v, layer.v_scale)
    tensors = (moved(x, "cpu") for x in (layer.k, layer.k_scale, *values) if x is not None)
    return [as_bytes(x.contiguous()).view(-1).view(torch.uint8) for x in tensors]


def assert_same_bytes(one: KVLayer, other: KVLayer) -> None:
    """Compare all bytes. The scale of a rotated value is of sums, which may round otherwise: by one last place of
    float16, and then a code that was on an edge is the next one."""
    assert all(torch.equal(*pair) for pair in zip(bytes_of(one), bytes_of(other), strict=True))
    if quant.is_rotated(one.v):
        assert one.v_scale is not None
        assert other.v_scale is not None
        scales = [moved(x, "cpu").contiguous().view(torch.int16).int() for x in (one.v_scale, other.v_scale)]
        assert (scales[0] - scales[1]).abs().max() <= 1
        codes = [moved(x, "cpu").contiguous() for x in (one.v, other.v)]
        assert (codes[0] != codes[1]).double().mean() < 0.01


def stored(layer: KVLayer, slots: list[int]) -> tuple[Tensor, Tensor]:
    """K and V at `slots`, as float64 values."""
    k, v = (torch.from_numpy(x).flatten(0, 1)[slots] for x in stored_values(moved(layer, "cpu")))
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


@pytest.mark.parametrize("layout", AXES["layout"])
@pytest.mark.parametrize("kv", AXES["kv"])
def test_what_is_written_reads_back_within_half_a_step(kv: str, layout: str, runner: Runner) -> None:
    k, v = torch.rand(7, 2, 64) * 2 - 1, torch.rand(7, 2, 80) * 2 - 1  # in [-1, 1): no scale below saturates
    empty = scaled(Case(kv=kv, layout=layout, dims=(64, 80)), 4, 0.5, 0.75)
    kind, divisor = kv.partition("/")[0], torch.ones(2, 64)
    if empty.calibration is not None:
        empty.calibration.copy_(torch.rand(2, 2, 64) + 0.5)
        divisor = empty.calibration[:, 1]
    layer = written(empty, k, v, batch_of(SLOTS), runner)
    kept = [i for i, slot in enumerate(SLOTS) if slot >= 0]
    for given, got, scale in zip((k, v), stored(layer, AT), (0.5, 0.75), strict=True):
        given, error = given[kept].double(), got - given[kept].double()
        if kind.startswith("k") and given.shape[-1] == 80:  # sixteen levels: about 0.01 of a Gaussian's square
            assert (error.square().sum(-1) < 0.03 * given.square().sum(-1)).all()
            continue
        if kind.startswith("k"):
            centre = torch.zeros(2, 64) if empty.calibration is None else empty.calibration[:, 0]
            given, error = (x / divisor @ torch.from_numpy(rotation(64)).T for x in (given - centre, error))
        largest = given.abs().amax(-1, keepdim=True)
        of_scale = 2.0**-10 * largest if kv.endswith(("/token_head", "/calibrated")) else 0.0  # it is a float16
        step = HALF_STEP[kind] * (scale * 127 if kv == "int8/tensor" else largest) + of_scale
        assert (error.abs() <= step * (1 + 1e-4) + 1e-6).all()  # x / scale is rounded before it is rounded


@each_compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv", ["float32", "bfloat16", "float16", *AXES["kv"][1:]])
def test_what_is_written_has_the_bits_that_the_reference_writes(kv: str, dtype: str, runner: Runner) -> None:
    """In all bytes, also those that no token has. Rows of new tokens lie in a wider tensor, at odd addresses."""
    plain = kv in DTYPES and not kv.startswith("fp8")
    case = Case(dtype=kv if plain else "float32", kv="" if plain else kv, dims=(64, 80), heads=(3, 3), layout="HND")
    spread = torch.cat([torch.randn(7, 3, 73), torch.randn(7, 3, 73) * 1e-2, torch.full((7, 3, 16), 1e3)], -1)
    bits = spread.view(torch.int32)
    bits[0], bits[2] = bits[0] & -(1 << 16) | 1 << 15, bits[2] & -(1 << 13) | 1 << 12  # ties of bfloat16 and of float16
    k, v = (x.to(DTYPES[dtype]) for x in spread[..., torch.randperm(162)[:145]].split((64, 81), -1))
    exponents = torch.exp2(torch.randint(-20, 5, (7, 3, 81)))  # from subnormals to saturation
    for values in (v[..., 1:], (v * exponents)[..., 1:].to(v.dtype)):
        layers = [written(scaled(case, 4, 0.3, 1e-3), k, values, batch_of(SLOTS), to) for to in (runner, REFERENCE)]
        assert_same_bytes(*layers)


@each_compiled
@pytest.mark.parametrize("kv", ["", "fp8_e4m3/token_head", "k8v4/token_head", "k5v4/calibrated"])
@pytest.mark.parametrize("dims", [(62, 30), (192, 128), (576, 512), (24, 8)], ids=str)
def test_heads_of_any_width_have_the_bits_of_the_reference(dims: tuple[int, int], kv: str, runner: Runner) -> None:
    if kv.startswith("k") and dims[0] % 8:
        pytest.skip("the head dims of rotated layers are multiples of 8")
    case = Case(dtype="bfloat16", kv=kv, dims=dims, layout="mixed")
    k, v = (torch.randn(7, 2, dim) for dim in dims)
    assert_same_bytes(*(written(empty_layer(case, 4), k, v, batch_of(SLOTS), to) for to in (runner, REFERENCE)))


@pytest.mark.parametrize("kv", AXES["kv"])
def test_slots_that_are_not_named_keep_every_bit(kv: str, runner: Runner) -> None:
    case, k = Case(kv=kv, layout="HND"), torch.randn(7, 2, 64)
    layer = written(empty_layer(case, 4), k, k, batch_of(SLOTS), runner)
    others = [slot for slot in range(64) if slot not in SLOTS]
    parts = []
    for x in (empty_layer(case, 4), moved(layer, "cpu")):
        keys = quant.planes(x.k) if x.k.dtype == torch.uint8 else (x.k,)
        parts.append((*keys, x.v, x.k_scale, x.v_scale))
    for old, new in zip(*parts, strict=True):
        if isinstance(old, torch.Tensor) and old.dim():
            old, new = (as_bytes(x).flatten(0, 1)[others] for x in (old, new))
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_a_vector_of_zeros_has_scale_one_and_others_amax_over_qmax(runner: Runner) -> None:
    k = torch.zeros(1, 2, 64)
    k[0, 1, 5] = -254.0
    layer = written(empty_layer(Case(kv="int8/token_head"), 1), k, k, batch_of([3]), runner)
    assert layer.k_scale[0, 3].tolist() == [1.0, 2.0]
    assert layer.k[0, 3, 1, 5] == -127


def test_a_scale_that_rounds_to_zero_is_one(runner: Runner) -> None:
    """Of a vector of subnormals; a zero in it divided by a scale of zero would be stored as NaN."""
    k = torch.zeros(1, 2, 64)
    k[0, :, ::2] = 1e-42
    layer = written(empty_layer(Case(kv="fp8_e5m2/token_head"), 1), k, k, batch_of([3]), runner)
    assert layer.k_scale[0, 3].tolist() == [1.0, 1.0]
    assert (stored(layer, [3])[0] == 0).all()


@pytest.mark.parametrize(("kv", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0), ("int8/tensor", 127.0)])
def test_what_is_too_large_saturates(kv: str, largest: float, runner: Runner) -> None:
    k = torch.tensor([1e9, -1e9, torch.inf, -torch.inf]).repeat(16).expand(1, 2, 64)
    layer = written(scaled(Case(kv=kv), 1, 1.0, 1.0), k, k, batch_of([0]), runner)
    assert stored(layer, [0])[0][0, 0, :4].tolist() == [largest, -largest, largest, -largest]


@each_compiled
@pytest.mark.parametrize(("kv", "limit"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_every_bfloat16_and_every_tie_becomes_the_fp8_that_torch_says(kv: str, limit: float, runner: Runner) -> None:
    dtype = DTYPES[kv]
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    ties = (codes[1:] + codes[:-1]) / 2
    near = [ties.nextafter(torch.tensor(far)) for far in (torch.inf, -torch.inf)]
    x = torch.cat([ties, *near, codes] if runner.is_slow else [every, ties, *near])
    new = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(-1, 1, 128)
    layer = scaled(Case(kv=f"{kv}/tensor", heads=(1, 1), dims=(128, 128), block_size=1), len(new), 1.0, 1.0)
    found = written(layer, new, new, batch_of(list(range(len(new)))), runner).k.view(torch.uint8).flatten()[: len(x)]
    wanted = x.clamp(-limit, limit).to(dtype).view(torch.uint8)
    assert torch.equal(found[~x.isnan()], wanted[~x.isnan()])
    assert found.view(dtype).float()[x.isnan()].isnan().all()


@pytest.mark.parametrize(
    "kv",
    ["", "fp8_e4m3", "fp8_e5m2/token_head", "int8/tensor", "int8/token_head"],
)
@pytest.mark.parametrize("runner", [*COMPILED, param(REFERENCE)], indirect=True)
def test_nan_is_stored_as_nan_or_as_zero_by_integers_whose_scale_then_is_nan(kv: str, runner: Runner) -> None:
    """One scale for all stays what it is: then NaN is 0, and other elements keep their values."""
    k, broken = torch.ones(1, 2, 70), [2, 3, 33, 68]  # of vectors and of what remains; lower and upper halves of bytes
    k[0, 1, broken] = torch.nan
    layer = written(scaled(Case(kv=kv, dims=(70, 70)), 1, 1.0, 1.0), k, k, batch_of([3]), runner)
    for values in stored(layer, [3]):
        assert (values[0, 0] - 1).abs().max() <= (2**-9 if kv.endswith("/token_head") else 1e-6)
        others = [i for i in range(70) if i not in broken]
        if kv.endswith("/token_head"):
            assert values[0, 1].isnan().all()
        else:
            assert (values[0, 1, others] == 1).all()
            assert (values[0, 1, broken] == 0).all() if "int" in kv else values[0, 1, broken].isnan().all()


@pytest.mark.parametrize("kv", ["k8v4/token_head", "k5v4/calibrated"])
@pytest.mark.parametrize("runner", [*COMPILED, param(REFERENCE)], indirect=True)
def test_a_nan_spoils_the_whole_of_a_rotated_vector_and_no_other(kv: str, runner: Runner) -> None:
    k = torch.randn(2, 2, 64)
    k[1, 1, 7] = torch.nan
    layer = written(empty_layer(Case(kv=kv, layout="HND"), 1), k, k, batch_of([3, 5]), runner)
    for values in stored(layer, [3, 5]):
        assert values[1, 1].isnan().all()
        assert values.isnan().sum() == 64


@pytest.mark.parametrize("runner", [*COMPILED, param(REFERENCE)], indirect=True)
def test_zeros_and_the_largest_floats_have_scales_that_are_numbers(runner: Runner) -> None:
    k = torch.zeros(4, 1, 64)
    k[1], k[2, 0, 3], k[3] = 1e30, torch.inf, 1e-30
    for kv in ("int8/token_head", "k8v4/token_head", "k5v4/token_head"):
        case = Case(kv=kv, heads=(1, 1), layout="HND")
        layer = moved(written(empty_layer(case, 1), k[:2], k[:2], batch_of([0, 1]), runner), "cpu")
        assert (stored(layer, [0])[0] == 0).all()
        assert (stored(layer, [0])[1] == 0).all()
        assert layer.k_scale is not None
        assert layer.k_scale[0, 1] == 65504
        layer = moved(written(empty_layer(case, 1), k[3:], k[3:], batch_of([0]), runner), "cpu")
        assert (stored(layer, [0])[0] == 0).all()
        assert (stored(layer, [0])[1] == 0).all()


@pytest.mark.parametrize("kv", ["", "fp8_e4m3/tensor", "int8/token_head", "k8v4/token_head"])
@pytest.mark.parametrize(("turned", "interleaved"), [(64, False), (64, True), (24, False), (2, True)])
def test_a_key_turned_while_it_is_written_is_the_key_turned_before(
    kv: str, turned: int, interleaved: bool, runner: Runner
) -> None:
    draw = torch.Generator().manual_seed(turned)
    angles = torch.rand(50, turned // 2, generator=draw) * 6
    k, v = (torch.randn(7, 2, 64, generator=draw) for _ in range(2))
    positions = torch.tensor([3, 10**9, 49, 0, 7, -1, 11])  # a token that is skipped may be anywhere
    rope, case = RotaryTable(angles.cos(), angles.sin(), interleaved), Case(kv=kv, layout="HND")
    turned_k = turn(k, angles[[3, 0, 49, 0, 7, 0, 11]], interleaved)
    batch = replace(batch_of(SLOTS), positions=positions)
    together = stored(written(scaled(case, 4, 0.25, 0.25), k, v, batch, runner, rope), AT)
    apart = stored(written(scaled(case, 4, 0.25, 0.25), turned_k, v, batch, runner), AT)
    assert torch.equal(together[1], apart[1])
    step = {"": 1e-6, "fp8": 0.125, "int8": 1 / 127, "k8v4": 0.1}[kv[:4].rstrip("_")] * apart[0].abs().amax(
        -1, keepdim=True
    )
    error = (together[0] - apart[0]).abs()
    assert (error <= step * 1.001).all()  # a sum that is rounded otherwise may be stored one step away,
    assert (error > 1e-5).double().mean() < (0.2 if kv.startswith("k8") else 0.01)  # rarely, but for a whole vector


def test_values_within_keys_are_stored_last(runner: Runner) -> None:
    layer = empty_layer(Case(dims=(64, 48), layout="mla"), 4)
    found = moved(written(layer, torch.zeros(7, 2, 64), torch.ones(7, 2, 48), batch_of(SLOTS), runner), "cpu").k
    assert (found[2, 5, :, :48] == 1).all()
    assert (found[2, 5, :, 48:] == 0).all()


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


@pytest.mark.parametrize("runner", WAYS, indirect=True)
def test_a_write_of_many_tokens_is_cut_among_threads_without_losing_one(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "3")
    k, slots = torch.randn(1000, 2, 64).bfloat16(), torch.randperm(1024)[:1000]
    layer = written(empty_layer(Case(dtype="bfloat16"), 64), k, k, batch_of(slots.tolist()), runner)
    assert torch.equal(layer.k.flatten(0, 1)[slots], k)


COPIES = {
    "none": [],
    "one": [[1, 2]],
    "a chain, backwards": [[3, 4], [2, 3], [1, 2], [0, 1]],
    "swaps": [[0, 1], [1, 0], [5, 2], [2, 5]],
    "a cycle, and one to many": [[0, 1], [1, 2], [2, 0], [2, 7], [2, 8]],
    "onto itself": [[4, 4], [4, 6]],
}


@pytest.mark.parametrize("frame", [(3, torch.uint8), (300, torch.bfloat16), (5000, torch.float32)], ids=str)
@pytest.mark.parametrize("copies", COPIES)
def test_copies_read_every_source_before_one_destination_is_written(
    copies: str, frame: tuple[int, torch.dtype], runner: Runner
) -> None:
    pool = torch.arange(9 * frame[0]).view(9, -1).to(frame[1])
    pairs = torch.tensor(COPIES[copies], dtype=torch.int32).view(-1, 2)
    wide = torch.cat([pairs, pairs], 1)[:, :2]
    for given, copied in ((pool, pairs), (pool[:, : max(1, frame[0] // 3)], wide)):  # also with steps between elements
        right = given.clone()
        right[copied[:, 1].long()] = given[copied[:, 0].long()]
        found = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=runner.device).copy_(given)
        copy_frames(found, moved(copied, runner.device), backend=runner.backend)
        assert torch.equal(found.cpu(), right)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("frame", [(), (3,), (2, 3, 5), (2, 1, 3, 2)], ids=str)
def test_frames_of_any_dims_and_dtype_are_copied(frame: tuple[int, ...], dtype: torch.dtype, runner: Runner) -> None:
    storage = torch.arange(8).view(-1, *[1] * len(frame)).expand(8, *frame).contiguous().to(dtype)
    found, pairs = storage.to(runner.device), torch.tensor([[1, 2], [2, 3], [3, 1], [5, 0]], dtype=torch.int32)
    copy_frames(found, pairs.to(runner.device), backend=runner.backend)
    of_frames = found.cpu().float().reshape(8, -1)
    assert of_frames.tolist() == [[f] * of_frames.shape[1] for f in (5, 3, 1, 2, 4, 5, 6, 7)]
