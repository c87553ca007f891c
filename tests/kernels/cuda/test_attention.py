"""The attention kernel keeps the contract: on the shared grid of cases, memory poisoned, in the emulator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.kernels import reference, registry
from pagedkv.kernels.cuda import attention, backend
from tests.cases import GRID, LARGE, SMALL, Case, call_of
from tests.kernels import by_hand
from tests.kernels.cuda.emulator import COMPILER, Emulator
from tests.kernels.oracle import allowed_error, oracle, same_precision

pytestmark = pytest.mark.skipif(not COMPILER, reason="the emulator needs g++")


def served(case: Case) -> bool:
    """Return whether the registry would give this case to the kernel, on a machine with a GPU."""
    return not backend.case_objections(registry.Case(dtype=case.dtype, head_dim=case.dims[0], head_dim_v=case.dims[1]))


def test_every_case_of_the_shared_grid_is_served() -> None:
    assert all(served(case) for case in (*SMALL, *GRID, *LARGE))


SERVED = [case for case in (*SMALL, *GRID, *LARGE) if served(case)]
LATENT = [case for case in SMALL if case.layout == "mla"]
SHORT = [case for case in (*SMALL, *GRID) if served(case) and sum(case.kv_lens) < 3000]
SAMPLE = [LATENT[0], *random.Random(0).sample(SHORT, 11)]
"""The cases of `make test`. Wide latent heads are among them."""


def check(case: Case, machine: Emulator, sharpness: float = 1.0) -> None:
    """Compare with the oracle. sharpness: a factor of all scores; a real model's are sharper than random ones."""
    built = case.build()
    built.q.mul_(sharpness)
    call = call_of(built)
    machine.attend(call)
    exact, plain, rows = oracle(built), same_precision(built), sum(case.q_lens)
    out, lse = call.out.double().numpy(), call.lse.double().numpy()
    assert np.isnan(out[rows:]).all(), "rows of padding are written"
    blind = np.isneginf(exact.lse[:rows])
    assert (np.isneginf(lse[:rows]) == blind).all()
    assert (out[:rows][blind] == 0).all()
    for name, got, want, low in (("out", out, exact.out, plain.out), ("lse", lse, exact.lse, plain.lse)):
        finite = np.isfinite(want[:rows])
        error = np.abs(got[:rows][finite] - want[:rows][finite]).max(initial=0.0)
        allowed = allowed_error(case, want[:rows], low[:rows])
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in SAMPLE else [pytest.mark.slow]) for case in SERVED], ids=str
)
def test_out_and_lse_are_as_accurate_as_plain_torch(case: Case) -> None:
    check(case, Emulator())


LONG = Case(q_lens=(1, 1), kv_lens=(1500, 900), heads=(4, 1), dtype="bfloat16", layout="HND")


@pytest.mark.parametrize(
    ("case", "num_sms"),
    [
        (LONG, 2),
        *(pytest.param(replace(LONG, kv=kv), 2, marks=pytest.mark.slow) for kv in ("fp8_e4m3", "int8/token_head")),
        pytest.param(replace(LONG, dims=(128, 128), split_tokens=512), 2, marks=pytest.mark.slow),
        *(
            pytest.param(
                Case((1, 5), (32768, 700), heads=(8, 1), dims=(128, 128), dtype="bfloat16", kv=kv, layout="HND"),
                16,
                marks=pytest.mark.slow,
            )
            for kv in ("", "fp8_e4m3/token_head")
        ),
    ],
    ids=str,
)
def test_long_contexts_with_sharp_scores_are_as_accurate_in_several_pieces(case: Case, num_sms: int) -> None:
    """Each CTA goes several times round its stages, and units have several pieces."""
    check(case, Emulator(num_sms), sharpness=6.0)


def test_the_order_of_ctas_and_threads_changes_no_bit_of_a_merge() -> None:
    call, results = call_of(replace(LONG, kv_lens=(500, 90)).build()), []
    for seed in range(4):
        Emulator(4, seed=seed).attend(call)
        results.append((call.out.clone(), call.lse.clone()))
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def has_several_wide_teams(kernel: Any) -> bool:
    """Return whether a CTA of this kernel has several teams of several warps."""
    return kernel.warps_m * kernel.warps_d > 1 and kernel.warps_n > 1


@pytest.mark.parametrize(
    "case",
    [
        Case((5,), (70,), heads=(8, 2)),
        Case((1,), (70,), dims=(192, 128)),
        pytest.param(LATENT[0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_team_of_several_warps_is_as_accurate(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """racecheck runs such kernels, see docs/explanation/cuda-kernels.md."""
    machine = Emulator()
    launches = attention._launches_of(call_of(case.build()), machine)
    assert any(has_several_wide_teams(launch.kernel) for launch in launches)
    monkeypatch.setattr(attention, "specialise", attention.specialise)  # the code's own, after the test
    by_hand.use_one_team()
    check(case, machine)
    assert machine.launches
    assert not any(map(has_several_wide_teams, machine.launches))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv", ["fp8_e4m3", "fp8_e5m2"])
def test_every_code_of_8_bits_is_read_as_torch_reads_it_and_nan_stays_nan(kv: str, dtype: str) -> None:
    """The value of a single key is the result, which shows how each code is read, infinities and NaN included."""
    built = Case(q_lens=(1, 1), kv_lens=(1, 1), heads=(1, 1), dims=(128, 128), kv=kv, dtype=dtype).build()
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(built.layer.v.dtype)
    frames = built.batch.block_table[: len(codes), 0].long()
    built.layer.k.view(torch.uint8).zero_()
    built.layer.v[frames, 0, 0] = codes
    call = call_of(built)
    Emulator().attend(call)
    scale = 1.0 if built.layer.v_scale is None else float(built.layer.v_scale)
    out, expected = call.out[:2, 0].float(), (codes.float() * scale).to(call.out.dtype).float()
    finite = codes.float().isfinite()
    assert not finite.all()
    assert torch.equal(out.isfinite(), expected.isfinite())
    assert torch.equal(out[expected.isfinite()], expected[expected.isfinite()])


@pytest.mark.parametrize("kv", ["fp8_e4m3", "int8/token_head"])
def test_many_weights_far_below_the_largest_still_count(kv: str) -> None:
    """The first of many keys may take nearly the whole softmax. Float16 has no number for the others' weights."""
    built = Case(q_lens=(1,), kv_lens=(100,), heads=(1, 1), dims=(128, 128), kv=kv, dtype="bfloat16").build()
    pages, (k, v, k_scale, v_scale) = built.batch.block_table[0, :7].long(), vars(built.layer).values()
    built.q.zero_()[0, 0, 0] = 128**0.5
    k[pages] = torch.zeros(()).to(k.dtype)
    k[pages[0], 0, 0, 0] = torch.tensor(20.0).to(k.dtype)
    v[pages] = torch.ones(()).to(v.dtype)
    v[pages[0], 0] = torch.zeros(()).to(v.dtype)
    for scale in (k_scale, v_scale):
        if scale is not None:
            scale[pages] = 1.0
    call = call_of(built)
    Emulator().attend(call)
    weight = np.exp(-20.0)
    assert torch.allclose(call.out.float(), torch.tensor(99 * weight / (1 + 99 * weight)).float(), rtol=2**-7)


@pytest.mark.parametrize(("keys", "split_tokens"), [(0, None), (40, None), (400, None), (400, 64)])
def test_an_infinite_sink_takes_the_whole_weight(keys: int, split_tokens: int | None) -> None:
    """One CTA, several CTAs or chunks write the result. A sink of +inf leaves zeros; a sink of -inf changes nothing."""
    built = Case(
        q_lens=(1,), kv_lens=(keys,), dims=(64, 64), dtype="bfloat16", sinks=True, split_tokens=split_tokens
    ).build()
    sinks = torch.tensor([torch.inf, -torch.inf, 0.5, torch.inf])
    call, expected = call_of(built, sinks=sinks), call_of(built, sinks=sinks)
    Emulator(8).attend(call)
    reference.paged_attention(expected)
    assert torch.equal(call.lse[0] == torch.inf, sinks == torch.inf)
    assert (call.out[0, sinks == torch.inf] == 0).all()
    assert torch.allclose(call.out, expected.out, rtol=2**-7, atol=2**-10)
    assert torch.allclose(call.lse, expected.lse, atol=1e-3)


@pytest.mark.parametrize("kv", ["", "fp8_e4m3"])
def test_a_nan_key_makes_its_own_sequence_nan_and_no_other(kv: str) -> None:
    built = Case(q_lens=(1, 1), kv_lens=(40, 40), heads=(2, 1), dims=(64, 64), kv=kv, dtype="bfloat16").build()
    built.layer.k.view(torch.uint8 if kv else torch.int16)[built.batch.block_table[0, 0], 3, 0, 5] = (
        0x7F if kv else 0x7FC0
    )
    call = call_of(built)
    Emulator().attend(call)
    assert call.out[0].isnan().all()
    assert call.lse[0].isnan().all()
    assert call.out[1].isfinite().all()
    assert call.lse[1].isfinite().all()
