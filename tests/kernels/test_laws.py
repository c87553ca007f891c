"""Laws that every kernel keeps, for any numbers; equality here is bit for bit unless a tolerance is named."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pagedkv import KernelUnavailable, bind_attention, copy_frames, merge_states, paged_attention, write_kv
from pagedkv.kernels.args import KVLayer, PagedBatch
from tests.cases import DTYPES, Built, Case, as_bytes, moved
from tests.kernels.conftest import COMPILED, FOR_GPUS, WAYS, Runner

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

each_way = pytest.mark.parametrize("runner", WAYS, indirect=True)
for_gpus = pytest.mark.parametrize("runner", FOR_GPUS, indirect=True)
each_compiled = pytest.mark.parametrize("runner", COMPILED, indirect=True)

MERGED = 2e-6
"""float32: of a softmax taken in two parts, against one taken whole."""

EVERY_PART = Case(q_lens=(1, 33, 4, 1), kv_lens=(3000, 577, 700, 5), heads=(8, 2), dtype="bfloat16")
"""Enough keys to be cut, rows enough for several tiles."""

MIXED = Case(q_lens=(1, 5, 1, 17, 1, 5), kv_lens=(200, 60, 133, 17, 187, 111), heads=(4, 2), window=90)


@pytest.mark.parametrize("half", [16, 48, 96])
def test_merging_two_halves_equals_the_whole(half: int, runner: Runner) -> None:
    built = Case(q_lens=(1, 4), kv_lens=(97, 130), sinks=True).build()
    batch, sinks = built.batch, built.options["sinks"]
    front = replace(batch, seq_lens=torch.full_like(batch.seq_lens, half))
    back = replace(batch, seq_lens=batch.seq_lens - half, block_table=batch.block_table[:, half // 16 :])

    first = runner.attend(built._replace(batch=front), causal=False, sinks=None)
    second = runner.attend(built._replace(batch=back), sinks=sinks)
    out, lse = merge_states(*first, *second)

    whole, whole_lse = runner.attend(built)
    assert (out - whole).abs().max() <= MERGED
    assert (lse - whole_lse).abs().max() <= MERGED * 10


@pytest.mark.parametrize("split_tokens", [None, 32])
def test_moving_frames_changes_no_bit(split_tokens: int | None, runner: Runner) -> None:
    built = MIXED.build()
    elsewhere = moved_frames(built, torch.randperm(len(built.layer.k)))
    assert_equal(*(runner.attend(x, split_tokens=split_tokens) for x in (built, elsewhere)))


def moved_frames(built: Built, where: Tensor) -> Built:
    """Frame f goes to where[f], and the tables follow."""
    layer, table = built.layer, built.batch.block_table
    tensors = {}
    for name in ("k", "v", "k_scale", "v_scale"):
        x = getattr(layer, name)
        if x is not None and x.dim():
            tensors[name] = torch.empty_like(x)
            as_bytes(tensors[name])[where] = as_bytes(x)
    known = (table >= 0) & (table < len(where))
    renamed = torch.where(known, where[table.where(known, 0).long()].int(), table)
    return built._replace(layer=replace(layer, **tensors), batch=replace(built.batch, block_table=renamed))


def assert_equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("b", range(6))
@pytest.mark.parametrize("split_tokens", [16, 40, 1000])
def test_with_split_tokens_the_rest_of_the_batch_changes_no_bit(b: int, split_tokens: int, runner: Runner) -> None:
    built = MIXED.build()
    out, lse = runner.attend(built, split_tokens=split_tokens)
    rows = slice(*built.batch.cu_seqlens_q[b : b + 2].tolist())
    assert_equal((out[rows], lse[rows]), runner.attend(only(built, b), split_tokens=split_tokens))


@each_way
@pytest.mark.parametrize("split_tokens", [16, 100, 4096])
def test_with_split_tokens_the_number_of_threads_changes_no_bit(
    runner: Runner, split_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, results = EVERY_PART.build(), []
    for threads in (1, 2, 3, 8):
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
        results.append(runner.attend(built, split_tokens=split_tokens))
        assert_equal(results[0], results[-1])


@each_way
def test_keys_cut_for_threads_give_what_one_thread_gives(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    built, results = replace(EVERY_PART, dtype="float32", window=2000, sinks=True).build(), []
    for threads in (1, 2, 5):
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
        results.append(runner.attend(built))
        assert (results[0][0] - results[-1][0]).abs().max() <= 2e-6
        assert (results[0][1] - results[-1][1]).abs().max() <= 1e-5


@pytest.mark.parametrize("q_lens", [(8, 3, 1), (40, 24, 1)])
def test_with_split_tokens_a_neighbours_tree_mask_changes_no_bit(q_lens: tuple[int, ...], runner: Runner) -> None:
    """Of rows with a mask that says what causality says: one sequence verifies a tree, the others go on as ever."""
    built = Case(q_lens=q_lens, kv_lens=(150, 70, 40), heads=(8, 1), dtype="bfloat16").build()
    first = q_lens[0]
    mask = torch.cat([torch.ones(m, first, dtype=torch.bool).tril() for m in q_lens])
    mask[:first] = torch.rand(first, first) < 0.5
    masked = runner.attend(built, split_tokens=128, tree_mask=mask)
    for x, y in zip(runner.attend(built, split_tokens=128), masked, strict=True):
        assert torch.equal(x[first:], y[first:])


def only(built: Built, b: int) -> Built:
    """Sequence `b` of the batch, in a table of another width."""
    first, end = built.batch.cu_seqlens_q[b : b + 2].tolist()
    n = int(built.batch.seq_lens[b])
    batch = PagedBatch(
        block_table=built.batch.block_table[b : b + 1, : -(-n // built.layer.k.shape[1])],
        seq_lens=torch.tensor([n], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, end - first], dtype=torch.int32),
        slots=built.batch.slots[first:end],
        positions=built.batch.positions[first:end],
        max_seqlen_q=end - first,
        max_seqlen_k=n,
    )
    causal = built.options.get("causal", True)
    options = built.options | {"causal": causal[b : b + 1] if isinstance(causal, torch.Tensor) else causal}
    return built._replace(q=built.q[first:end].clone(), batch=batch, options=options)


def test_out_is_filled_where_given_and_padding_is_left_alone(runner: Runner) -> None:
    built = replace(MIXED, padding=2).build()
    there = {name: moved(x, runner.device) for name, x in built.options.items()}
    built = Built(*(moved(x, runner.device) for x in built[:3]), there)
    buffer = torch.full((built.q.shape[0], 4, 2 * 64), 7.0, device=runner.device)[
        ..., :64
    ]  # strided, as in a fused buffer

    out = paged_attention(built.q, built.layer, built.batch, out=buffer, backend=runner.backend, **built.options)

    assert out is buffer
    assert torch.equal(buffer[:-2].cpu(), runner.attend(built)[0][:-2])
    assert (buffer[-2:] == 7).all()


def test_the_default_scale_is_one_over_the_root_of_head_dim(runner: Runner) -> None:
    built = MIXED.build()
    assert torch.equal(runner.attend(built)[0], runner.attend(built, scale=64**-0.5)[0])
    assert not torch.allclose(runner.attend(built)[0], runner.attend(built, scale=0.5)[0])


@pytest.mark.parametrize("outermost", ["frames", "slots"])
def test_a_pool_of_more_than_2_31_elements_is_addressed_whole(outermost: str, tmp_path: Path, runner: Runner) -> None:
    """By 64-bit products of frames and of slots: the last slot lies beyond 2^31, whichever of the two is the outer dim
    of the memory."""
    if runner.device != "cpu":
        pytest.skip("the sparse file stands in for memory on the CPU only")
    S, K, D = 8, 8, 128
    F = 2**32 // (S * K * D) + 2
    sparse = torch.from_file(
        str(tmp_path / "pool"), shared=True, size=F * S * K * D, dtype=torch.float16
    )  # no bytes yet
    pool = sparse.view(F, S, K, D) if outermost == "frames" else sparse.view(S, F, K, D).transpose(0, 1)
    layer = KVLayer(pool, pool)
    kv, q = torch.randn(S, K, D).half(), torch.randn(20, K, D).half()

    def batch(frame: int, queries: int) -> PagedBatch:
        ints = (torch.tensor(x, dtype=torch.int32) for x in ([[frame]], [S], [0, queries]))
        slots, positions = torch.arange(S) + frame * S, torch.arange(S)
        return PagedBatch(*ints, slots=slots, positions=positions, max_seqlen_q=queries, max_seqlen_k=S)

    write_kv(kv, kv, layer, batch(F - 1, 1), backend=runner.backend)
    copy_frames(pool, torch.tensor([[F - 1, 0]], dtype=torch.int32), backend=runner.backend)

    assert torch.equal(pool[0], kv)
    assert torch.equal(pool[F - 1], kv)
    for queries in (1, 20):  # decode; and prefill, where that is another kernel
        out = [
            paged_attention(q[:queries], layer, batch(f, queries), causal=False, backend=runner.backend)
            for f in (0, F - 1)
        ]
        assert torch.equal(*out)
        assert (out[0] - attend_plainly(q[:queries], kv)).abs().max() < 2e-3  # half precision, values near 1


def test_small_tensors_of_any_stride_are_read_where_they_are(runner: Runner) -> None:
    """Rows of a table, sinks, slopes and masks that are columns of something larger."""
    case = Case(
        q_lens=(1, 4, 20), kv_lens=(70, 33, 90), heads=(4, 2), mask="tree", sinks=True, alibi=True, rows=True, window=60
    )
    built = case.build()
    strided = {name: _every_second(built.options[name]) for name in ("sinks", "alibi_slopes", "tree_mask")}
    batch = replace(built.batch, rows=_every_second(built.batch.rows))
    for split_tokens in (None, 32):
        plain = runner.attend(built, split_tokens=split_tokens)
        assert_equal(plain, runner.attend(built._replace(batch=batch), split_tokens=split_tokens, **strided))


def _every_second(x: Tensor) -> Tensor:
    """Equal to `x`, with something else between its elements."""
    wide = torch.stack([x, torch.ones_like(x)], -1).flatten(-2)[..., ::2]
    assert not wide.is_contiguous()
    return wide


@pytest.mark.parametrize("beyond", [2**31 - 1, 2**40])
def test_a_window_or_a_split_beyond_every_length_is_as_good_as_any(beyond: int, runner: Runner) -> None:
    built = replace(MIXED, window=None).build()
    assert torch.equal(runner.attend(built, window=1000)[0], runner.attend(built, window=beyond)[0])
    one = runner.attend(built, split_tokens=1000, window=90)
    assert torch.equal(one[0], runner.attend(built, split_tokens=beyond, window=90)[0])
    for options in ({"split_tokens": 16}, {"split_tokens": 16, "causal": False}):
        assert torch.equal(
            runner.attend(built, window=1000, **options)[0], runner.attend(built, window=beyond, **options)[0]
        )
    early = Case(q_lens=(40, 3), kv_lens=(12, 2), mask="all").build()  # some queries stand before the first token
    assert torch.equal(runner.attend(early, window=1000)[0], runner.attend(early, window=beyond)[0])


@pytest.mark.parametrize("split_tokens", [None, 16])
@pytest.mark.parametrize("case", [Case(block_size=4), Case(), Case(q_lens=(40,), kv_lens=(97,))], ids=str)
def test_what_is_no_number_in_a_query_is_not_hidden_by_cutting_keys(
    case: Case, split_tokens: int | None, runner: Runner
) -> None:
    built = case.build()
    built.q[0, 0] = torch.nan
    out, lse = runner.attend(built, split_tokens=split_tokens)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan()
    assert not out[0, 1:].isnan().any()


def test_nan_in_a_key_reaches_its_own_heads_and_no_other_sequence(runner: Runner) -> None:
    built = Case(q_lens=(1, 1), kv_lens=(40, 40)).build()
    built.layer.k[int(built.batch.block_table[0, 1]), 3, 0] = torch.nan
    out, lse = runner.attend(built)
    assert out[0, :2].isnan().all()  # the heads of kv head 0
    assert lse[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("kv", ["fp8_e4m3/token_head", "int8/token_head", "k8v4/token_head", "k5v4/token_head"])
def test_a_value_whose_scale_is_no_number_is_not_hidden(kv: str, runner: Runner) -> None:
    """`write_kv` stores such a scale for a vector that holds a NaN."""
    built = Case(q_lens=(1,), kv_lens=(40,), heads=(4, 1), dtype="bfloat16", kv=kv).build()
    table, scale = built.batch.block_table, built.layer.v_scale
    for place in range(16, 32):  # each place of a block
        scales = scale.clone()
        scales[int(table[0, place // 16]), place % 16] = torch.nan
        assert runner.attend(built._replace(layer=replace(built.layer, v_scale=scales)))[0].isnan().all(), place


@each_compiled
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_every_byte_of_a_value_is_read_as_what_it_says(kind: str, runner: Runner) -> None:
    """A sequence has one key, so its output is the value: in vectors, and in the elements that no vector covers."""
    every = torch.arange(256, dtype=torch.uint8)
    for width in (128,) if runner.is_slow else (128, 64, 23):  # bytes of a vector
        v = torch.nn.functional.pad(every, (0, -256 % width)).view(-1, 1, 1, width).view(DTYPES[kind])
        wanted = v.flatten(1).float()
        B, D = wanted.shape
        built, one = Case((1,) * B, (1,) * B, heads=(1, 1), dims=(D, D), kv=f"{kind}/tensor").build(), torch.ones(())
        table = torch.arange(B, dtype=torch.int32)[:, None].contiguous()
        layer = KVLayer(torch.zeros_like(v.view(torch.uint8)).view(v.dtype), v, one, one)
        built = built._replace(layer=layer, batch=replace(built.batch, block_table=table))
        out = runner.attend(built)[0].view(B, D)
        assert torch.equal(out.isfinite(), wanted.isfinite())
        assert runner.spoils_rows or torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out[wanted.isfinite()], wanted[wanted.isfinite()])


@each_way
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_below_every_normal_float_count_as_nothing(dtype: str, heads: tuple[int, int], runner: Runner) -> None:
    """Key t scores -t. A power of two that is made of exponent bits is garbage below 2^-126, about e^-87."""
    case = Case(q_lens=(1,), kv_lens=(128,), heads=heads, dims=(64, 64), dtype=dtype)
    built = case.build()
    built.q.zero_()[..., 0] = 8
    for page, frame in enumerate(built.batch.block_table[0, :8].tolist()):
        built.layer.k[frame, :, 0, 0] = -torch.arange(16 * page, 16 * page + 16)
    runner.check(case, built)


@for_gpus
@pytest.mark.parametrize("kv", ["fp8_e4m3", "int8/token_head"])
def test_many_weights_far_below_the_largest_still_count(kv: str, runner: Runner) -> None:
    """The first of many keys may take nearly the whole softmax. Float16 has no number for the others' weights."""
    built = Case(q_lens=(1,), kv_lens=(100,), heads=(1, 1), dims=(128, 128), kv=kv, dtype="bfloat16").build()
    pages, (k, v, k_scale, v_scale, _) = built.batch.block_table[0, :7].long(), vars(built.layer).values()
    built.q.zero_()[0, 0, 0] = 128**0.5
    k[pages] = torch.zeros(()).to(k.dtype)
    k[pages[0], 0, 0, 0] = torch.tensor(20.0).to(k.dtype)
    v[pages] = torch.ones(()).to(v.dtype)
    v[pages[0], 0] = torch.zeros(()).to(v.dtype)
    for scale in (k_scale, v_scale):
        if scale is not None:
            scale[pages] = 1.0
    weight = np.exp(-20.0)
    found = runner.attend(built)[0].float()
    assert torch.allclose(found, torch.tensor(99 * weight / (1 + 99 * weight)).float(), rtol=2**-7)


@each_way
@pytest.mark.parametrize("softcap", [1.0, 50.0, 1e4])
def test_a_soft_cap_is_exact_for_small_and_large_scores(runner: Runner, softcap: float) -> None:
    case = Case(softcap=softcap)
    for size in (1e-3, 1.0, 30.0):
        built = case.build()
        runner.check(case, built._replace(q=built.q * size))


@for_gpus
def test_a_soft_cap_below_every_score_leaves_equal_weights(runner: Runner) -> None:
    built = Case().build()
    for softcap in (1e-50, 1e-31, 1e-12):
        equal, found = (runner.attend(built, **options)[0] for options in ({"scale": 0.0}, {"softcap": softcap}))
        assert torch.allclose(found, equal, atol=1e-6)


def test_a_soft_cap_beyond_every_score_changes_nothing(runner: Runner) -> None:
    built = Case().build()
    for softcap in (1e29, 1e31, 3e38):
        assert torch.allclose(runner.attend(built, softcap=softcap)[0], runner.attend(built)[0], atol=1e-6)


@pytest.mark.parametrize(("new", "keys", "split_tokens"), [(1, 0, None), (1, 900, None), (3, 400, 64), (24, 600, None)])
def test_an_infinite_sink_takes_the_whole_weight(new: int, keys: int, split_tokens: int | None, runner: Runner) -> None:
    """A sink of +inf leaves zeros, one of -inf changes nothing; one part of the keys or several write the result."""
    sinks = torch.tensor([torch.inf, -torch.inf, 0.5, torch.inf])
    case = Case(q_lens=(new,), kv_lens=(keys,), mask="causal" if keys else "all", split_tokens=split_tokens)
    out, lse = runner.attend(case.build(), sinks=sinks)
    assert torch.equal(lse == torch.inf, (sinks == torch.inf).expand(new, 4))
    assert (out[:, sinks == torch.inf] == 0).all()
    for x, right in zip((out, lse), Runner("reference").attend(case.build(), sinks=sinks), strict=True):
        assert torch.allclose(x, right, rtol=1e-4, atol=1e-4)


@each_compiled
def test_a_float64_query_is_refused_with_the_reason(runner: Runner) -> None:
    built = Case().build()
    with pytest.raises(KernelUnavailable, match="q is float64; it takes float32, bfloat16, float16"):
        paged_attention(built.q.double(), built.layer, built.batch, backend=runner.backend)


def test_one_vector_may_lie_in_all_slots(runner: Runner) -> None:
    built = Case().build()
    k, v = (torch.randn(len(built.layer.k), 1, 2, 64).expand(-1, 16, -1, -1) for _ in range(2))
    runner.check(Case(), built._replace(layer=KVLayer(k, v)))


def test_a_pool_without_frames_serves_a_query_that_sees_no_key(runner: Runner) -> None:
    built = Case(q_lens=(1,), kv_lens=(0,)).build()
    layer = KVLayer(built.layer.k[:0], built.layer.v[:0])
    assert (runner.attend(built._replace(layer=layer))[0] == 0).all()


@pytest.mark.parametrize("lens", [((), ()), ((0, 0), (0, 9)), ((0, 1, 0), (5, 0, 70)), ((1, 0, 5), (0, 0, 5))], ids=str)
@pytest.mark.parametrize("split_tokens", [None, 16])
def test_bounds_may_be_those_of_a_larger_batch(lens: Any, split_tokens: int | None, runner: Runner) -> None:
    """A captured graph is launched with the bounds of the longest batch: here with one that computes little."""
    case = Case(*lens, mask="all", split_tokens=split_tokens, padding=2)
    built = case.build()
    loose = replace(built.batch, max_seqlen_q=40, max_seqlen_k=max(100, built.batch.max_seqlen_k))
    runner.check(case, built._replace(batch=loose))


@pytest.mark.parametrize("kv", ["fp8_e4m3", "int8"])
def test_a_scale_may_be_a_number(kv: str, runner: Runner) -> None:
    built = Case(q_lens=(1, 4), kv_lens=(40, 60), dtype="bfloat16", kv=f"{kv}/tensor").build()
    k, v = built.layer.k, built.layer.v
    tensors = built._replace(layer=KVLayer(k, v, torch.tensor(0.5), torch.tensor(2.0)))
    numbers = built._replace(layer=KVLayer(k, v, 0.5, 2))
    assert numbers.layer.k_scale.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert KVLayer(k, v, np.float64(0.5), np.float32(2)).v_scale.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(runner.attend(tensors), runner.attend(numbers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_and_slopes_may_have_any_float_dtype(dtype: torch.dtype, runner: Runner) -> None:
    built = Case(q_lens=(1, 4), kv_lens=(40, 60), sinks=True, alibi=True).build()
    given = {name: built.options[name].to(dtype) for name in ("sinks", "alibi_slopes")}
    options = built.options | {name: x.float() for name, x in given.items()}
    wanted = runner.attend(built._replace(options=options))
    attend = bind_attention(
        moved(built.layer, runner.device),
        backend=runner.backend,
        sinks=moved(given["sinks"], runner.device),
        alibi_slopes=moved(given["alibi_slopes"], runner.device),
    )
    bound = attend(moved(built.q, runner.device), moved(built.batch, runner.device), return_lse=True)
    for found in (runner.attend(built, **given), runner.attend(built, **given), [x.cpu() for x in bound]):
        assert_equal(found, wanted)
    given["sinks"].fill_(50.0)  # the functional call reads them each time
    assert (runner.attend(built, **given)[1] > 49).all()


def attend_plainly(q: Tensor, kv: Tensor) -> Tensor:
    """One query per head over `kv` [n, K, D] as keys and values."""
    p = (torch.einsum("thd,nhd->thn", q.float(), kv.float()) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("thn,nhd->thd", p, kv.float())
