"""Laws of windows with two sides, and of sequences that say whether they are causal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import bind_attention, paged_attention
from pagedkv.errors import InvalidRequest
from tests.cases import MASKS, Built, Case, moved

if TYPE_CHECKING:
    from tests.kernels.conftest import Runner

ENCODER = Case(q_lens=(3, 1, 40), kv_lens=(12, 30, 70), heads=(4, 2), mask="all")


def equal(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


@pytest.mark.parametrize("split_tokens", [None, 32])
def test_a_number_is_the_left_side_of_a_window(split_tokens: int | None, runner: Runner) -> None:
    built = ENCODER.build()
    number = runner.attend(built, window=9, split_tokens=split_tokens)
    for window in ((8, None), (8, -1), [8, None], (8, 10**12)):
        assert equal(number, runner.attend(built, window=window, split_tokens=split_tokens))
    for window in ((None, None), (-1, -1), (10**12, 10**12)):
        assert equal(runner.attend(built), runner.attend(built, window=window))


def test_causality_is_a_right_side_of_nothing(runner: Runner) -> None:
    built = ENCODER.build()
    causal = runner.attend(built, causal=True, window=9)
    assert equal(causal, runner.attend(built, causal=True, window=(8, 0)))
    assert equal(causal, runner.attend(built, causal=True, window=(8, None)))
    assert equal(causal, runner.attend(built, window=(8, 0)))
    assert not torch.equal(causal[0], runner.attend(built, window=(8, 1))[0])


def test_a_window_shows_keys_after_the_query(runner: Runner) -> None:
    """The first of 40 queries, over values that are the positions of their keys."""
    built = Case(q_lens=(40,), kv_lens=(40,), heads=(1, 1), mask="all").build()
    frames = built.batch.block_table[0, :3].long()
    built.layer.k.zero_()
    built.layer.v.view(-1, 64)[(frames[:, None] * 16 + torch.arange(16)).flatten()[:40]] = torch.arange(40.0)[:, None]
    for right in (0, 1, 7, 39):
        out, lse = runner.attend(built, window=(0, right))
        assert (out[0, 0, 0] - right / 2).abs() < 1e-4
        assert (lse[0, 0].exp() - (right + 1)).abs() < 1e-3


@pytest.mark.parametrize("case", MASKS[:2], ids=str)
def test_a_sequence_is_causal_if_its_entry_says_so(case: Case, runner: Runner) -> None:
    built = case.build()
    each, starts = built.options["causal"], built.batch.cu_seqlens_q.tolist()
    # entries past the batch, and between the entries, are not read
    wide = torch.stack([torch.cat([each, ~each]), torch.cat([~each, each])], -1)[:, 0]
    together = runner.attend(built)
    assert equal(together, runner.attend(built, causal=wide))
    left, _ = case.window if isinstance(case.window, tuple) else (None, None)
    for b, is_causal in enumerate(each.tolist()):
        lens = torch.where(torch.arange(len(each)) == b, built.batch.seq_lens, 0)
        alone = built._replace(batch=replace(built.batch, seq_lens=lens))  # the others see nothing
        options: dict[str, Any] = {"causal": is_causal, "window": (left, 0) if is_causal else case.window}
        rows = slice(starts[b], starts[b + 1])
        for x, y in zip(together, runner.attend(alone, **options), strict=True):
            assert torch.allclose(x[rows].float(), y[rows].float(), atol=1e-5 if case.dtype == "float32" else 2e-2)


def test_all_or_none_causal_in_a_tensor_is_as_in_a_word(runner: Runner) -> None:
    built = ENCODER.build()
    for word in (True, False):
        each = torch.full((3,), word)
        assert equal(runner.attend(built, causal=word), runner.attend(built, causal=each))
    assert not torch.equal(runner.attend(built, causal=True)[0], runner.attend(built)[0])


def test_only_causal_sequences_must_hold_their_queries(runner: Runner) -> None:
    if runner.device != "cpu":
        pytest.skip("values are checked on the CPU")
    built = Case(q_lens=(3, 2), kv_lens=(2, 5), mask="some").build()
    runner.attend(built)
    with pytest.raises(InvalidRequest, match="sequence 0 has 3 queries and batch.seq_lens says 2 tokens"):
        runner.attend(built, causal=torch.tensor([True, False]))


def bound(built: Built, runner: Runner, each: torch.Tensor, **options: Any) -> Any:
    attend = bind_attention(moved(built.layer, runner.device), backend=runner.backend, **options)
    q, batch = moved(built.q, runner.device), moved(built.batch, runner.device)
    out, lse = attend(q, batch, causal=moved(each, runner.device), return_lse=True)
    return out.cpu(), lse.cpu()


@pytest.mark.usefixtures("unbound")
def test_a_bound_call_takes_causality_with_each_batch(runner: Runner) -> None:
    built = replace(ENCODER, mask="some").build()
    each = built.options["causal"]
    for causal in (each, ~each):
        found = bound(built, runner, causal, causal=False, window=(20, 4))
        assert equal(found, runner.attend(built, causal=causal, window=(20, 4)))
        assert equal(bound(built, runner, causal), runner.attend(built, causal=causal))


def test_a_compiled_function_takes_windows_and_causality_as_they_are() -> None:
    built = replace(ENCODER, mask="some").build()

    def step(q: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
        return paged_attention(q, built.layer, built.batch, causal=causal, window=(20, 4))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    each = built.options["causal"]
    for causal in (each, ~each):
        assert torch.equal(compiled(built.q, causal), step(built.q, causal))
