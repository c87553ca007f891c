"""Two states become one as float64 has it: of any strides, whatever unused memory holds, in each kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import merge_states
from tests.cases import moved
from tests.kernels.conftest import COMPILED, SETS, Runner, param
from tests.kernels.test_properties import examples

if TYPE_CHECKING:
    from torch import Tensor

RUNNERS = [param(Runner("reference")), *(each for each in COMPILED if each.values[0].backend != "numba")]
"""numba has no kernel for merges."""
each_runner = pytest.mark.parametrize("runner", RUNNERS, indirect=True)
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


def merged(given: States, runner: Runner) -> tuple[Tensor, Tensor]:
    out, lse = merge_states(*(moved(x, runner.device) for x in given))
    return out.cpu(), lse.cpu()


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


def keep_the_contract(given: States, runner: Runner) -> None:
    out, lse = merged(given, runner)
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
    allowed = (HALF_STEP[out.dtype] + 4e-6) * size + LEAST[out.dtype] + 1e-30
    assert (np.abs(out.double().numpy() - (parts[0] + parts[1])) <= allowed).all()
    assert (np.isneginf(lse.numpy()) == blind).all()
    seen = exact[~blind]
    assert (np.abs(lse.double().numpy()[~blind] - seen) <= 1e-6 + 1e-6 * np.abs(seen)).all()


@each_runner
@pytest.mark.parametrize("spread", [0.1, 5.0, 200.0])
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
def test_two_states_become_what_float64_says(dtype: torch.dtype, spread: float, runner: Runner) -> None:
    empty = () if runner.spoils_rows else ((0, 2, 64), (2, 0, 64), (2, 3, 0))
    for shape in ((1, 1, 1), (3, 2, 64), (2, 5, 80), (4, 1, 257), (1, 3, 576), *empty):
        keep_the_contract(states(shape, dtype, spread), runner)


@each_runner
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
def test_states_are_read_where_they_lie(dtype: torch.dtype, runner: Runner) -> None:
    a, lse_a, b, lse_b = states((5, 3, 70), dtype)
    orders, step = [(0, 1, 2), (1, 0, 2), (2, 1, 0)], 3
    if runner.spoils_rows:  # rows with gaps are copied first, which the emulator takes for a stray access
        orders, step = orders[:2], 1
    for order in orders:
        keep_the_contract(States(strided(a, order, (2, 1, 1)), strided(lse_a, (1, 0), (1, 3)), b, lse_b), runner)
        keep_the_contract(States(a, lse_a, strided(b, order, (1, 2, step)), strided(lse_b, (0, 1), (2, 2))), runner)
    row, one = (x.nan_to_num(0, 0, 0) for x in states((1, 1, 70), dtype)[2:])
    keep_the_contract(States(a, lse_a, row.expand(5, 3, -1), one.expand(5, 3)), runner)  # one state for all rows


@pytest.mark.parametrize("runner", RUNNERS[: 1 + len(SETS)], indirect=True)
@given(data=st.data())
@examples(40)
def test_any_shape_and_strides_keep_the_contract(data: st.DataObject, runner: Runner) -> None:
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
    keep_the_contract(States(*drawn), runner)


@pytest.mark.parametrize("runner", [param(Runner("cpu", way=name)) for name in SETS], indirect=True)
@pytest.mark.parametrize("dtype", HALF_STEP, ids=str)
def test_the_number_of_threads_changes_no_bit(
    dtype: torch.dtype, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, results = states((301, 7, 80), dtype), []
    for threads in (1, 2, 3, 8):
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", str(threads))
        results.append(merged(given, runner))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@each_runner
def test_merging_with_nothing_changes_no_bit(runner: Runner) -> None:
    for dtype in HALF_STEP:
        out, lse = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2)
        nothing = torch.full_like(out, NAN), torch.full_like(lse, -INF)
        for found in (merged(States(out, lse, *nothing), runner), merged(States(*nothing, out, lse), runner)):
            assert torch.equal(found[0], out)
            assert torch.equal(found[1], lse)
        blind, blind_lse = merged(States(*nothing, *nothing), runner)
        assert (blind == 0).all()
        assert (blind_lse == -INF).all()


@each_runner
def test_infinity_leaves_zeros_and_nan_is_not_hidden(runner: Runner) -> None:
    """An infinite sink takes the whole weight and has no value."""
    lse_a = torch.tensor([[INF, 1.0, INF, NAN, 1.0, INF, -INF, NAN, INF]])
    lse_b = torch.tensor([[1.0, INF, INF, 1.0, NAN, -INF, NAN, INF, NAN]])
    is_triton = runner.backend == "triton"  # it expects zeros in an infinite state; it tells of NaN in the LSE alone
    least = INF if is_triton else NAN
    a, b = (torch.where(lse == least, 0.0, 1.0)[..., None].expand(1, 9, 40) for lse in (lse_a, lse_b))
    out, lse = merged(States(a.contiguous(), lse_a, b.contiguous(), lse_b), runner)
    infinite, unknown = [0, 1, 2, 5], [3, 4, 6]
    assert (lse[0, infinite] == INF).all()
    assert (out[0, infinite] == 0).all()
    assert lse[0, unknown].isnan().all()
    assert is_triton or out[0, [*unknown, 7, 8]].isnan().all()
    one, zeros = torch.zeros(1, 1), torch.zeros(1, 1, 3)
    seen, _ = merged(States(torch.full((1, 1, 3), NAN), one, zeros, one), runner)
    assert seen.isnan().all()  # in what has weight
