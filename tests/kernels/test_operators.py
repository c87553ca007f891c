"""torch sees what the operators do: schemas, mutations, shapes without data, one opaque node in a compiled graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import copy_frames, gather_kv, merge_states, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.args import KVLayer, PagedBatch, RotaryTable
from tests.cases import Case, call_of, write_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kernels.conftest import Runner

CASE = Case(q_lens=(1, 4), kv_lens=(40, 6), window=20)
QUANTISED = Case(q_lens=(1, 4), kv_lens=(40, 6), kv="int8/token_head", layout="HND", sinks=True, rows=True)


def write_args(case: Case) -> tuple[Any, ...]:
    _, layer, batch, _ = case.build()
    k = torch.randn(len(batch.slots), *layer.k.shape[2:])
    rope = RotaryTable(torch.rand(40, 32), torch.rand(40, 32)) if layer.k_scale is None else None
    return (*write_of(layer, k, -k, batch.slots, rope, batch.positions), "auto")


each_case = pytest.mark.parametrize("case", [pytest.param(CASE, marks=pytest.mark.slow), QUANTISED], ids=str)


@each_case
def test_opcheck_finds_nothing(case: Case) -> None:
    ops, (*call, out, lse) = torch.ops.pagedkv, call_of(case.build())
    torch.library.opcheck(ops.paged_attention.default, (*call, "auto"))
    torch.library.opcheck(ops.paged_attention_out.default, (*call, out, lse, "auto"))
    torch.library.opcheck(ops.write_kv.default, write_args(case))


def gather_args(case: Case) -> tuple[Any, ...]:
    _, layer, batch, _ = case.build()
    lens = batch.seq_lens
    return (
        layer.k,
        layer.v,
        layer.k_scale,
        layer.v_scale,
        layer.calibration,
        batch.block_table,
        batch.rows,
        lens,
        torch.ones_like(lens),
    )


@each_case
def test_opcheck_finds_nothing_in_a_gather(case: Case) -> None:
    ops, call = torch.ops.pagedkv, gather_args(case)
    for out in (torch.zeros(50, 2, 64), torch.zeros(2, 7, 2, 64)):
        torch.library.opcheck(ops.gather_kv_out.default, (*call, out, out + 1, "auto"))
    torch.library.opcheck(ops.gather_kv.default, (*call, torch.float32, "auto"))


def test_opcheck_finds_nothing_in_merge_and_copy() -> None:
    out, lse = torch.randn(3, 2, 8), torch.randn(3, 2)
    torch.library.opcheck(torch.ops.pagedkv.merge_states.default, (out, lse, out + 1, lse - 1))
    torch.library.opcheck(
        torch.ops.pagedkv.copy_frames.default, (torch.randn(4, 8), torch.tensor([[0, 1]], dtype=torch.int32), "auto")
    )


@pytest.mark.parametrize("case", [CASE, QUANTISED], ids=str)
def test_a_compiled_step_is_one_graph_and_gives_the_same_bits(case: Case) -> None:
    def step(
        q: torch.Tensor, k: torch.Tensor, layer: KVLayer, batch: PagedBatch, storage: torch.Tensor
    ) -> torch.Tensor:
        copy_frames(storage, torch.tensor([[0, 1]], dtype=torch.int32))
        write_kv(k, k * 2, layer, batch)
        out, lse = paged_attention(q * 2, layer, batch, return_lse=True)
        into = torch.zeros_like(out)
        paged_attention(q, layer, batch, out=into)
        kept = gather_kv(layer, batch, 3, (torch.zeros(2, 50, 2, 64), torch.zeros(2, 50, 2, 64)))
        return merge_states(out, lse, into, lse - 1)[0] + kept[1].sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for run in (step, compiled):
        q, layer, batch, _ = case.build()
        k = torch.linspace(-1, 1, 5 * 2 * 64).view(5, 2, 64)
        storage = torch.arange(4.0)
        results.append((run(q, k, layer, batch, storage), layer.k.float().nan_to_num(9), storage))
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


def test_no_function_takes_part_in_a_backward_pass(runner: Runner) -> None:
    built = Case(q_lens=(3,), kv_lens=(20,)).build()
    q, k = built.q.clone().requires_grad_(), torch.randn(3, 2, 64, requires_grad=True)
    out, lse = torch.randn(3, 4, 64, requires_grad=True), torch.randn(3, 4)
    calls: dict[str, Callable[[], object]] = {
        "q": lambda: paged_attention(q, built.layer, built.batch, backend=runner.backend),
        "k": lambda: write_kv(k, k, built.layer, built.batch, backend=runner.backend),
        "out_b": lambda: merge_states(out.detach(), lse, out, lse),
        "storage": lambda: copy_frames(out, torch.tensor([[0, 1]], dtype=torch.int32)),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidRequest, match=f"{name} requires grad, and the kernels are for inference only"):
            call()
    assert not built.layer.k.requires_grad


def test_a_compiled_function_does_not_lose_a_gradient_in_silence() -> None:
    built = Case(q_lens=(3,), kv_lens=(20,)).build()
    attend = torch.compile(lambda q: paged_attention(q, built.layer, built.batch), backend="aot_eager")
    with pytest.raises(Exception, match="inference only"):
        attend(built.q.clone().requires_grad_())
    with torch.no_grad():
        attend(built.q.clone().requires_grad_())
