"""The numba kernels: what is theirs alone, beside the grid and the laws that every backend keeps."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention, write_kv
from pagedkv.kernels import elements, numba
from tests.cases import Case, empty_layer
from tests.kernels.conftest import Runner
from tests.kernels.oracle import allowed_error, oracle, same_precision
from tests.kernels.test_write import SLOTS, batch_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NUMBA = Runner("numba", "cpu")
EVERY_PART = Case(q_lens=(1, 33, 4, 1), kv_lens=(3000, 577, 700, 5), heads=(8, 2), dtype="bfloat16")
"""Enough keys to be cut, rows enough for several tiles."""


def attend_with(threads: int, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
    return NUMBA.attend(case.build())


@pytest.fixture(params=["OpenMP", "Python threads"])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python threads":
        monkeypatch.setattr(numba, "_openmp", lambda: None)
    elif numba._openmp() is None:
        pytest.skip("no OpenMP runtime in this process")


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("split_tokens", [16, 100, 4096])
def test_with_split_tokens_the_number_of_threads_changes_no_bit(split_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(EVERY_PART, split_tokens=split_tokens)
    alone, alone_lse = attend_with(1, case, monkeypatch)
    for threads in (2, 3, 8):
        out, lse = attend_with(threads, case, monkeypatch)
        assert torch.equal(out, alone)
        assert torch.equal(lse, alone_lse)


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("threads", [2, 5])
def test_keys_cut_for_threads_give_what_one_thread_gives(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(EVERY_PART, dtype="float32", window=2000, sinks=True)
    (out, lse), (alone, alone_lse) = (attend_with(n, case, monkeypatch) for n in (threads, 1))
    assert (out - alone).abs().max() <= 2e-6
    assert (lse - alone_lse).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kv", ["float32", "bfloat16", "float16", "fp8_e4m3/tensor", "fp8_e5m2/token_head", "int8/token_head", "int4/token_head"]
)
def test_what_is_written_has_the_bits_that_the_reference_writes(kv: str, dtype: torch.dtype) -> None:
    plain = "/" not in kv
    case = Case(dtype=kv if plain else "float32", kv="" if plain else kv, dims=(64, 80), layout="HND")
    spread = torch.cat([torch.randn(7, 2, 72), torch.randn(7, 2, 72) * 1e-2, torch.full((7, 2, 16), 1e3)], -1)  # subnormals, saturation
    k, v = (x.to(dtype) for x in spread[..., torch.randperm(160)[:144]].split((64, 80), -1))
    layers = [empty_layer(case, 4) for _ in range(2)]
    for layer, backend in zip(layers, ("numba", "reference"), strict=True):
        write_kv(k, v, layer, batch_of(SLOTS), backend=backend)
    at = [slot for slot in SLOTS if slot >= 0]
    for name in ("k", "v", "k_scale", "v_scale"):
        ours, theirs = (getattr(layer, name) for layer in layers)
        if ours is not None and ours.dim() > 0:
            ours, theirs = (x.contiguous().view(torch.uint8).flatten(0, 1)[at] for x in (ours, theirs))
            assert torch.equal(ours, theirs), name


def test_a_write_of_many_tokens_is_cut_without_losing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_NUM_THREADS", "3")
    layer = empty_layer(Case(dtype="bfloat16"), 64)
    k, slots = torch.randn(1000, 2, 64).bfloat16(), torch.randperm(1024)[:1000]
    write_kv(k, k, layer, batch_of(slots.tolist()), backend="numba")
    assert torch.equal(layer.k.flatten(0, 1)[slots], k)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float8_e4m3fn, elements.E4M3), (torch.float8_e5m2, elements.E5M2)])
def test_every_fp8_byte_has_torchs_value(dtype: torch.dtype, kind: int) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(elements.FP8[kind - elements.E4M3], values)


@pytest.mark.parametrize(
    ("dtype", "there", "back"),
    [(torch.float16, elements._to_half, elements._of_half), (torch.bfloat16, elements._to_bfloat, None)],
)
def test_two_byte_floats_round_as_torch_does(dtype: torch.dtype, there: Callable[..., int], back: Callable[..., float] | None) -> None:
    bits = torch.randint(-(2**31), 2**31, (20_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.9, 65520.0, 6.1e-5, 5.96e-8, 2.98e-8, 2.99e-8])
    x = torch.cat([bits.view(torch.float32), edges, -edges])
    stored = torch.tensor([int(there(np.float32(value))) for value in x.numpy()], dtype=torch.int32).to(torch.uint16).view(dtype)
    right = x.to(dtype)
    assert torch.equal(stored.isnan(), right.isnan())
    assert torch.equal(stored[~right.isnan()].view(torch.int16), right[~right.isnan()].view(torch.int16))
    if back is not None:
        read = [back(np.uint16(code)) for code in range(65536)]
        np.testing.assert_array_equal(read, torch.arange(65536).to(torch.uint16).view(dtype).float().numpy())


@pytest.mark.parametrize("softcap", [1.0, 50.0, 1e4])
def test_a_soft_cap_is_exact_for_small_and_large_scores(softcap: float) -> None:
    case = Case(softcap=softcap)
    for size in (1e-3, 1.0, 30.0):
        built = case.build()
        built = built._replace(q=built.q * size)
        out = NUMBA.attend(built)[0].double().numpy()
        assert np.abs(out - oracle(built).out).max() <= allowed_error(case, oracle(built).out, same_precision(built).out)


def test_nan_in_a_key_is_not_hidden() -> None:
    built = Case(q_lens=(1, 1), kv_lens=(40, 40)).build()
    built.layer.k[int(built.batch.block_table[0, 1]), 3, 0] = torch.nan
    out, lse = NUMBA.attend(built)
    assert out[0, :2].isnan().all()  # the heads of kv head 0
    assert lse[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()
    assert out[1].isfinite().all()


def test_a_float64_query_is_refused_with_the_reason() -> None:
    built = Case().build()
    with pytest.raises(KernelUnavailable, match="q is float64; it takes float32, bfloat16, float16"):
        paged_attention(built.q.double(), built.layer, built.batch, backend="numba")


def test_without_the_extension_numba_serves() -> None:
    code = """
import sys
sys.modules["pagedkv.kernels._cpu"] = None
from pagedkv.kernels.registry import Case, resolve
print(resolve(Case()).name, "numba" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.split() == ["numba", "False"]  # and asking whether it can does not import it
