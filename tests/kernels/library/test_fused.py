"""The fused kernels of the backend "library" in Triton's interpreter, compared with torch's operations.

_present_kernel       tables without holes, tokens that are there, sequences that are lost
_starts_kernel        where each sequence begins in packed rows
_store_states_kernel  one state or two, stored where a token belongs to a sequence; sequences with NaN are marked
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedkv.kernels.library import backend
from tests.cases import Case, call_of
from tests.kernels.conftest import INTERPRETS
from tests.kernels.library.test_library import LIBRARY
from tests.kernels.library.test_products import CHUNK, SQUARE, by_cudnn

if not INTERPRETS:
    pytest.skip("Triton is not installed, or its kernels belong to the GPU", allow_module_level=True)

from pagedkv.kernels.triton import backend as triton_backend
from pagedkv.kernels.triton import gather

__all__ = ["by_cudnn"]
pytestmark = pytest.mark.usefixtures("interpreter")

ABSURD = 2**31 - 1
MIXED = Case(q_lens=(33, 1, 0, 20, 5), kv_lens=(150, 40, 9, 20, 64), heads=(8, 2), dtype="bfloat16", padding=3)


def both(call: Any, prefix: int | None) -> tuple[Any, Any]:
    """Return what torch and what the kernel find: (pages that are there, tokens, 0, whether it is lost) of each
    sequence."""
    found = backend._present(call, prefix)
    table, rest = triton_backend.present(call, prefix)
    return listed(call, found.table, *found[1:]), listed(call, table, *rest)


def listed(call: Any, table: Any, lens: Any, zeros: Any, lost: Any) -> list[Any]:
    S = call.k.shape[1]
    numbers = zip(table.tolist(), lens.tolist(), zeros.tolist(), lost.tolist(), strict=True)
    return [(row[: -(-n // S)], n, zero, is_lost) for row, n, zero, is_lost in numbers]


def third(*values: Sequence[Any]) -> list[Any]:
    """Return all combinations. Two of three are slow."""
    return [
        pytest.param(*(value for _, value in each), marks=[pytest.mark.slow] * (sum(n for n, _ in each) % 3 > 0))
        for each in itertools.product(*map(enumerate, values))
    ]


@pytest.mark.parametrize(("prefix", "rows", "block_size"), third([None, 0, 20], [False, True], [1, 16, 24]))
def test_tables_without_holes_are_those_of_torch(
    prefix: int | None, rows: bool, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather._present_kernel, "run", small_blocks(gather._present_kernel.run))
    call = call_of(replace(MIXED, block_size=block_size, rows=rows).build())
    table, choose = call.block_table, torch.Generator().manual_seed(1)
    for share, window in ((0.0, None), (0.3, None), (0.3, 20), (1.0, 2**40)):
        holes = torch.rand(table.shape, generator=choose) < share
        batch = call._replace(block_table=torch.where(holes & (table != ABSURD), -1, table), window=window)
        by_torch, by_kernel = both(batch, prefix)
        assert by_kernel == by_torch
        assert any(lost for *_, lost in by_torch) or not share


def small_blocks(run: Any) -> Any:
    """Return a launch with blocks of 4 pages, so that a table takes several."""
    return lambda *arguments, **named: run(*arguments, **(named | {"BLOCK": 4}))


@pytest.mark.parametrize("lens", [[5], [0, 3, 0, 7], [1] * 2500])
def test_starts_are_sums_of_the_lengths(lens: list[int]) -> None:
    wide, narrow = triton_backend.starts_of(torch.tensor(lens, dtype=torch.int32))
    sums = torch.tensor([0, *lens]).cumsum(0)
    assert wide.equal(sums)
    assert narrow.equal(sums.int())


def state_of(call: Any, parts: int, seed: int, layout: str) -> tuple[Any, Any]:
    """Return a random state [X, N, H, D], [X, N, H] with the strides of torch's libraries."""
    choose = torch.Generator().manual_seed(seed)
    T, H, D = call.q.shape
    shape = (parts, T // parts + 2, H, D)
    if layout == "heads first":
        out = torch.randn(parts, H, shape[1], D, generator=choose).transpose(1, 2)
    else:
        out = torch.randn(shape, generator=choose)
    lse = torch.randn(parts, H, shape[1], generator=choose).transpose(1, 2) * 3
    return out.to(call.q.dtype)[:, 1:-1], lse[:, 1:-1]


SHAPES = [("bfloat16", (8, 2), 128), ("float16", (5, 1), 80), ("bfloat16", (3, 3), 256)]


@pytest.mark.parametrize(("shape", "num_states", "layout"), third(SHAPES, [1, 2], ["heads first", "tokens first"]))
def test_states_are_stored_as_torch_stores_them(
    shape: tuple[str, tuple[int, int], int], num_states: int, layout: str
) -> None:
    dtype, heads, dim = shape
    case = replace(MIXED, heads=heads, dims=(dim, dim), dtype=dtype, padding=2)
    call = call_of(case.build())
    T = call.q.shape[0]
    parts = next(x for x in (3, 2, 1) if T % x == 0)
    states = [state_of(call, parts, seed, layout) for seed in range(num_states)]
    states[0][1][:, 3] = -torch.inf  # rows of which the first state saw no key
    states[0][0][:, 3] = torch.nan
    if num_states == 1:
        states[0][0][:, 3] = 0
    for out, lse in states:  # the last rows are padding
        out.view(parts, -1, *out.shape[2:])[-1, -2:] = torch.nan
        lse[-1, -2:] = torch.nan
    # sequences: NaN in a result; no keys, and garbage; NaN in one element
    at = [33, 34]
    states[0][0][at[0] // (T // parts), at[0] % (T // parts)] = torch.nan
    lens = torch.tensor([150, 40, 9, 20, 64], dtype=torch.int32)
    lens[3] = 0
    states[-1][0][(T - 3) // (T // parts), (T - 3) % (T // parts), heads[0] - 1, dim - 1] = torch.nan
    results = []
    for store in (backend._store, lambda call, states, found: triton_backend.store_states(call, states, *found[1::2])):
        call.out.fill_(7), call.lse.fill_(7)
        found = backend._Present(lens, lens, lens, torch.tensor([0, 0, 5, 0, 0], dtype=torch.int32))
        store(call, states, found)
        results.append((call.out.clone(), call.lse.clone(), found.doubtful))
    (out, lse, doubtful), (by_kernel, lse_by_kernel, doubtful_by_kernel) = results
    assert doubtful.tolist() == doubtful_by_kernel.tolist() == [0, 1, 5, 0, 1]
    assert (by_kernel[-2:] == 7).all()
    assert (lse_by_kernel[-2:] == 7).all()
    assert (by_kernel[34:54] == 0).all()
    assert lse_by_kernel[34:54].eq(-torch.inf).all()
    assert torch.allclose(lse_by_kernel, lse, atol=1e-5, equal_nan=True)
    if num_states == 1:
        assert torch.equal(by_kernel.nan_to_num(9), out.nan_to_num(9))
    else:
        one_bit = 2.0 ** (-8 if dtype == "bfloat16" else -11)
        assert torch.allclose(by_kernel.float(), out.float(), rtol=2 * one_bit, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("weak", "number"), third([0, 1], [torch.nan, torch.inf, -torch.inf]))
def test_a_state_that_is_not_finite_marks_its_sequence_even_with_a_weight_of_0(weak: int, number: float) -> None:
    call = call_of(replace(MIXED, padding=2).build())
    states = [state_of(call, 1, seed, "tokens first") for seed in range(2)]
    states[weak][1].sub_(300)
    states[weak][0][0, [20, 58, 60], 3, 5] = number  # of sequences 0 and 4, and of padding
    lens = torch.tensor([150, 40, 9, 20, 0], dtype=torch.int32)
    for store in (backend._store, lambda call, states, found: triton_backend.store_states(call, states, *found[1::2])):
        found = backend._Present(lens, lens, lens, torch.zeros(5, dtype=torch.int32))
        store(call, states, found)
        assert found.doubtful.tolist() == [1, 0, 0, 0, 0]
        assert call.out[:59].isfinite().all()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's kernels under the interpreter take the place of torch's operations, as on a GPU."""
    monkeypatch.setattr(backend.checks, "table_values", lambda call: None)
    monkeypatch.setattr(backend, "_on_host", lambda call: False)
    monkeypatch.setattr(backend, "_triton", lambda name: triton_backend)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SQUARE, marks=pytest.mark.slow),
        pytest.param(CHUNK, marks=pytest.mark.slow),
        pytest.param(replace(CHUNK, q_lens=(48,), kv_lens=(160,), dtype="float16", rows=True), marks=pytest.mark.slow),
        replace(SQUARE, q_lens=(40, 37), kv_lens=(40, 37), padding=3),
        pytest.param(replace(CHUNK, punched=True), marks=pytest.mark.slow),
        pytest.param(replace(SQUARE, kv="fp8_e4m3/tensor", rows=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.usefixtures("fused")
def test_the_code_for_a_gpu_keeps_the_contract_with_the_fused_kernels(case: Case, by_cudnn: list[Any]) -> None:
    LIBRARY.check(case)
    assert by_cudnn
