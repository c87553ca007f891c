"""Garbage in the tables is refused by every CPU kernel at PAGEDKV_DEBUG=0, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv import bind_attention, bind_write, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels import registry
from pagedkv.kernels.args import KVLayer, PagedBatch, RotaryTable
from tests.cases import Built, write_of
from tests.kernels.conftest import ON_CPU, RUNNERS, Runner
from tests.kernels.test_checks import CASE, INT32, WRONG_VALUES, batch

CANARY = 7.0
each_backend = pytest.mark.parametrize("backend", ON_CPU)
each_way = pytest.mark.parametrize("is_bound", [False, True], ids=["functional", "bound"])


@pytest.fixture(autouse=True)
def without_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")


def attend(built: Built, backend: str, is_bound: bool) -> torch.Tensor:
    out = torch.full((len(built.q), 6, 64), CANARY)
    try:
        if is_bound:
            return bind_attention(built.layer, backend=backend)(built.q, built.batch, out=out)
        return paged_attention(built.q, built.layer, built.batch, out=out, backend=backend)
    except InvalidRequest:
        assert (out == CANARY).all()
        raise


TABLES: list[tuple[Callable[[Built], Built], str]] = [
    *WRONG_VALUES,
    (batch(block_table=torch.full((2, 5), 7, dtype=INT32)), "names frames 7 to 7"),  # one past the end
    (batch(block_table=torch.full((2, 5), 2**31 - 1, dtype=INT32)), "names frames 2147483647"),
    (batch(block_table=torch.full((2, 5), -2, dtype=INT32)), "names frames -2 to -2"),
    (batch(rows=torch.tensor([0, -1], dtype=INT32)), "batch.rows holds -1 to 0"),
    (batch(rows=torch.tensor([2**31 - 1, 0], dtype=INT32)), "batch.rows holds 0 to 2147483647"),
    (batch(seq_lens=torch.tensor([40, 3], dtype=INT32)), "sequence 1 has 4 queries and batch.seq_lens says 3"),
    (batch(seq_lens=torch.tensor([-(2**31), 4], dtype=INT32)), "batch.seq_lens goes from -2147483648"),
    (batch(seq_lens=torch.tensor([2**31 - 1, 4], dtype=INT32)), "batch.seq_lens goes from 4 to 2147483647"),
    (batch(cu_seqlens_q=torch.tensor([1, 2, 5], dtype=INT32)), "it must rise from 0"),
    (batch(cu_seqlens_q=torch.tensor([0, 1, 6], dtype=INT32)), "to at most T=5"),
    (batch(cu_seqlens_q=torch.tensor([0, -5, 5], dtype=INT32)), "it must rise from 0"),
    (batch(max_seqlen_q=3), "the batch holds 4 queries"),
]


@each_way
@each_backend
@pytest.mark.parametrize(("change", "text"), TABLES, ids=[text for _, text in TABLES])
def test_a_table_that_names_what_is_not_there_is_refused(
    change: Callable[[Built], Built], text: str, backend: str, is_bound: bool
) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        attend(change(CASE.build()), backend, is_bound)
    assert text in str(wrong.value)


@each_way
@each_backend
def test_garbage_that_no_kernel_follows_is_allowed(backend: str, is_bound: bool) -> None:
    """The entry -1 is a hole; rows, lengths and entries of a sequence without queries are not read."""
    built = CASE.build()
    want = attend(built, backend, is_bound)
    x = built.batch
    garbage = torch.full((1, x.block_table.shape[1]), 2**31 - 1, dtype=INT32)
    empty = replace(x, seq_lens=torch.tensor([0, 4], dtype=INT32), block_table=x.block_table.clone())
    empty.block_table[0] = 2**31 - 1
    assert (attend(built._replace(batch=empty), backend, is_bound)[0] == 0).all()
    lazy = replace(
        x,
        block_table=torch.cat([x.block_table, garbage]),
        rows=torch.tensor([0, 2, 1], dtype=INT32),
        seq_lens=torch.tensor([40, -5, 4], dtype=INT32),
        cu_seqlens_q=torch.tensor([0, 1, 1, 5], dtype=INT32),
    )
    assert torch.equal(attend(built._replace(batch=lazy), backend, is_bound), want)
    punched = replace(x, block_table=x.block_table.masked_fill(torch.arange(5) < 1, -1))
    assert attend(built._replace(batch=punched), backend, is_bound).isfinite().all()


def some(x: torch.Tensor) -> st.SearchStrategy[list[int]]:
    """Numbers near those of a table, near the ends of int32, and any other."""
    values = sorted({*x.flatten().tolist(), 0, 1, -1, 6, 7, 8, 16, 80, 2**31 - 1, -(2**31)})
    numbers = st.sampled_from(values) | st.integers(-3, 90) | st.integers(-(2**31), 2**31 - 1)
    return st.lists(numbers, min_size=x.numel(), max_size=x.numel())


@st.composite
def hostile(draw: st.DrawFn) -> Built:
    """A case. One to three of its tables are partly garbage."""
    built, changes = replace(CASE, rows=True).build(), {}
    for name in draw(st.lists(st.sampled_from(["block_table", "rows", "seq_lens", "cu_seqlens_q"]), min_size=1)):
        x = getattr(built.batch, name)
        keep = torch.tensor(draw(st.lists(st.booleans(), min_size=x.numel(), max_size=x.numel()))).view_as(x)
        changes[name] = torch.where(keep, x, torch.tensor(draw(some(x)), dtype=INT32).view_as(x))
    return built._replace(batch=replace(built.batch, **changes))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(built=hostile())
def test_hostile_tables_are_refused_or_served_alike(built: Built) -> None:
    """A kernel that followed garbage would end the process, or read NaN beyond the tokens."""
    outs: list[torch.Tensor | str] = []
    for backend in ON_CPU:
        for is_bound in (False, True):
            try:
                outs.append(attend(built, backend, is_bound))
            except InvalidRequest as error:
                outs.append(str(error))
    if isinstance(outs[0], str):
        assert set(map(str, outs)) == {outs[0]}
    else:
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], rtol=1e-4, atol=1e-4, equal_nan=True)


def guarded_layer() -> Iterator[Any]:
    """Yield a layer of 7 frames in the middle of a larger tensor, and that tensor."""
    memory = torch.full((9, 2, 16, 2, 64), CANARY)
    yield KVLayer(memory[1:8, 0], memory[1:8, 1])
    yield memory


@each_way
@each_backend
@pytest.mark.parametrize("slot", [112, 113, 127, 2**40, 2**63 - 1])
def test_no_write_leaves_the_pool(slot: int, backend: str, is_bound: bool) -> None:
    layer, memory = guarded_layer()
    tables = replace(CASE.build().batch, slots=torch.tensor([0, 1, 2, slot, -1]))
    k = torch.zeros(5, 2, 64)
    with pytest.raises(InvalidRequest, match=f"slots holds 0 to {slot} but there are 112 slots"):
        write(k, layer, tables, None, backend, is_bound)
    assert (memory == CANARY).all()
    write(k, layer, replace(tables, slots=torch.tensor([0, -(2**63), 111, -1, -7])), None, backend, is_bound)
    assert (memory != CANARY).sum() == 2 * 2 * 2 * 64


def write(
    k: torch.Tensor, layer: KVLayer, tables: PagedBatch, rope: RotaryTable | None, backend: str, is_bound: bool
) -> None:
    if is_bound:
        bind_write(layer, rope=rope, backend=backend)(k, k, tables)
    else:
        write_kv(k, k, layer, tables, rope=rope, backend=backend)


@pytest.mark.parametrize("runner", [each for each in RUNNERS if each.values[0].is_slow], indirect=True)
def test_kernels_for_gpus_skip_what_is_not_there(runner: Runner) -> None:
    """They follow slots and copies that no host has read."""
    kernel = next(kernel for kernel in registry.KERNELS if kernel.name == runner.backend).load()
    layer, memory = guarded_layer()
    k, slots = torch.zeros(5, 2, 64), torch.tensor([0, 112, 111, 2**40, 2**63 - 1])
    kernel.write_kv(write_of(layer, k, k, slots))
    assert (memory != CANARY).sum() == 2 * 2 * 2 * 64
    memory[1] = 1.0
    copies = torch.tensor([[0, 1], [0, 7], [0, -1], [0, 2**31 - 1], [0, -(2**31)]], dtype=INT32)
    for times in (1, 80):  # many copies go through a scratch buffer
        kernel.copy_frames(memory[1:8], copies.repeat(times, 1))
        assert (memory[2] == 1.0).all()
        assert (memory[[0, 8]] == CANARY).all()


@each_way
@each_backend
@pytest.mark.parametrize("position", [-1, 39, 2**62])
def test_no_position_beyond_the_angles_is_read(position: int, backend: str, is_bound: bool) -> None:
    layer, memory = guarded_layer()
    turns, k = RotaryTable(torch.ones(39, 32), torch.ones(39, 32)), torch.zeros(5, 2, 64)
    tables = replace(CASE.build().batch, positions=torch.tensor([0, 1, position, 3, 38]), slots=torch.arange(5))
    with pytest.raises(InvalidRequest, match="positions holds"):
        write(k, layer, tables, turns, backend, is_bound)
    assert (memory == CANARY).all()
    write(k, layer, replace(tables, slots=torch.tensor([0, 1, -1, 3, 4])), turns, backend, is_bound)
