"""Rows with padding give the results of their tokens alone, whatever padding holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from pagedkv import PagedBatch, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.args import RotaryTable
from tests.cases import Case, empty_layer, moved

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tests.kernels.conftest import Runner

L = 21
CASES = (
    Case(q_lens=(5, 21, 1, 0), kv_lens=(40, 21, 97, 6), heads=(4, 2)),
    Case(q_lens=(1, 3, 20), kv_lens=(40, 3, 60), heads=(8, 2), dtype="bfloat16", rows=True, window=30, sinks=True),
    Case(q_lens=(2, 9), kv_lens=(33, 70), heads=(2, 1), mask="all", window=(20, 2), split_tokens=32, punched=True),
)
SIDES = {"left": 1.0, "right": 0.0, "both": 0.5}


def mask_of(case: Case, side: str) -> Tensor:
    """Return bool [B, L]: the new tokens of each row, with padding before or after them."""
    column, counts = torch.arange(L), torch.tensor(case.q_lens)[:, None]
    first = ((L - counts) * SIDES[side]).long()
    return (column >= first) & (column < first + counts)


def spread(x: Tensor, mask: Tensor, padding: float) -> Tensor:
    """Return [B * L, heads, D] with the tokens x [T, heads, D] where the mask is True."""
    rows = torch.full((mask.numel(), *x.shape[1:]), padding, dtype=x.dtype)
    rows[mask.flatten()] = x
    return rows


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_a_padded_query_are_those_of_its_tokens_and_padding_is_zero(
    case: Case, side: str, runner: Runner
) -> None:
    built, mask = case.build(), mask_of(case, side)
    q = spread(built.q, mask, torch.nan)
    out, lse = runner.attend(built)
    batch, real = built.batch.padded(mask), mask.flatten()
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (mask.shape[1], built.batch.max_seqlen_k)
    found, found_lse = runner.attend(built._replace(q=q, batch=batch))
    assert torch.allclose(found[real].float(), out.float(), atol=2e-2 if q.dtype != torch.float32 else 1e-5)
    assert torch.allclose(found_lse[real], lse, atol=1e-4)
    assert (found[~real] == 0).all()
    sinks = built.options.get("sinks")
    blind = torch.full(lse.shape[1:], -torch.inf) if sinks is None else sinks
    assert torch.allclose(found_lse[~real], blind.expand(int((~real).sum()), -1))


@pytest.mark.parametrize("kv", ["", "int8/token_head"])
def test_padding_is_not_stored(kv: str, runner: Runner) -> None:
    case = replace(CASES[1], sinks=False, kv=kv)
    built, mask = case.build(), mask_of(case, "both")
    k, v = (torch.randn(sum(case.q_lens), 2, 64, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    padded = built.batch.padded(mask)
    assert (padded.slots[~mask.flatten()] == -1).all()

    def stored(k: Tensor, v: Tensor, batch: PagedBatch) -> list[Tensor]:
        layer = moved(empty_layer(case, len(built.layer.k)), runner.device)
        k, v, batch, cos, sin = (moved(x, runner.device) for x in (k, v, batch, *angles))
        write_kv(k, v, layer, batch, rope=RotaryTable(cos, sin), backend=runner.backend)
        return [x.cpu().float().nan_to_num(9.0) for x in (layer.k, layer.v)]

    angles = torch.rand(100, 16), torch.rand(100, 16)
    found = stored(*(spread(x, mask, torch.nan) for x in (k, v)), padded)
    assert all(torch.equal(x, y) for x, y in zip(found, stored(k, v, built.batch), strict=True))


def test_a_compiled_function_pads_a_batch_and_gives_the_same_bits() -> None:
    case = CASES[0]
    built, mask = case.build(), mask_of(case, "right")
    q, k = spread(built.q, mask, 0.0), spread(built.q[:, :2] * 2, mask, torch.nan)

    def step(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        batch = built.batch.padded(mask)
        write_kv(k, -k, built.layer, batch)
        return paged_attention(q, built.layer, batch)

    wanted = step(q, k, mask)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, mask), wanted)


WRONG: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda mask: mask.long(), r"mask is int64 \[4, 21\] on cpu; it must be bool \[B=4, L\] on cpu"),
    (lambda mask: mask[:3], r"mask is bool \[3, 21\] on cpu; it must be bool \[B=4, L\]"),
    (lambda mask: mask.to("meta"), r"mask is bool \[4, 21\] on meta"),
    (lambda mask: mask[:, 1:], "row 1 of mask has 20 tokens and sequence 1 of the batch has 21 new ones"),
    (lambda mask: mask.roll(2, 1), "row 0 of mask has padding between its tokens"),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[text[:30] for _, text in WRONG])
def test_a_mask_that_is_not_that_of_the_new_tokens_is_refused(change: Callable[[Tensor], Tensor], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        CASES[0].build().batch.padded(change(mask_of(CASES[0], "left")))
