"""Laws between two calls of a kernel, for any numbers; equality here is bit for bit unless a tolerance is named."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pagedkv import bind_attention, copy_frames, merge_states, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.args import KVLayer, PagedBatch
from tests.cases import Built, Case, moved

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tests.kernels.conftest import Runner

MERGED = 2e-6
"""float32: of a softmax taken in two parts, against one taken whole."""

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


def test_merging_with_nothing_changes_nothing() -> None:
    out, lse = torch.randn(3, 2, 8), torch.randn(3, 2)
    nothing = (
        torch.full_like(out, torch.nan),
        torch.full_like(lse, -torch.inf),
    )  # a state that saw nothing may hold anything
    for merged in (merge_states(out, lse, *nothing), merge_states(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    blind, blind_lse = merge_states(*nothing, *nothing)
    assert (blind == 0).all()
    assert (blind_lse == -torch.inf).all()


@pytest.mark.parametrize("split_tokens", [None, 32])
def test_moving_frames_changes_no_bit(split_tokens: int | None, runner: Runner) -> None:
    built = MIXED.build()
    table, layer = built.batch.block_table, built.layer
    where = torch.randperm(len(layer.k))  # frame f moves to where[f]
    moved = KVLayer(torch.empty_like(layer.k), torch.empty_like(layer.v))
    moved.k[where], moved.v[where] = layer.k, layer.v
    known = (table >= 0) & (table < len(where))
    renamed = torch.where(known, where[table.where(known, 0).long()].int(), table)

    before = runner.attend(built, split_tokens=split_tokens)
    after = runner.attend(
        built._replace(layer=moved, batch=replace(built.batch, block_table=renamed)), split_tokens=split_tokens
    )

    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("b", range(6))
@pytest.mark.parametrize("split_tokens", [16, 40, 1000])
def test_with_split_tokens_the_rest_of_the_batch_changes_no_bit(b: int, split_tokens: int, runner: Runner) -> None:
    built = MIXED.build()
    together, together_lse = runner.attend(built, split_tokens=split_tokens)
    alone, alone_lse = runner.attend(only(built, b), split_tokens=split_tokens)

    rows = slice(*built.batch.cu_seqlens_q[b : b + 2].tolist())
    assert torch.equal(alone, together[rows])
    assert torch.equal(alone_lse, together_lse[rows])


@pytest.mark.parametrize("q_lens", [(8, 3, 1), (40, 24, 1)])
def test_with_split_tokens_a_neighbours_tree_mask_changes_no_bit(q_lens: tuple[int, ...], runner: Runner) -> None:
    """Of rows whose own mask says what causality says: one sequence verifies a tree, the others go on as ever."""
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
    built = replace(MIXED, padding=2).build(0, runner.device)
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
    assert built.batch.rows is not None
    batch = replace(built.batch, rows=_every_second(built.batch.rows))
    for split_tokens in (None, 32):
        plain = runner.attend(built, split_tokens=split_tokens)
        other = runner.attend(built._replace(batch=batch), split_tokens=split_tokens, **strided)
        assert torch.equal(plain[0], other[0])
        assert torch.equal(plain[1], other[1])


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


@pytest.mark.parametrize("kv", ["fp8_e4m3/token_head", "int8/token_head", "int4/token_head"])
def test_a_value_whose_scale_is_no_number_is_not_hidden(kv: str, runner: Runner) -> None:
    """`write_kv` stores such a scale for a vector that holds a NaN."""
    built = Case(q_lens=(1,), kv_lens=(40,), heads=(4, 1), dtype="bfloat16", kv=kv).build()
    table, scale = built.batch.block_table, built.layer.v_scale
    assert scale is not None
    for place in range(16, 32):  # each place of a block
        scales = scale.clone()
        scales[int(table[0, place // 16]), place % 16] = torch.nan
        assert runner.attend(built._replace(layer=replace(built.layer, v_scale=scales)))[0].isnan().all(), place


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
    for a, b in zip(runner.attend(tensors), runner.attend(numbers), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", [True, "1", 10**400, float("nan"), [1.0]])
def test_a_scale_that_is_no_number_is_refused(scale: object) -> None:
    layer = Case(kv="int8/tensor").build().layer
    with pytest.raises(InvalidRequest, match=r"layer\.v_scale is .*; give a number, a float32 tensor"):
        KVLayer(layer.k, layer.v, 1.0, scale)  # type: ignore[arg-type]


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
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    given["sinks"].fill_(50.0)  # the functional call reads them each time
    assert (runner.attend(built, **given)[1] > 49).all()


def attend_plainly(q: Tensor, kv: Tensor) -> Tensor:
    """One query per head over `kv` [n, K, D] as keys and values."""
    p = (torch.einsum("thd,nhd->thn", q.float(), kv.float()) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("thn,nhd->thd", p, kv.float())
