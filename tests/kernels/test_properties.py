"""The contract on drawn shapes and strides: hypothesis draws cases, every CPU backend keeps them, and a failure
shrinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pagedkv import write_kv
from pagedkv.conformance.cases import TOLERANCE
from tests.cases import DTYPES, KV_KINDS, Case
from tests.kernels.conftest import ON_CPU, Runner
from tests.kernels.oracle import oracle, ratios, same_precision
from tests.kernels.test_laws import moved_frames, only
from tests.kernels.test_write import assert_same_bytes, batch_of, scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cases import Built

ROUNDED = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""One unit in the last place, relative.

On a handful of elements plain torch may be right by luck; rounding the result is allowed.
"""

SIDES = st.tuples(*[st.none() | st.integers(0, 60)] * 2)
"""Windows with two sides, for calls that are not causal."""


def examples(count: int) -> Callable[[Any], Any]:
    """As many draws, the same in each run; a slow test draws more, and others each time."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, derandomize=count < 100, suppress_health_check=quiet)


def served_dims(kv: str, *dims: int) -> tuple[int, ...]:
    """These head dims, or the next multiples of 8 for a rotated kind."""
    unit = 8 if kv.startswith("k") else 1
    return tuple(-(-dim // unit) * unit for dim in dims)


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    """Any call of the contract on small shapes."""
    batch = draw(st.integers(1, 5))
    q_lens = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 19]), min_size=batch, max_size=batch))
    mask = fixed.get("mask") or draw(st.sampled_from(["causal", "all", "some", "tree"]))
    kv_lens = [draw(st.integers(min(m, 1) if mask == "all" else m, 90)) for m in q_lens]
    K, G = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    kv = draw(st.sampled_from(KV_KINDS))
    dims = draw(st.tuples(st.integers(4, 50), st.integers(4, 50)).map(lambda pair: (2 * pair[0], 2 * pair[1])))
    drawn: dict[str, Any] = {
        "q_lens": tuple(q_lens),
        "kv_lens": tuple(kv_lens),
        "heads": (K * G, K),
        "dims": served_dims(kv, *dims),
        "block_size": draw(st.integers(1, 40)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "kv": kv,
        "layout": draw(st.sampled_from(["NHD", "HND", "mixed"])),
        "mask": mask,
        "window": draw(st.none() | st.integers(1, 100) | (SIDES if mask in ("all", "some") else st.nothing())),
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])),
        "sinks": draw(st.booleans()),
        "alibi": draw(st.booleans()),
        "split_tokens": draw(st.none() | st.integers(1, 64)),
        "rows": draw(st.booleans()),
        "punched": draw(st.booleans()),
        "padding": draw(st.sampled_from([0, 2])),
    }
    return Case(**(drawn | fixed))


def strided(built: Built, gap: int) -> Built:
    """q as a slice of a wider buffer, such as a fused qkv."""
    T, H, D = built.q.shape
    padded = torch.full((T, H + gap, D + 8 * gap), torch.nan).to(built.q.dtype)[:, gap:, 8 * gap :]
    padded.copy_(built.q)
    return built._replace(q=padded)


def keeps_the_contract(case: Case, gap: int, backend: str) -> None:
    built = strided(case.build(), gap)
    right, low = oracle(built), same_precision(built)
    slack = ROUNDED[case.dtype] * float(np.abs(right.out).max(initial=0.0)), 1e-5
    factor = TOLERANCE[case.kv.partition("/")[0]]
    with np.errstate(invalid="ignore"):  # an lse of -inf
        low = [y + np.copysign(more / factor, y - x) for x, y, more in zip(right, low, slack, strict=True)]
    found = ratios(case, Runner(backend).attend(built), right, low)
    assert all(ratio <= 1 for ratio in found.values()), found


@pytest.mark.parametrize("backend", ON_CPU)
@given(case=cases(), gap=st.integers(0, 3))
@examples(30)
def test_any_call_is_as_right_as_plain_torch(case: Case, gap: int, backend: str) -> None:
    keeps_the_contract(case, gap, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ON_CPU)
@given(case=cases(), gap=st.integers(0, 3))
@examples(500)
def test_any_of_many_calls_is_as_right_as_plain_torch(case: Case, gap: int, backend: str) -> None:
    keeps_the_contract(case, gap, backend)


@pytest.mark.parametrize("backend", ON_CPU)
@given(case=cases(rows=False, padding=0), split=st.integers(1, 70), threads=st.integers(1, 5), data=st.data())
@examples(20)
def test_with_split_tokens_neither_batch_nor_threads_nor_frames_change_a_bit(
    case: Case, split: int, threads: int, data: st.DataObject, backend: str
) -> None:
    assume(case.mask != "tree" and any(case.q_lens))
    built, runner = case.build(), Runner(backend)
    b = data.draw(st.sampled_from([i for i, m in enumerate(case.q_lens) if m]))
    where = torch.randperm(len(built.layer.k), generator=torch.Generator().manual_seed(split))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PAGEDKV_NUM_THREADS", "1")
        together = runner.attend(built, split_tokens=split)
        environment.setenv("PAGEDKV_NUM_THREADS", str(threads))
        alone = runner.attend(only(moved_frames(built, where), b), split_tokens=split)
    rows = slice(*built.batch.cu_seqlens_q[b : b + 2].tolist())
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other[rows])


@pytest.mark.parametrize("backend", [name for name in ON_CPU if name != "reference"])
@given(
    kv=st.sampled_from([*KV_KINDS, "float32", "bfloat16", "float16"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 9)),
    layout=st.sampled_from(["NHD", "HND", "mixed"]),
    slots=st.lists(st.integers(-2, 44), max_size=20),
    seed=st.integers(0, 99),
)
@examples(60)
def test_any_write_leaves_the_bits_that_the_reference_leaves(
    kv: str, dtype: str, sizes: tuple[int, int, int], layout: str, slots: list[int], seed: int, backend: str
) -> None:
    (K, half, S), kind = sizes, kv.partition("/")[0]
    slots = [slot for i, slot in enumerate(slots) if slot < 0 or slot not in slots[:i]]  # distinct
    slots = [slot if slot < 5 * S else -1 for slot in slots]
    plain, (dim,) = kind in ROUNDED, served_dims(kv, 2 * half)
    case = Case(
        heads=(K, K),
        dims=(dim, dim),
        block_size=S,
        layout=layout,
        dtype=kv if plain else dtype,
        kv="" if plain else kv,
    )
    draw = torch.Generator().manual_seed(seed)
    k, v = (
        (torch.randn(len(slots), K, dim, generator=draw) * 10 ** (seed % 5 - 2)).to(DTYPES[dtype]) for _ in range(2)
    )
    layers = [scaled(case, 5, 0.3, 0.7) for _ in range(2)]
    for layer, name in zip(layers, (backend, "reference"), strict=True):
        write_kv(k, v, layer, batch_of(slots), backend=name)
    assert_same_bytes(*layers)
