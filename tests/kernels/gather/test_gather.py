"""A gather gives the tokens of sequences in order, as they are stored, and writes nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pagedkv
from pagedkv import KVLayer, PagedBatch, gather_kv
from pagedkv.errors import InvalidRequest
from tests.cases import AXES, Case, as_bytes, moved
from tests.kernels.conftest import WAYS, Runner
from tests.kernels.oracle import stored_values

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = Case(q_lens=(1, 1, 1, 1), kv_lens=(97, 1, 0, 33), rows=True, punched=True, dims=(64, 80), layout="HND")
INT32 = torch.int32
each_way = pytest.mark.parametrize("runner", WAYS, indirect=True)


def gathered(layer: KVLayer, batch: PagedBatch, runner: Runner, first: Tensor | int = 0, **options: object) -> Tensor:
    """K and V of a gather, next to each other, on the CPU."""
    layer, batch, first = (moved(x, runner.device) for x in (layer, batch, first))
    k, v = gather_kv(layer, batch, first, backend=runner.backend, **options)  # type: ignore[arg-type]
    return torch.cat([k, v], -1).cpu()


def expected(layer: KVLayer, batch: PagedBatch, dtype: torch.dtype, first: list[int] | None = None) -> Tensor:
    """The tables followed token by token, K and V next to each other.

    Products of elements and scales are exact, and sums of rotated ones nearly so (`assert_held`).
    """
    S, lens = layer.k.shape[1], batch.seq_lens.tolist()
    k, v = (torch.from_numpy(x) for x in stored_values(layer))
    rows = []
    for b, n in enumerate(lens):
        table = batch.block_table[b if batch.rows is None else int(batch.rows[b])].tolist()
        for t in range(first[b] if first else 0, n):
            frame = table[t // S] if t >= 0 else -1
            there = frame >= 0
            rows.append(torch.cat([x[frame, t % S] if there else torch.zeros_like(x[0, 0]) for x in (k, v)], -1))
    whole = torch.stack(rows) if rows else torch.zeros(0, *k.shape[2:3], k.shape[3] + v.shape[3])
    return whole.float().to(dtype)


def assert_held(found: Tensor, right: Tensor, kv: str) -> None:
    """Compare what was gathered with what pages of a kind hold: a sum of rotated elements may be rounded otherwise."""
    if not kv.startswith("k"):
        assert torch.equal(found.nan_to_num(9), right.nan_to_num(9))
        return
    assert torch.equal(found.isnan(), right.isnan())
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}[found.dtype]
    x, y = (z.nan_to_num(9).double() for z in (found, right))
    assert ((x - y).abs() <= step * y.abs() + 1e-5).all()


@pytest.mark.parametrize("layout", AXES["layout"])
@pytest.mark.parametrize("kv", AXES["kv"])
def test_a_gather_is_what_the_pages_hold(kv: str, layout: str, runner: Runner) -> None:
    """Slots that no sequence has are poisoned, and padded entries of the table name no frame."""
    built = replace(LENGTHS, kv=kv, layout=layout, dtype="bfloat16").build()
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        found = gathered(built.layer, built.batch, runner, dtype=dtype)
        assert_held(found, expected(built.layer, built.batch, dtype), kv)


@pytest.mark.parametrize("dims", [(64, 64), (70, 30), (576, 512), (1, 3)], ids=str)
@pytest.mark.parametrize("kv", ["", "int8/token_head", "fp8_e5m2/tensor"])
def test_a_gather_takes_any_head_dim(kv: str, dims: tuple[int, int], runner: Runner) -> None:
    built = replace(LENGTHS, kv=kv, dims=dims, block_size=5, heads=(3, 3)).build()
    found = gathered(built.layer, built.batch, runner, dtype=torch.float16)
    assert torch.equal(found, expected(built.layer, built.batch, torch.float16))


def test_latents_that_hold_their_values_are_gathered_as_both(runner: Runner) -> None:
    built = replace(LENGTHS, kv="fp8_e4m3/token_head", dims=(576, 512), heads=(4, 1), layout="mla").build()
    found = gathered(built.layer, built.batch, runner, dtype=torch.bfloat16)
    assert torch.equal(found, expected(built.layer, built.batch, torch.bfloat16))
    assert torch.equal(found[..., :512], found[..., 576:])


@pytest.mark.parametrize("first", [40, -3, [40, 0, 0, 7], [97, 5, -2, -9]], ids=str)
def test_a_sequence_begins_at_the_position_that_first_names(first: int | list[int], runner: Runner) -> None:
    built = LENGTHS.build()
    firsts = first if isinstance(first, list) else [first] * 4
    given = torch.tensor(first, dtype=INT32) if isinstance(first, list) else first
    found = gathered(built.layer, built.batch, runner, given)
    assert torch.equal(found, expected(built.layer, built.batch, torch.float32, firsts))


def test_pages_before_first_are_not_looked_up(runner: Runner) -> None:
    built = replace(LENGTHS, punched=False).build()
    right = expected(built.layer, built.batch, torch.float32, [40] * 4)
    built.batch.block_table[built.batch.rows.long(), :2] = 2147480000
    assert torch.equal(gathered(built.layer, built.batch, runner, 40), right)


def test_one_length_for_all_pads_on_the_left_or_on_the_right(runner: Runner) -> None:
    """As transformers takes keys: [B, K, L, D]. The results lie in the middle of a buffer that nothing else writes."""
    built, L = LENGTHS.build(), 100
    lens = built.batch.seq_lens
    packed = expected(built.layer, built.batch, torch.float32).split(lens.tolist())
    for first in (lens - L, 0):
        buffers = [torch.full((6, 2, L + 7, d + 3), 7.0, device=runner.device) for d in (64, 80)]
        k, v = (x[1:5, :, 4 : L + 4, 1:-2].transpose(1, 2) for x in buffers)
        found = gathered(built.layer, built.batch, runner, first, out=(k, v))
        for b, tokens in enumerate(packed):
            n = len(tokens)
            at = slice(L - n, L) if isinstance(first, torch.Tensor) else slice(n)
            assert torch.equal(found[b, at], tokens)
            assert found[b].count_nonzero() == tokens.count_nonzero()
        for x, inside in zip(buffers, (k, v), strict=True):
            inside.fill_(7.0)
            assert (x == 7).all()


def test_rows_behind_the_last_token_stay_as_they_are(runner: Runner) -> None:
    built, N = LENGTHS.build(), sum(LENGTHS.kv_lens)
    out = [torch.full((N + 3, 3, d), 7.0, device=runner.device)[:, ::2] for d in (64, 80)]
    result = gather_kv(
        moved(built.layer, runner.device), moved(built.batch, runner.device), out=(out[0], out[1]),
        backend=runner.backend,
    )  # fmt: skip
    assert result[0] is out[0]
    assert torch.equal(torch.cat(out, -1).cpu()[:N], expected(built.layer, built.batch, torch.float32))
    assert all((x[N:] == 7).all() for x in out)


def test_nothing_is_gathered_from_no_sequences(runner: Runner) -> None:
    for lens in ((), (0,), (0, 0)):
        built = Case(q_lens=(0,) * len(lens), kv_lens=lens, dims=(64, 80)).build()
        assert gathered(built.layer, built.batch, runner).shape == (0, 2, 144)
        out = (torch.ones(len(lens), 0, 2, 64, device=runner.device), torch.ones(len(lens), 0, 2, 80))
        gathered(built.layer, built.batch, runner, out=tuple(moved(x, runner.device) for x in out))


@pytest.mark.parametrize("kv", ["", "fp8_e4m3/tensor", "fp8_e5m2/token_head", "int8/token_head", "k5v4/token_head"])
def test_nan_and_infinity_reach_their_own_elements_only(kv: str, runner: Runner) -> None:
    """A scale is NaN too if its bits are all ones."""
    built = replace(LENGTHS, kv=kv, dtype="bfloat16", punched=False, rows=False).build()
    page, layer = int(built.batch.block_table[0, 1]), built.layer
    if kv.endswith("token_head"):
        layer.k_scale[page, 3, 1] = torch.tensor(-1, dtype=torch.int16).view(torch.float16)
    elif kv:
        as_bytes(layer.k)[page, 3, 1, :2] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    else:
        layer.k[page, 3, 1, :2] = torch.tensor([torch.inf, torch.nan]).bfloat16()
    right = expected(layer, built.batch, torch.bfloat16)
    assert not right[19, 1, :2].isfinite().all()
    assert_held(gathered(layer, built.batch, runner, dtype=torch.bfloat16), right, kv)


@each_way
@pytest.mark.parametrize("kv", ["int8/tensor", "fp8_e4m3/tensor", "fp8_e5m2/tensor", "int8/token_head"])
def test_a_product_is_rounded_once_however_small_or_large(kv: str, runner: Runner) -> None:
    """Processors have instructions that round to bfloat16 and take subnormal numbers for zero."""
    built = Case(q_lens=(1,), kv_lens=(130,), heads=(2, 2), dims=(128, 72), kv=kv).build()
    layer, scales = built.layer, [0.0, -0.0, torch.inf, torch.nan]
    for exponent in (-149, -140, -127, -126, -118, -112, -101, -100, -99, -3, 99, 100, 101, 112, 120, 127):
        scales += [2.0**exponent, -(2.0**exponent) * 1.3]
    tries = [(layer.k_scale, layer.v_scale, torch.tensor(scale)) for scale in scales]
    if kv.endswith("/token_head"):
        some = torch.tensor(scales).half()
        tries = [(layer.k_scale, layer.v_scale, some[torch.arange(layer.k_scale.numel()) % len(some)])]
    for k_scale, v_scale, values in tries:
        for scale in (k_scale, v_scale):
            scale.copy_(values.view(scale.shape))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found, right = (
                gather_kv(layer, built.batch, dtype=dtype, backend=name) for name in (runner.backend, "reference")
            )
            for x, y in zip(found, right, strict=True):
                assert torch.equal(x.isnan(), y.isnan())
                bits = [z.masked_fill(z.isnan(), 7).view(torch.uint8) for z in (x, y)]
                assert torch.equal(*bits)


@pytest.mark.parametrize(
    "kv",
    [
        "",
        *(pytest.param(f"{kv}/token_head", marks=pytest.mark.slow) for kv in ("int8", "fp8_e5m2", "k5v4")),
    ],
)  # fmt: skip
@each_way
def test_results_larger_than_a_cache_are_the_same(kv: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels store them past the caches, and cut them for their threads."""
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "3")
    built = Case(q_lens=(1,) * 3, kv_lens=(9000, 7, 8000), heads=(4, 4), dims=(128, 64), kv=kv, layout="HND").build()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found, right = (
            gather_kv(built.layer, built.batch, 3, dtype=dtype, backend=name) for name in (runner.backend, "reference")
        )
        assert max(x.numel() * x.element_size() for x in found) > 8 << 20
        for x, y in zip(found, right, strict=True):
            assert_held(x, y, kv)


def bad_calls() -> dict[str, tuple[dict[str, object], str]]:
    """Changes of a call, and the words of the refusal."""
    k, v = torch.zeros(9, 2, 64), torch.zeros(9, 2, 80)
    padded = torch.zeros(4, 100, 2, 64), torch.zeros(4, 100, 2, 80)
    wide = torch.zeros(200, 2, 160)
    return {
        "lens": ({"seq_lens": torch.tensor([145, 1, 0, 33], dtype=INT32)}, "goes from 0 to 145 but a row of 9 pages"),
        "negative": ({"seq_lens": torch.tensor([-1, 1, 0, 33], dtype=INT32)}, "goes from -1 to 33"),
        "int64 lens": ({"seq_lens": torch.tensor([1, 1, 0, 3])}, r"batch.seq_lens is int64 \[4\]"),
        "rows": ({"rows": torch.tensor([0, 1, 2, 7], dtype=INT32)}, "there are 7 rows in batch.block_table"),
        "frames": ({"block_table": torch.full((7, 9), 99, dtype=INT32)}, "names frames 99 to 99 but the layer has F="),
        "first": ({"first": 1.5}, r"first is 1\.5; give a position, or a tensor int32 \[B\]"),
        "firsts": ({"first": torch.zeros(4)}, r"first is float32 \[4\]; it must be int32 \[B=4\], or an int"),
        "dtype": ({"dtype": torch.int8}, "dtype is int8; give one of float32, bfloat16, float16"),
        "short": ({"out": (k, v)}, "out holds 9 rows and the sequences have 131 tokens"),
        "one": ({"out": k}, r"out is Tensor and dtype is None; give the pair \(k, v\)"),
        "both": ({"out": (k, v), "dtype": torch.float16}, r"dtype is torch.float16; give the pair \(k, v\), and no"),
        "dims": ({"out": (padded[0], v)}, r"out's v is float32 \[9, 2, 80\]; it must be float32 \[B=4, L=\d+, K=2"),
        "heads": ({"out": (k[:, :1], v)}, r"out's k is float32 \[9, 1, 64\]"),
        "batch": ({"out": (padded[0][:3], padded[1][:3])}, r"out's k is float32 \[3, .*it must be .*\[B=4, "),
        "kinds": ({"out": (padded[0], padded[1].half())}, "out's v is float16 .*: k and v have the same rows"),
        "strides": ({"out": (wide[..., ::2][..., :64], wide[..., :80])}, "its last dim must be contiguous"),
        "overlap": ({"out": (k[:1].expand(200, 2, 64), wide[..., :80])}, "several of its elements share memory"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_a_wrong_gather_is_refused_in_words(name: str) -> None:
    changes, words = bad_calls()[name]
    built = replace(LENGTHS, punched=False).build()
    tables: dict[str, Any] = {key: changes.pop(key) for key in ("seq_lens", "rows", "block_table") if key in changes}
    with pytest.raises(InvalidRequest, match=words):
        gather_kv(built.layer, replace(built.batch, **tables), **changes)  # type: ignore[arg-type]


def test_a_cache_gathers_what_was_written_in_the_dtype_of_its_model() -> None:
    spec = pagedkv.KVSpec(2, 2, 64, block_size=4, dtype="float16", kv_dtype="int8")
    cache = pagedkv.PagedKVCache(spec, num_frames=16)
    spaces = [cache.open(), cache.open()]
    batch = cache.plan(spaces, [5, 9])
    k, v = torch.randn(14, 2, 64), torch.randn(14, 2, 64)
    pagedkv.write_kv(k, v, cache[1], batch[1])
    cache.commit(batch, range(14))
    found = cache.gather(1, batch)
    for x, y in zip(found, (k, v), strict=True):
        assert x.dtype == torch.float16
        assert (x - y).abs().max() <= y.abs().max() / 200
    assert torch.equal(cache.gather(1, batch, 4)[0], torch.cat([found[0][4:5], found[0][9:]]))
    for space in spaces:
        space.release()
