"""The sizes that the Triton kernels take from tuning.json or from the rule, and the kernels of the read ceiling.

Kernels are interpreted (test_triton.py, imported here, explains how).
"""

from __future__ import annotations

import functools
import operator
from dataclasses import asdict, replace

import pytest
import torch

from tests.cases import Case, call_of
from tests.kernels.triton.test_triton import interpreted, interpreting, tuning

__all__ = ["interpreting"]  # a fixture

ceiling = interpreted("pagedkv.bench.gpu.ceiling")
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"), pytest.mark.usefixtures("interpreting")]


def test_kernels_take_their_sizes_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    on, size = tuning.Target("sm_90", 132), (512, 128)
    plain, fresh = tuning.tuning("decode", on, *size), tuning.tuning.__wrapped__
    fields = {"N": 16, "programs": 7}
    entry = {"source": "measured", "decode": {tuning._size_key(*size): fields}}
    monkeypatch.setattr(tuning, "_table", lambda: {"sm_90": entry, "gfx942": entry})
    assert fresh("decode", on, *size) == replace(plain, **fields)
    assert fresh("decode", on, 520, 128) != replace(plain, **fields)  # a larger head is another size
    assert fresh("decode", tuning.Target("sm_80", 108), *size).programs == 2
    assert fresh("prefill", on, *size) == tuning._by_rule("prefill", on, *size)


SIZES = (
    (256, 64), (512, 128), (1024, 256), (256, 128), (128, 64), (128, 128), (512, 64), (1024, 128),
    (2176, 576), (1088, 576), (544, 576),
)  # fmt: skip
"""Bytes of a head of K and V, and elements of the wider: bfloat16, fp8, int4 and float32, then MLA."""


def test_entries_that_were_not_measured_have_the_values_of_the_rule_and_its_name() -> None:
    for arch, entry in tuning._table().items():
        if entry["source"] != "rule":
            assert entry["source"].startswith("measured on ")
            continue
        on = tuning.Target(arch, 0)
        for kernel in ("decode", "prefill"):
            by_rule = {tuning._size_key(*size): asdict(tuning._by_rule(kernel, on, *size)) for size in SIZES}
            assert entry[kernel] == by_rule, arch


def test_tiles_of_16_rows_have_a_tuning_of_their_own_or_that_of_all_tiles() -> None:
    on = tuning.Target("sm_90", 132)
    narrow, plain = (tuning.tuning("decode_16", on, size, 128) for size in (256, 512))
    assert (narrow.num_warps, narrow.programs, narrow.N) == (1, 8, 32)
    assert tuning.tuning("decode", on, 256, 128).num_warps == 4
    assert plain == tuning.tuning("decode", on, 512, 128)


@pytest.mark.parametrize(("new_tokens", "asked"), [(1, "decode_16"), (4, "decode_16"), (8, "decode")])
def test_a_decode_asks_for_the_tuning_of_its_rows(new_tokens: int, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkv.kernels.triton import backend, decode

    seen: list[str] = []
    real = decode.tuning
    monkeypatch.setattr(decode, "tuning", lambda kernel, *where: seen.append(kernel) or real(kernel, *where))
    backend.paged_attention(call_of(Case((new_tokens,), (70,), heads=(8, 2), dtype="bfloat16").build()))
    assert (seen[-1] == "decode_16") == (asked == "decode_16")


@pytest.mark.parametrize(("heads", "narrow"), [((2, 2), True), pytest.param((8, 2), False, marks=pytest.mark.slow)])
def test_with_split_tokens_the_tuning_of_a_sequence_follows_from_its_own_rows(
    heads: tuple[int, int], narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour with drafts changes no bit, even if tiles of 16 rows have other keys: it has a launch of its own."""
    from pagedkv.kernels.triton import backend, decode

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


def test_the_ceiling_reads_every_word() -> None:
    words = torch.randint(0, 1 << 60, (ceiling.BLOCK * 2 + 5,))
    assert [int(x) for x in ceiling.read(words)] == [
        functools.reduce(operator.xor, part.tolist()) for part in words.split(ceiling.BLOCK)
    ]


def test_random_runs_are_read_whole_and_only_they() -> None:
    words = torch.randint(0, 1 << 60, (ceiling.BLOCK * 6,))
    for run in ceiling.RUNS:
        runs = words.view(-1, run // 8)
        starts = torch.randperm(len(runs)).int()[: len(runs) // 3]
        per_program = max(1, ceiling.BLOCK * 8 // run)
        chosen = runs[starts.long()].view(-1, per_program * run // 8)
        assert ceiling.read_runs(words, starts, run).tolist() == [
            functools.reduce(operator.xor, part.tolist()) for part in chosen
        ]
