"""A value that is not finite reaches the queries that see it, and no others.

0 * NaN is NaN, so masks alone are not enough.
`planted` overwrites values of tokens that some queries see and some do not. The oracle reads visible keys only, so it
says which results stay finite, and which numbers they have.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pagedkv.conformance.cases import _allowed_error
from tests.cases import Built, Case, as_bytes
from tests.kernels.conftest import COMPILED, WAYS, Runner, param
from tests.kernels.oracle import oracle, same_precision

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNKS = Case(q_lens=(1, 9, 40), kv_lens=(60, 50, 90))
HIDDEN = (
    CHUNKS,
    replace(CHUNKS, dtype="bfloat16", layout="HND"),
    replace(CHUNKS, dtype="float16", dims=(80, 80), block_size=5),
    replace(CHUNKS, window=7, layout="mixed"),
    replace(CHUNKS, window=7, mask="all", dtype="bfloat16"),
    replace(CHUNKS, q_lens=(2, 9, 6), mask="tree"),
    replace(CHUNKS, q_lens=(2, 9, 6), mask="tree", window=30, dtype="bfloat16"),
    replace(CHUNKS, window=(7, 3), mask="all"),
    replace(CHUNKS, mask="some", heads=(16, 1), dtype="bfloat16"),
    replace(CHUNKS, heads=(8, 1), softcap=20.0, sinks=True, alibi=True),
    replace(CHUNKS, heads=(32, 1), dtype="bfloat16"),
    replace(CHUNKS, split_tokens=32),
    replace(CHUNKS, q_lens=(1, 9, 12), split_tokens=32, dtype="bfloat16", rows=True, punched=True),
    replace(CHUNKS, dims=(64, 48), layout="mla"),
    *(
        replace(CHUNKS, dtype="bfloat16", kv=kv, layout="HND")
        for kv in ("fp8_e4m3/tensor", "fp8_e5m2/tensor", "int8/token_head", "k8v4/token_head", "k5v4/calibrated")
    ),
    replace(CHUNKS, kv="int8/token_head"),
)
BYTES = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""The codes of NaN and, where the type has it, infinity."""


def planted(built: Built, number: float) -> Built:
    """Return `built` with `number` in values of each sequence: of its last token, of the fourth before the end, and, if
    there is a window, of an early token."""
    pool, scale = built.layer.v.clone(), built.layer.v_scale
    if scale is not None and scale.dim() == 3:
        scale = scale.clone()
    batch, size = built.batch, pool.shape[1]
    for b, n in enumerate(batch.seq_lens.tolist()):
        row = batch.block_table[b if batch.rows is None else int(batch.rows[b])].tolist()
        behind_windows = [(n // 3, 5)] if built.options["window"] else []
        for t, column in (*behind_windows, (n - 4, 0), (n - 1, 40)):
            if row[t // size] < 0:
                continue
            at = (row[t // size], t % size, built.layer.v.shape[2] - 1)
            if scale is not None and scale.dim() == 3:
                scale[at] = number
            elif pool.dtype in BYTES:
                as_bytes(pool)[*at, column] = BYTES[pool.dtype]
            else:
                pool[*at, column] = number
    layer = replace(built.layer, v=pool, v_scale=scale)
    if built.layer.v.data_ptr() == built.layer.k.data_ptr():  # values within the keys
        whole = built.layer.k.clone()
        whole[..., : pool.shape[-1]] = pool
        layer = replace(layer, k=whole, v=whole[..., : pool.shape[-1]])
    return built._replace(layer=layer)


@lru_cache(maxsize=2)
def hidden(case: Case, number: float) -> tuple[Built, np.ndarray, float]:
    """Return the case with `number` planted, its results, and the error that is allowed: once for all kernels."""
    built = case.build()
    poisoned = planted(built, number)
    with np.errstate(invalid="ignore"):
        right = oracle(poisoned).out
    return poisoned, right, _allowed_error(case, oracle(built).out, same_precision(built).out)


def check_hidden_values(case: Case, runner: Runner, number: float = torch.nan) -> None:
    """Compare a kernel with the oracle, element by element: equally finite, and equal where finite.

    If `runner.spoils_rows`, a query and head that sees such a value may be NaN in all columns, not only in that of the
    value.
    """
    poisoned, right, allowed = hidden(case, number)
    finite = np.isfinite(right)
    assert finite.any()
    assert not finite.all()
    out = runner.attend(poisoned)[0].double().numpy()
    if runner.spoils_rows:
        assert not np.isfinite(out)[~finite].any()
        finite = np.broadcast_to(finite.all(-1, keepdims=True), finite.shape)
        assert finite.any()
        assert np.isfinite(out)[finite].all()
    else:
        assert (np.isfinite(out) == finite).all()
    assert np.abs(out[finite] - right[finite]).max() <= allowed


def jobs() -> Iterator[Any]:
    """Yield (case, number, runner). Quick are NaN, with instruction sets and teams of threads; infinity with a third of
    the cases; and NaN in a seventh of the cases with slow runners."""
    for position, case in enumerate(HIDDEN):
        for number, each in itertools.product((torch.nan, torch.inf), [*COMPILED, param(Runner("reference"))]):
            is_nan = number is torch.nan
            is_quick = is_nan or position % 3 == 0
            if each.values[0].is_slow:
                is_quick = is_nan and position % 7 == 1
            marks = [*each.marks, *[pytest.mark.slow] * (not is_quick)]
            yield pytest.param(case, number, *each.values, id=f"{case}-{number}-{each.id}", marks=marks)


@pytest.mark.parametrize(("case", "number", "runner"), list(jobs()), indirect=["runner"])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(case: Case, number: float, runner: Runner) -> None:
    check_hidden_values(case, runner, number)


@pytest.mark.parametrize("seen", [False, True])
def test_a_value_that_a_tree_hides_from_a_single_query_does_not_reach_it(seen: bool, runner: Runner) -> None:
    """A single query does not see its own token, or the token before, where there is a NaN."""
    built = Case(q_lens=(1,), kv_lens=(20,), heads=(2, 1), mask="tree").build()
    built.options["tree_mask"][:] = False
    built.layer.v[built.batch.block_table[0, 1], 2 if seen else 3, 0, 0] = torch.nan
    assert runner.attend(built)[0].isnan().any() == seen


@pytest.mark.parametrize("runner", WAYS, indirect=True)
@pytest.mark.parametrize("q_lens", [(40,), (6,), (3,)])
def test_a_hidden_value_reaches_nothing_where_keys_are_cut_among_threads(
    q_lens: tuple[int, ...], runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(q_lens=q_lens, kv_lens=(6000,), heads=(4, 1), dtype="bfloat16", layout="HND")
    for threads in ("1", "4"):
        monkeypatch.setenv("PAGEDKV_NUM_THREADS", threads)
        check_hidden_values(case, runner)
