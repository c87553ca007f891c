"""Two states become one as float64 has it: of any strides, whatever unused memory holds, on each instruction set."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import merge_states
from pagedkv.kernels import cpu
from tests.kernels.test_properties import examples

if TYPE_CHECKING:
    from torch import Tensor

WAYS = [("reference", ""), *(("cpu", isa) for isa in (cpu._cpu.sets() if cpu._cpu else ()))]
HALF_STEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The relative error of rounding to the type."""
LEAST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}
"""And at most, where numbers are subnormal."""
INF, NAN = torch.inf, torch.nan


class States(NamedTuple):
    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    backend, isa = request.param
    monkeypatch.setenv("PAGEDKV_KERNELS", backend)
    if isa:
        monkeypatch.setenv("PAGEDKV_CPU_ISA", isa)
    return str(backend)


def states(shape: tuple[int, int, int], dtype: torch.dtype, spread: float = 5.0) -> States:
    """Two states of which some rows saw nothing, and have NaN then."""
    parts = []
    for _ in range(2):
        out, lse = torch.randn(shape).to(dtype), torch.randn(shape[:2]) * spread
        blind = torch.rand(shape[:2]) < 0.2
        lse[blind], out[blind] = -INF, NAN
        parts += [out, lse]
    return States(*parts)


def strided(x: Tensor, order: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    """Equal to `x`, with its dims in memory in this order, this many elements apart, and NaN between them."""
    sizes = [x.shape[d] * steps[d] for d in order]
    view = torch.full(sizes, NAN).to(x.dtype).permute([order.index(d) for d in range(x.dim())])
    view = view[tuple(slice(None, None, step) for step in steps)]
    view.copy_(x)
    return view


def keep_the_contract(given: States) -> None:
    out, lse = merge_states(*given)
    assert (out.shape, out.dtype, out.is_contiguous()) == (given.out_a.shape, given.out_a.dtype, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == (given.lse_a.shape, torch.float32, True)
    a, b = (x.double().numpy() for x in (given.lse_a, given.lse_b))
    exact = np.logaddexp(a, b)
    with np.errstate(invalid="ignore"):
        weights = [np.where(np.isneginf(x), 0.0, np.exp(x - exact))[..., None] for x in (a, b)]
        parts = [
            np.where(w == 0, 0.0, x.double().numpy() * w)
            for x, w in zip((given.out_a, given.out_b), weights, strict=True)
        ]
    size, blind = abs(parts[0]) + abs(parts[1]), np.isneginf(exact)
    allowed = (HALF_STEP[out.dtype] + 2e-6) * size + LEAST[out.dtype] + 1e-30
    assert (np.abs(out.double().numpy() - (parts[0] + parts[1])) <= allowed).all()
    assert (np.isneginf(lse.numpy()) == blind).all()
    seen = exact[~blind]
    assert (np.abs(lse.double().numpy()[~blind] - seen) <= 1e-6 + 2e-7 * np.abs(seen)).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("spread", [0.1, 5.0, 200.0])
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 2, 64), (2, 5, 80), (4, 1, 257), (1, 3, 576), (0, 2, 64), (2, 0, 64), (2, 3, 0)], ids=str
)
def test_two_states_become_what_float64_says(shape: tuple[int, int, int], dtype: torch.dtype, spread: float) -> None:
    keep_the_contract(states(shape, dtype, spread))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)], ids=str)
def test_states_are_read_where_they_lie(dtype: torch.dtype, order: tuple[int, int, int]) -> None:
    a, lse_a, b, lse_b = states((5, 3, 70), dtype)
    keep_the_contract(States(strided(a, order, (2, 1, 1)), strided(lse_a, (1, 0), (1, 3)), b, lse_b))
    keep_the_contract(States(a, lse_a, strided(b, order, (1, 2, 3)), strided(lse_b, (0, 1), (2, 2))))
    row, one = states((1, 1, 70), dtype)[2:]
    keep_the_contract(
        States(a, lse_a, row.nan_to_num().expand(5, 3, -1), one.nan_to_num(0, 0, 0).expand(5, 3))
    )  # one state for all rows


@pytest.mark.usefixtures("way")
@given(data=st.data())
@examples(40)
def test_any_shape_and_strides_keep_the_contract(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 300)))
    dtype = data.draw(st.sampled_from(list(HALF_STEP)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    drawn = [
        strided(
            x,
            data.draw(st.permutations(range(x.dim())).map(tuple)),
            data.draw(st.tuples(*[st.integers(1, 3)] * x.dim())),
        )
        for x in states(shape, dtype)
    ]
    keep_the_contract(States(*drawn))


@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
@pytest.mark.parametrize("isa", [isa for _, isa in WAYS[1:]])
def test_the_number_of_threads_changes_no_bit(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = states((301, 7, 80), dtype)
    monkeypatch.setenv("PAGEDKV_KERNELS", "cpu")
    monkeypatch.setenv("PAGEDKV_CPU_ISA", isa)
    results = []
    for threads in (1, 2, 3, 8):
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
        results.append(merge_states(*given))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.usefixtures("way")
def test_merging_with_nothing_changes_no_bit() -> None:
    for dtype in HALF_STEP:
        out, lse = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2)
        nothing = torch.full_like(out, NAN), torch.full_like(lse, -INF)
        for merged in (merge_states(out, lse, *nothing), merge_states(*nothing, out, lse)):
            assert torch.equal(merged[0], out)
            assert torch.equal(merged[1], lse)
        blind, blind_lse = merge_states(*nothing, *nothing)
        assert (blind == 0).all()
        assert (blind_lse == -INF).all()


@pytest.mark.usefixtures("way")
def test_infinity_leaves_zeros_and_nan_is_not_hidden() -> None:
    lse_a, lse_b = (
        torch.tensor([[INF, 1.0, INF, NAN, 1.0, INF, -INF]]),
        torch.tensor([[1.0, INF, INF, 1.0, NAN, -INF, NAN]]),
    )
    out, lse = merge_states(torch.ones(1, 7, 40), lse_a, torch.ones(1, 7, 40), lse_b)
    infinite, unknown = [0, 1, 2, 5], [3, 4, 6]
    assert (lse[0, infinite] == INF).all()
    assert (out[0, infinite] == 0).all()
    assert lse[0, unknown].isnan().all()
    assert out[0, unknown].isnan().all()
    seen, _ = merge_states(torch.full((1, 1, 3), NAN), torch.zeros(1, 1), torch.zeros(1, 1, 3), torch.zeros(1, 1))
    assert seen.isnan().all()  # in what has weight
