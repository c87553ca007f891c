"""Padded tensors [B, heads, L, D] give the results of their tokens alone, whatever padding holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import KVSpec, PagedBatch, PagedKVCache, bind_attention, bind_write, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.args import RotaryTable
from tests.cases import Built, Case, empty_layer, moved

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


def spread(x: Tensor, mask: Tensor, padding: float, *, contiguous: bool = False) -> Tensor:
    """Return [B, heads, L, D] with the tokens x [T, heads, D] where the mask is True; in memory [B, L, heads, D]."""
    rows = torch.full((*mask.shape, *x.shape[1:]), padding, dtype=x.dtype)
    rows[mask] = x
    return rows.transpose(1, 2).contiguous() if contiguous else rows.transpose(1, 2)


def on(runner: Runner, built: Built) -> tuple[Any, ...]:
    return tuple(moved(x, runner.device) for x in built[:3])


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_a_padded_query_are_those_of_its_tokens_and_padding_is_zero(
    case: Case, side: str, contiguous: bool, runner: Runner
) -> None:
    built, mask = case.build(), mask_of(case, side)
    padded_is_right(built, mask, spread(built.q, mask, torch.nan, contiguous=contiguous), runner)


def padded_is_right(built: Built, mask: Tensor, q: Tensor, runner: Runner) -> None:
    out, lse = runner.attend(built)
    batch = built.batch.padded(mask)
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (mask.shape[1], built.batch.max_seqlen_k)
    found, found_lse = runner.attend(built._replace(q=q, batch=batch))
    assert found.shape == q.shape[:3] + out.shape[2:]
    assert torch.allclose(
        found.transpose(1, 2)[mask].float(), out.float(), atol=2e-2 if q.dtype != out.float().dtype else 1e-5
    )
    assert torch.allclose(found_lse.transpose(1, 2)[mask], lse, atol=1e-4)
    assert (found.transpose(1, 2)[~mask] == 0).all()
    sinks = built.options.get("sinks")
    blind = torch.full(lse.shape[1:], -torch.inf) if sinks is None else sinks
    assert torch.allclose(found_lse.transpose(1, 2)[~mask], blind.expand(int((~mask).sum()), -1))


@pytest.mark.usefixtures("unbound")
@pytest.mark.parametrize("given", [False, True])
def test_bound_and_functional_calls_take_padded_tensors(given: bool, runner: Runner) -> None:
    case = CASES[0]
    built, mask = case.build(), mask_of(case, "left")
    built = built._replace(q=spread(built.q, mask, torch.nan), batch=built.batch.padded(mask))
    wanted, wanted_lse = runner.attend(built)
    q, layer, batch = on(runner, built)
    attend = bind_attention(layer, backend=runner.backend)
    into = torch.full((4, L, 4, 64), 7.0, device=runner.device).transpose(1, 2) if given else None
    for call in (
        lambda: attend(q, batch, out=into, return_lse=True),
        lambda: paged_attention(q, layer, batch, out=into, return_lse=True, backend=runner.backend),
    ) * 2:
        out, lse = call()
        assert out is into or not given
        assert torch.equal(out.cpu(), wanted)
        assert torch.equal(lse.cpu(), wanted_lse)
        if into is not None:
            into.fill_(7.0)
    assert torch.equal(attend(q, batch).cpu(), wanted)


def test_one_token_for_each_sequence_needs_no_other_batch(runner: Runner) -> None:
    built = Case(q_lens=(1, 1, 1), kv_lens=(40, 3, 97)).build()
    out, lse = runner.attend(built)
    for q in (built.q[:, :, None], built.q[:, None].transpose(1, 2)):
        found, found_lse = runner.attend(built._replace(q=q))
        assert torch.equal(found[:, :, 0], out)
        assert torch.equal(found_lse[:, :, 0], lse)


def test_rows_without_padding_need_no_other_batch(runner: Runner) -> None:
    built = Case(q_lens=(7, 7), kv_lens=(40, 7)).build()
    q = built.q.view(2, 7, 4, 64).transpose(1, 2)
    assert torch.equal(runner.attend(built._replace(q=q))[0].transpose(1, 2).flatten(0, 1), runner.attend(built)[0])


@pytest.mark.parametrize("kv", ["", "int8/token_head"])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_padding_is_not_stored(contiguous: bool, bound: bool, kv: str, runner: Runner) -> None:
    case = replace(CASES[1], sinks=False, kv=kv)
    built, mask = case.build(), mask_of(case, "both")
    k, v = (torch.randn(sum(case.q_lens), 2, 64, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    padded = built.batch.padded(mask)
    rope = RotaryTable(torch.rand(100, 16), torch.rand(100, 16))

    def stored(k: Tensor, v: Tensor, *at: Any) -> list[Tensor]:
        layer = moved(empty_layer(case, len(built.layer.k)), runner.device)
        k, v, *at = (moved(x, runner.device) for x in (k, v, *at))
        angles = RotaryTable(moved(rope.cos, runner.device), moved(rope.sin, runner.device))
        if bound:
            bind_write(layer, rope=angles, backend=runner.backend)(k, v, *at)
        else:
            write_kv(k, v, layer, *at, rope=angles, backend=runner.backend)
        return [x.cpu().float().nan_to_num(9.0) for x in (layer.k, layer.v)]

    wanted = stored(k, v, built.batch)
    rows = [spread(x, mask, torch.nan, contiguous=contiguous) for x in (k, v)]
    slots, positions = padded.slots, padded.positions
    assert slots is not None
    assert positions is not None
    assert (slots.view(mask.shape)[~mask] == -1).all()
    for at in ((padded,), (slots, positions), (slots.view(mask.shape), positions.view(mask.shape))):
        for x, y in zip(stored(*rows, *at), wanted, strict=True):
            assert torch.equal(x, y)


def test_tokens_of_a_transposed_tensor_are_viewed_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    built, mask, seen = case.build(), mask_of(case, "left"), []
    from pagedkv.kernels import reference

    own = reference.paged_attention
    monkeypatch.setattr(reference, "paged_attention", lambda call: (seen.append(call.q.data_ptr()), own(call)))
    batch = built.batch.padded(mask)
    q = spread(built.q, mask, 0.0)
    for x in (q, q.contiguous()):
        paged_attention(x, built.layer, batch, backend="reference")
    assert seen[0] == q.data_ptr()
    assert seen[1] != q.data_ptr()


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


@pytest.mark.parametrize("groups", [1, 2])
def test_a_planned_step_can_be_padded_on_any_side(groups: int) -> None:
    """The layers of a cache, as a plug-in of transformers uses them: plan with the mask's counts, pad once, commit."""
    spec = KVSpec(2 // groups, 2, 16, dtype="float32", block_size=4)
    cache = PagedKVCache([spec, replace(spec, window=64)] if groups == 2 else spec, num_frames=64)
    prompts = [torch.arange(n) for n in (5, 9, 2)]
    results = []
    for side in SIDES:
        spaces = [cache.open(prompt.tolist()) for prompt in prompts]
        batch = cache.plan(spaces, [len(x) for x in prompts])
        mask = mask_of(Case(q_lens=(5, 9, 2)), side)
        tokens = torch.cat([torch.sin(torch.arange(n)[:, None] + torch.arange(32.0)) for n in (5, 9, 2)]).view(
            -1, 2, 16
        )
        rows, padded = spread(tokens, mask, torch.nan), batch.padded(mask)
        for layer in range(2):
            write_kv(rows, rows, cache[layer], padded[layer])
        results.append(paged_attention(rows, cache[1], padded[1]).transpose(1, 2)[mask])
        cache.abort(padded)
        for space in spaces:
            space.release()
    assert not results[0].isnan().any()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def with_mask(change: Callable[[Tensor], Tensor]) -> Callable[[PagedBatch, Tensor], object]:
    return lambda batch, mask: batch.padded(change(mask))


WRONG: list[tuple[Callable[[PagedBatch, Tensor], object], str]] = [
    (with_mask(lambda mask: mask.long()), r"mask is int64 \[4, 21\] on cpu; it must be bool \[B=4, L\] on cpu"),
    (with_mask(lambda mask: mask[:3]), r"mask is bool \[3, 21\] on cpu; it must be bool \[B=4, L\]"),
    (with_mask(lambda mask: mask.to("meta")), r"mask is bool \[4, 21\] on meta"),
    (with_mask(lambda mask: mask[:, 1:]), "row 1 of mask has 20 tokens and sequence 1 of the batch has 21 new ones"),
    (with_mask(lambda mask: mask.roll(2, 1)), "row 0 of mask has padding between its tokens"),
]


@pytest.mark.parametrize(("call", "text"), WRONG, ids=[text[:30] for _, text in WRONG])
def test_a_mask_that_is_not_that_of_the_new_tokens_is_refused(call: Callable[..., object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        call(CASES[0].build().batch, mask_of(CASES[0], "left"))


@pytest.mark.parametrize("level", ["0", "1"])
def test_rows_of_another_batch_are_refused(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", level)
    case = Case(q_lens=(3, 1), kv_lens=(9, 8))
    built, q = case.build(), torch.zeros(2, 4, 3, 64)
    text = r"q has 2 rows of 3 tokens, and the batch counts other tokens: .* batch.padded\(mask\)"
    with pytest.raises(InvalidRequest, match=text):
        paged_attention(q, built.layer, built.batch)
    with pytest.raises(InvalidRequest, match="q has 2 rows of 2 tokens"):  # as many tokens, at other places
        paged_attention(q[:, :, :2], built.layer, built.batch)
    padded = built.batch.padded(mask_of(case, "left")[:, -3:])
    for out in (torch.zeros(2, 4, 3, 64), torch.zeros(6, 4, 64), torch.zeros(2, 3, 4, 64)):
        with pytest.raises(InvalidRequest, match=r"it must be \[B, H, L, Dv\], a transposed \[B, L, H, Dv\]"):
            paged_attention(q, built.layer, padded, out=out)
    with pytest.raises(InvalidRequest, match="v is"):
        write_kv(q[:, :2], torch.zeros(6, 2, 60), built.layer, padded)
    with pytest.raises(InvalidRequest, match="slots is int64"):
        write_kv(q[:, :2], q[:, :2], built.layer, built.batch)


@pytest.mark.usefixtures("unbound")
def test_slots_of_other_rows_and_columns_are_refused_and_nothing_is_stored() -> None:
    layer, k, at = empty_layer(Case(), 4), torch.ones(2, 2, 3, 64), torch.arange(6)
    rope, columns = RotaryTable(torch.ones(9, 8), torch.ones(9, 8)), torch.arange(3)[None]
    words = r"with k \[B=2, K=2, L=3, D=64\] it must be \[B, L\] or \[B \* L\]"

    def function(*slots: Any, rope: RotaryTable | None = None) -> None:
        write_kv(k, k, layer, *slots, rope=rope)

    def bound(*slots: Any, rope: RotaryTable | None = None) -> None:
        bind_write(layer, rope=rope)(k, k, *slots)

    for store in (function, function, function, bound):  # from the second call on, the function is bound, too
        with pytest.raises(InvalidRequest, match=r"slots is \[3, 2\]; " + words):
            store(at.view(3, 2))
        with pytest.raises(InvalidRequest, match="it must be a tensor"):
            store(at.tolist())
        with pytest.raises(InvalidRequest, match=r"positions is \[1, 3\]; " + words):
            store(at, columns, rope=rope)
    assert layer.k.isnan().all()
    function(at, columns)  # positions are not read without rope
    assert torch.equal(layer.k.flatten(0, 1)[:6], torch.ones(6, 2, 64))
