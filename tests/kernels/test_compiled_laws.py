"""The promises of the compiled backends beyond the contract: no bit depends on threads, what is written has the
reference's bits.

`cpu` keeps it with each instruction set, `numba` on either team of threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention, write_kv
from pagedkv.kernels import cpu, numba
from tests.cases import Case, empty_layer
from tests.kernels import test_write
from tests.kernels.conftest import Runner
from tests.kernels.oracle import allowed_error, oracle, same_precision
from tests.kernels.test_write import SLOTS, batch_of

if TYPE_CHECKING:
    from torch import Tensor

EVERY_PART = Case(q_lens=(1, 33, 4, 1), kv_lens=(3000, 577, 700, 5), heads=(8, 2), dtype="bfloat16")
"""Enough keys to be cut, rows enough for several tiles."""

test_nan_is_stored_as_nan_or_as_zero = (
    test_write.test_nan_is_stored_as_nan_or_as_zero_by_integers_whose_scale_then_is_nan
)

WAYS = [
    *(("cpu", isa) for isa in (cpu._cpu.sets() if cpu._cpu else ())),
    ("numba", "OpenMP"),
    ("numba", "Python threads"),
]


@pytest.fixture(params=WAYS, ids="-".join)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner:
    backend, way = request.param
    if backend == "cpu":
        monkeypatch.setenv("PAGEDKV_CPU_ISA", way)
    elif way == "Python threads":
        monkeypatch.setattr(numba, "_openmp", lambda: None)
    elif numba._openmp() is None:
        pytest.skip("no OpenMP runtime in this process")
    return Runner(backend, "cpu")


def attend_with(threads: int, runner: Runner, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
    return runner.attend(case.build())


@pytest.mark.parametrize("split_tokens", [16, 100, 4096])
def test_with_split_tokens_the_number_of_threads_changes_no_bit(
    runner: Runner, split_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(EVERY_PART, split_tokens=split_tokens)
    alone, alone_lse = attend_with(1, runner, case, monkeypatch)
    for threads in (2, 3, 8):
        out, lse = attend_with(threads, runner, case, monkeypatch)
        assert torch.equal(out, alone)
        assert torch.equal(lse, alone_lse)


@pytest.mark.parametrize("threads", [2, 5])
def test_keys_cut_for_threads_give_what_one_thread_gives(
    runner: Runner, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(EVERY_PART, dtype="float32", window=2000, sinks=True)
    (out, lse), (alone, alone_lse) = (attend_with(n, runner, case, monkeypatch) for n in (threads, 1))
    assert (out - alone).abs().max() <= 2e-6
    assert (lse - alone_lse).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kv",
    [
        "float32",
        "bfloat16",
        "float16",
        "fp8_e4m3/tensor",
        "fp8_e5m2/token_head",
        "int8/tensor",
        "int8/token_head",
        "int4/token_head",
    ],
)
def test_what_is_written_has_the_bits_that_the_reference_writes(runner: Runner, kv: str, dtype: torch.dtype) -> None:
    plain = "/" not in kv
    case = Case(dtype=kv if plain else "float32", kv="" if plain else kv, dims=(64, 80), layout="HND")
    spread = torch.cat(
        [torch.randn(7, 2, 72), torch.randn(7, 2, 72) * 1e-2, torch.full((7, 2, 16), 1e3)], -1
    )  # subnormals, saturation
    k, v = (x.to(dtype) for x in spread[..., torch.randperm(160)[:144]].split((64, 80), -1))
    layers = [empty_layer(case, 4) for _ in range(2)]
    for layer, backend in zip(layers, (runner.backend, "reference"), strict=True):
        write_kv(k, v, layer, batch_of(SLOTS), backend=backend)
    at = [slot for slot in SLOTS if slot >= 0]
    for name in ("k", "v", "k_scale", "v_scale"):
        ours, theirs = (getattr(layer, name) for layer in layers)
        if ours is not None and ours.dim() > 0:
            ours, theirs = (x.contiguous().view(torch.uint8).flatten(0, 1)[at] for x in (ours, theirs))
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("softcap", [1.0, 50.0, 1e4])
def test_a_soft_cap_is_exact_for_small_and_large_scores(runner: Runner, softcap: float) -> None:
    case = Case(softcap=softcap)
    for size in (1e-3, 1.0, 30.0):
        built = case.build()
        built = built._replace(q=built.q * size)
        out = runner.attend(built)[0].double().numpy()
        assert np.abs(out - oracle(built).out).max() <= allowed_error(
            case, oracle(built).out, same_precision(built).out
        )


def test_nan_in_a_key_or_a_query_is_not_hidden(runner: Runner) -> None:
    built = Case(q_lens=(1, 1), kv_lens=(40, 40)).build()
    page, slot = int(built.batch.block_table[0, 1]), 3
    built.layer.k[page, slot, 0] = torch.nan
    out, lse = runner.attend(built)
    assert out[0, :2].isnan().all()  # the heads of kv head 0
    assert lse[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


def test_a_float64_query_is_refused_with_the_reason(runner: Runner) -> None:
    built = Case().build()
    with pytest.raises(KernelUnavailable, match="q is float64; it takes float32, bfloat16, float16"):
        paged_attention(built.q.double(), built.layer, built.batch, backend=runner.backend)
