"""The host code of the Triton kernels, and what GPUs' tiles change, in Triton's interpreter.

The grid and all laws run in the interpreter too: see conftest.py. test_triton_compiled.py tests the compiled kernels.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention
from pagedkv.kernels import registry
from pagedkv.kernels.args import GatherCall, GatherSource, WriteCall
from tests.cases import Case, call_of
from tests.kernels.conftest import INTERPRETS, Runner
from tests.kernels.triton.compiled import typical_call

if not INTERPRETS:
    pytest.skip("Triton is not installed, or its kernels belong to the GPU", allow_module_level=True)

from pagedkv.kernels.triton import backend, decode, prefill, specialisation, tuning

DRAFTS = Case(q_lens=(1, 4, 3), kv_lens=(70, 4, 33))


def sized_for(arch: str, monkeypatch: pytest.MonkeyPatch, programs: int = 6) -> None:
    for module in (tuning, decode, prefill):
        monkeypatch.setattr(module, "target", lambda device: tuning.Target(arch, programs))


@pytest.mark.parametrize("kv", ["fp8_e4m3/token_head", pytest.param("fp8_e4m3/tensor", marks=pytest.mark.slow)])
def test_fp8_gives_the_same_numbers_by_its_bits_and_by_a_cast(
    kv: str, interpreter: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = replace(DRAFTS, dtype="bfloat16", kv=kv).build()
    by_bits = interpreter.attend(built)
    monkeypatch.setattr(tuning.Target, "native_fp8", True)
    by_cast = interpreter.attend(built)
    # the last bit of bfloat16 may differ: the factor 256 is multiplied at another point
    assert (by_bits[0] - by_cast[0]).abs().max() <= 2.0**-7
    assert (by_bits[1] - by_cast[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("programs", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 40))])
def test_the_number_of_programs_does_not_change_the_result(
    programs: int, interpreter: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sized_for(tuning.INTERPRETER, monkeypatch, programs)
    interpreter.check(Case(q_lens=(1, 2, 0, 1, 1), kv_lens=(200, 33, 7, 64, 0), heads=(2, 1), window=150, sinks=True))


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [pytest.param(lens, (150, 70, 40), marks=pytest.mark.slow) for lens in ((8, 3, 1), (40, 24, 1))],
)
def test_with_split_tokens_a_neighbours_tree_mask_changes_no_bit(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], interpreter: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rows' mask equals causality. Tiles have a GPU's sizes."""
    sized_for("sm_90", monkeypatch, 4)
    built = Case(q_lens=q_lens, kv_lens=kv_lens, heads=(8, 1), split_tokens=128, dtype="bfloat16").build()
    starts, widest = built.batch.cu_seqlens_q.tolist(), max(q_lens)
    causal = torch.cat([torch.ones(m, widest).tril().bool() for m in q_lens])
    causal[: starts[1]] = torch.rand(q_lens[0], widest) < 0.5
    masked = interpreter.attend(built, tree_mask=causal)
    for x, y in zip(interpreter.attend(built), masked, strict=True):
        assert torch.equal(x[starts[1] :], y[starts[1] :])
        assert not torch.equal(x[: starts[1]], y[: starts[1]])


def test_keys_of_a_long_chunk_are_split_when_queries_are_too_few_to_fill_the_machine(
    interpreter: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(q_lens=(24, 1), kv_lens=(600, 90), heads=(2, 1), window=500, sinks=True)
    counts: list[int] = []
    real = prefill.num_splits
    monkeypatch.setattr(
        prefill, "num_splits", lambda programs, _, tiles: counts.append(real(programs, 8, tiles)) or counts[-1]
    )
    interpreter.check(case)
    assert counts == [4]


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record launches without running them; a read of a tensor on the host fails.

    On a GPU such a read would wait for the device; in a captured graph it is not allowed.
    """
    launched: list[str] = []

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(self.fn.__name__)

    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the host has read a tensor")

    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", launch)
    for name in "item tolist numpy cpu __bool__ __int__ __float__ __index__ nonzero unique equal".split():
        monkeypatch.setattr(torch.Tensor, name, read)
    monkeypatch.setattr(torch, "equal", read)
    return launched


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({}, "_decode_kernel _merge_kernel"),
        ({"split_tokens": 256, "window": 300}, "_decode_kernel _merge_kernel"),
        ({"B": 1, "q_len": 64}, "_prefill_kernel"),
        ({"q_len": 64, "tree": True, "sinks": True}, "_decode_kernel _merge_kernel _prefill_kernel"),
        ({"kv": "k5v4/calibrated", "q_len": 4, "alibi": True, "softcap": 3.0}, "_decode_kernel _merge_kernel"),
    ],
    ids=str,
)
def test_the_host_reads_no_tensor_to_launch(changes: dict[str, Any], kernels: str, unreadable: list[str]) -> None:
    call = typical_call(H=8, K=2, **changes)
    backend.paged_attention(call)
    assert unreadable == kernels.split()
    new, ints = torch.empty(8, 2, 128), torch.zeros(8, dtype=torch.int64)
    angles = torch.zeros(64, 32), torch.zeros(64, 32)
    backend.write_kv(WriteCall(*call[:5], *angles, False, new, new, ints, ints))
    backend.copy_frames(torch.empty(8, 64), torch.zeros(4, 2, dtype=torch.int32))
    source = GatherSource(*call[:5], call.block_table, call.rows, call.seq_lens, call.seq_lens)
    starts, out = torch.zeros(len(call.seq_lens) + 1, dtype=torch.int64), torch.empty(8, 2, 128)
    backend.gather_kv(GatherCall(source, starts, out, out))
    assert unreadable[-4:] == ["_write_kernel", "_copy_kernel", "_copy_kernel", "_gather_kernel"]


def test_without_the_interpreter_the_refusal_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    built = Case().build()
    with pytest.raises(KernelUnavailable, match="it runs on GPUs; on the CPU only Triton's interpreter can"):
        paged_attention(built.q, built.layer, built.batch, backend="triton")


@pytest.mark.parametrize("arch", ["sm_87", "sm_103", "sm_121", "gfx90a", "gfx1100"])
def test_a_gpu_that_no_table_names_gets_tiles_that_fit_it(arch: str) -> None:
    on = tuning.Target(arch, 100)
    assert arch not in tuning._table()
    sizes = ((512, 128), (256, 128), (1024, 128), (1024, 256), (2176, 576))
    for kernel, (head_bytes, widest) in itertools.product(("decode", "prefill"), sizes):
        tuned = tuning.tuning(kernel, on, head_bytes, widest)
        tiles = tuned.stages - arch.startswith("gfx")  # AMD keeps one tile in registers
        assert tuned.programs * tiles * tuned.N * head_bytes <= on.shared
        assert tuned.N in (16, 32, 64)
        assert tuned.M in (16, 32, 64, 128)


def test_rotated_heads_are_refused_where_they_are_too_wide() -> None:
    case = registry.Case(kv_dtype="k8v4", head_dim=320, head_dim_v=64)
    assert "k8v4 heads of 320 elements" in specialisation.why_no_specialisation(case)[0]
    for served in (case._replace(kv_dtype="int8"), case._replace(head_dim=256)):
        assert not specialisation.why_no_specialisation(served)


def test_where_triton_is_missing_the_backend_says_so_and_another_serves() -> None:
    code = """
import importlib.util as u; find = u.find_spec
u.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
from pagedkv.kernels.registry import KERNELS, Case, resolve
assert resolve(Case()).name != "triton"
print(next(kernel for kernel in KERNELS if kernel.name == "triton").refuse(Case())[0])
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.startswith("triton is not installed")


@pytest.mark.parametrize(("heads", "narrow"), [((2, 2), True), pytest.param((8, 2), False, marks=pytest.mark.slow)])
def test_with_split_tokens_the_tuning_of_a_sequence_follows_from_its_own_rows(
    heads: tuple[int, int], narrow: bool, interpreter: Runner, monkeypatch: pytest.MonkeyPatch
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
