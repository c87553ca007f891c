"""The C++ kernels, one instruction set after the other: each keeps the contract alone, and none depends on how the work was cut."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import cpu, registry
from pagedkv.kernels.registry import Case as Asked
from tests.cases import GRID, SMALL, Case, empty_layer
from tests.kernels.conftest import Runner
from tests.kernels.oracle import allowed_error, oracle, same_precision
from tests.kernels.test_write import SLOTS, batch_of

if TYPE_CHECKING:
    from torch import Tensor

if cpu._cpu is None:
    pytest.skip(registry.KERNELS[0].refuse(Asked())[0], allow_module_level=True)

SETS = cpu._cpu.sets()
ON_CPU = Runner("cpu", "cpu")
EVERY_PART = Case(q_lens=(1, 33, 4, 1), kv_lens=(3000, 577, 700, 5), heads=(8, 2), dtype="bfloat16")
"""Enough keys to be cut, rows enough for several tiles."""


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PAGEDKV_CPU_ISA", request.param)
    return str(request.param)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(case, marks=pytest.mark.slow) for case in GRID)], ids=str)
def test_each_instruction_set_keeps_the_contract(case: Case) -> None:
    built = case.build()
    exact, plain = oracle(built), same_precision(built)
    out, lse = (x.double().numpy()[: sum(case.q_lens)] for x in ON_CPU.attend(built))
    seen = ~np.isneginf(exact.lse[: len(lse)])
    assert np.abs(out - exact.out[: len(out)]).max(initial=0.0) <= allowed_error(case, exact.out, plain.out)
    assert (np.isneginf(lse) == ~seen).all()
    right, low = exact.lse[: len(lse)][seen], plain.lse[: len(lse)][seen]
    assert np.abs(lse[seen] - right).max(initial=0.0) <= allowed_error(case, right, low)


def attend_with(threads: int, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
    return ON_CPU.attend(case.build())


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("split_tokens", [16, 100, 4096])
def test_with_split_tokens_the_number_of_threads_changes_no_bit(split_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(EVERY_PART, split_tokens=split_tokens)
    alone, alone_lse = attend_with(1, case, monkeypatch)
    for threads in (2, 3, 8):
        out, lse = attend_with(threads, case, monkeypatch)
        assert torch.equal(out, alone)
        assert torch.equal(lse, alone_lse)


@pytest.mark.parametrize("threads", [2, 5])
def test_keys_cut_for_threads_give_what_one_thread_gives(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(EVERY_PART, dtype="float32", window=2000, sinks=True)
    (out, lse), (alone, alone_lse) = (attend_with(n, case, monkeypatch) for n in (threads, 1))
    assert (out - alone).abs().max() <= 2e-6
    assert (lse - alone_lse).abs().max() <= 1e-5


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kv", ["float32", "bfloat16", "float16", "fp8_e4m3/tensor", "fp8_e5m2/token_head", "int8/tensor", "int8/token_head", "int4/token_head"]
)
def test_what_is_written_has_the_bits_that_the_reference_writes(kv: str, dtype: torch.dtype) -> None:
    plain = "/" not in kv
    case = Case(dtype=kv if plain else "float32", kv="" if plain else kv, dims=(64, 80), layout="HND")
    spread = torch.cat([torch.randn(7, 2, 72), torch.randn(7, 2, 72) * 1e-2, torch.full((7, 2, 16), 1e3)], -1)  # subnormals, saturation
    k, v = (x.to(dtype) for x in spread[..., torch.randperm(160)[:144]].split((64, 80), -1))
    layers = [empty_layer(case, 4) for _ in range(2)]
    for layer, backend in zip(layers, ("cpu", "reference"), strict=True):
        write_kv(k, v, layer, batch_of(SLOTS), backend=backend)
    at = [slot for slot in SLOTS if slot >= 0]
    for name in ("k", "v", "k_scale", "v_scale"):
        ours, theirs = (getattr(layer, name) for layer in layers)
        if ours is not None and ours.dim() > 0:
            ours, theirs = (x.contiguous().view(torch.uint8).flatten(0, 1)[at] for x in (ours, theirs))
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("softcap", [1.0, 50.0, 1e4])
def test_a_soft_cap_is_exact_for_small_and_large_scores(softcap: float) -> None:
    case = Case(softcap=softcap)
    for size in (1e-3, 1.0, 30.0):
        built = case.build()
        built = built._replace(q=built.q * size)
        out = ON_CPU.attend(built)[0].double().numpy()
        assert np.abs(out - oracle(built).out).max() <= allowed_error(case, oracle(built).out, same_precision(built).out)


def test_nan_in_a_key_or_a_query_is_not_hidden() -> None:
    built = Case(q_lens=(1, 1), kv_lens=(40, 40)).build()
    page, slot = int(built.batch.block_table[0, 1]), 3
    built.layer.k[page, slot, 0] = torch.nan
    out, lse = ON_CPU.attend(built)
    assert out[0, :2].isnan().all()  # the heads of kv head 0
    assert lse[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


def test_a_float64_query_is_refused_with_the_reason() -> None:
    built = Case().build()
    with pytest.raises(KernelUnavailable, match="q is float64; it takes float32, bfloat16, float16"):
        paged_attention(built.q.double(), built.layer, built.batch, backend="cpu")


def test_an_unknown_instruction_set_is_answered_with_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_CPU_ISA", "avx1024")
    with pytest.raises(InvalidRequest, match="PAGEDKV_CPU_ISA is 'avx1024'; this processor and build have: .*portable"):
        ON_CPU.attend(Case().build())


def test_without_the_extension_the_backend_objects_and_another_serves() -> None:
    code = """
import sys
sys.modules["pagedkv.kernels._cpu"] = None
from pagedkv.kernels.registry import KERNELS, Case, resolve
assert resolve(Case()).name != "cpu"
print(KERNELS[0].refuse(Case())[0])
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.startswith("the extension is not built: ")


def test_threads_are_torchs_own_where_it_has_openmp() -> None:
    assert cpu._cpu is not None
    assert cpu._cpu.runtime() == ("OpenMP" if "OpenMP" in torch.__config__.parallel_info().partition("parallel backend:")[2] else "threads")
