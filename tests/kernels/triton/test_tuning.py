"""The sizes that the Triton kernels take from tuning.json or from the rule, and the kernels of the read ceiling."""

from __future__ import annotations

import pytest
import torch

from tests.cases import Case, call_of
from tests.kernels.triton.test_triton import backend, decode, tuning

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize(("heads", "narrow"), [((2, 2), True), pytest.param((8, 2), False, marks=pytest.mark.slow)])
def test_with_split_tokens_the_tuning_of_a_sequence_follows_from_its_own_rows(
    heads: tuple[int, int], narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour with drafts changes no bit, even if tiles of 16 rows have other keys: it has another launch."""
    entries = {"decode": {"256/64": {"N": 64}}, "decode_16": {"256/64": {"N": 16}}}
    monkeypatch.setattr(tuning, "_table", lambda: {"interpreter": entries})
    monkeypatch.setattr(decode, "tuning", tuning.tuning.__wrapped__)
    found = []
    for new_tokens in ((1,), (1, 7), (1, 16)):
        built = Case((1, 16), (150, 40), heads=heads, dtype="bfloat16", split_tokens=100).build()
        call = call_of(built)
        starts = torch.tensor([0, 1, sum(new_tokens)][: len(new_tokens) + 1], dtype=torch.int32)
        call = call._replace(
            q=call.q[: starts[-1]], out=call.out[: starts[-1]], lse=call.lse[: starts[-1]], cu_seqlens_q=starts,
            seq_lens=call.seq_lens[: len(new_tokens)], max_seqlen_q=max(new_tokens),
        )  # fmt: skip
        seen: list[int] = []
        real = decode.specialisation_of
        monkeypatch.setattr(
            decode,
            "specialisation_of",
            lambda call, real=real, seen=seen, **of: seen.append(of["N"]) or real(call, **of),
        )
        backend.paged_attention(call)
        monkeypatch.setattr(decode, "specialisation_of", real)
        assert seen == ([16] if narrow or max(new_tokens) == 1 else [16, 64])
        found.append((call.out[0].clone(), call.lse[0].clone()))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])
