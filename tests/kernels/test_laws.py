"""What holds between two calls of a kernel, whatever the numbers are; equality here is bit for bit unless a tolerance is named."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv import copy_frames, merge_states, paged_attention, write_kv
from pagedkv.kernels.args import KVLayer, PagedBatch
from tests.cases import Built, Case

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
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)  # a state that saw nothing may hold anything
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
    after = runner.attend(built._replace(layer=moved, batch=replace(built.batch, block_table=renamed)), split_tokens=split_tokens)

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
    return built._replace(q=built.q[first:end].clone(), batch=batch)


def test_out_is_filled_where_given_and_padding_is_left_alone(runner: Runner) -> None:
    built = replace(MIXED, padding=2).build(0, runner.device)
    room = torch.full((built.q.shape[0], 4, 2 * 64), 7.0, device=runner.device)[..., :64]  # strided, as in a fused buffer

    out = paged_attention(built.q, built.layer, built.batch, out=room, backend=runner.backend, **built.options)

    assert out is room
    assert torch.equal(room[:-2].cpu(), runner.attend(built)[0][:-2])
    assert (room[-2:] == 7).all()


def test_the_default_scale_is_one_over_the_root_of_head_dim(runner: Runner) -> None:
    built = MIXED.build()
    assert torch.equal(runner.attend(built)[0], runner.attend(built, scale=64**-0.5)[0])
    assert not torch.allclose(runner.attend(built)[0], runner.attend(built, scale=0.5)[0])


def test_a_pool_of_more_than_2_31_elements_is_addressed_whole(tmp_path: Path, runner: Runner) -> None:
    if runner.device != "cpu":
        pytest.skip("the sparse file stands in for memory on the CPU only")
    S, K, D = 256, 8, 128
    F = 2**31 // (S * K * D) + 2
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=F * S * K * D, dtype=torch.float16).view(
        F, S, K, D
    )  # sparse: no bytes yet
    layer = KVLayer(pool, pool)
    last, n = F - 1, 5
    kv, q = torch.randn(n, K, D).half(), torch.randn(1, K, D).half()

    def batch(frame: int) -> PagedBatch:
        ints = (torch.tensor(x, dtype=torch.int32) for x in ([[frame]], [n], [0, 1]))
        return PagedBatch(*ints, slots=torch.arange(n) + frame * S, positions=torch.arange(n), max_seqlen_q=1, max_seqlen_k=n)

    write_kv(kv, kv, layer, batch(last), backend=runner.backend)
    copy_frames(pool, torch.tensor([[last, 0]], dtype=torch.int32))

    assert torch.equal(pool[0, :n], kv)
    out = [paged_attention(q, layer, batch(frame), backend=runner.backend) for frame in (0, last)]
    assert torch.equal(*out)
    assert (out[0] - attend_plainly(q, kv)).abs().max() < 2e-3  # half precision, values near 1


def attend_plainly(q: Tensor, kv: Tensor) -> Tensor:
    """One query per head over `kv` [n, K, D] as keys and values."""
    p = (torch.einsum("thd,nhd->thn", q.float(), kv.float()) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("thn,nhd->thd", p, kv.float())
