"""On a real GPU, for each kernel of the registry that runs there: captured graphs, compiled steps, operators, pools
beyond 2^31 elements.

The grid of cases and the laws run there too (`pytest -m gpu`): the `runner` of conftest.py has a cuda form for each
kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagedkv import KernelUnavailable, KVLayer, PagedBatch, merge_states, paged_attention, write_kv
from pagedkv.kernels import registry
from tests.cases import Built, Case, call_of, moved, write_of

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.gpu
ON_CUDA = [kernel.name for kernel in registry.KERNELS if "cuda" in (kernel.where or ()) and kernel.name != "library"]
STEP = Case(
    q_lens=(1,) * 6,
    kv_lens=(1, 40, 700, 33, 512, 97),
    heads=(8, 2),
    dims=(128, 128),
    dtype="bfloat16",
    layout="HND",
    sinks=True,
)


@pytest.fixture(params=ON_CUDA)
def backend(request: pytest.FixtureRequest) -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    name = str(request.param)
    try:
        registry.resolve(registry.Case(device="cuda", dtype="bfloat16"), name)
    except KernelUnavailable as refused:
        pytest.skip(str(refused))
    return name


def on_gpu(case: Case) -> Built:
    built = case.build()
    return Built(*(moved(x, "cuda") for x in built[:3]), {name: moved(x, "cuda") for name, x in built.options.items()})


def captured(step: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `step()` and the tensors it fills; warmed up before, so that nothing is compiled in capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # the outer context restores the stream even if the end of the capture raises
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        result = step()
    return graph, result


@pytest.mark.parametrize("split_tokens", [None, 256])
@pytest.mark.parametrize("q_lens", [(1,) * 6, (1, 8, 3, 0, 2, 5), (1, 65, 1, 8, 40, 2)])
def test_a_captured_graph_serves_other_lengths_than_it_was_captured_with(
    q_lens: tuple[int, ...], split_tokens: int | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")  # checks of values read them back, which capture forbids
    case = replace(STEP, q_lens=q_lens, kv_lens=(700,) * 6, split_tokens=split_tokens)
    q, layer, batch, options = on_gpu(case)
    graph, (out, lse) = captured(lambda: paged_attention(q, layer, batch, return_lse=True, backend=backend, **options))
    for lens in ((700,) * 6, (66, 80, 70, 90, 41, 100), (1, 65, 300, 17, 640, 2), (699, 650, 5, 700, 64, 128)):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        eager = paged_attention(
            q, layer, replace(batch, seq_lens=batch.seq_lens.clone()), return_lse=True, backend=backend, **options
        )
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])


def test_a_captured_step_writes_where_the_slots_say_when_it_is_replayed(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    _, layer, batch, _ = on_gpu(STEP)
    k = torch.randn(6, 2, 128, device="cuda", dtype=torch.bfloat16)
    graph, _ = captured(lambda: write_kv(k, -k, layer, batch, backend=backend))
    before = batch.slots.clone()
    batch.slots.copy_(before.roll(1))
    k.copy_(torch.randn_like(k))
    graph.replay()
    S = layer.k.shape[1]
    assert torch.equal(layer.k[batch.slots // S, batch.slots % S], k)
    assert torch.equal(layer.v[batch.slots // S, batch.slots % S], -k)


def test_a_compiled_step_is_one_graph_and_gives_the_same_bits(backend: str) -> None:
    def step(q: Tensor, k: Tensor, layer: KVLayer, batch: PagedBatch) -> Tensor:
        write_kv(k, k * 2, layer, batch, backend=backend)
        out, lse = paged_attention(q * 2, layer, batch, return_lse=True, backend=backend)
        return merge_states(out, lse, out, lse - 1)[0] + 1

    results = []
    for run in (step, torch.compile(step, fullgraph=True)):
        q, layer, batch, _ = on_gpu(STEP)
        k = torch.linspace(-1, 1, 6 * 2 * 128, device="cuda").view(6, 2, 128).bfloat16()
        results.append((run(q, k, layer, batch), layer.k.float().nan_to_num(9)))
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


def test_opcheck_finds_nothing(backend: str) -> None:
    built = on_gpu(STEP)
    torch.library.opcheck(torch.ops.pagedkv.paged_attention.default, (*call_of(built)[:-2], backend))
    k = torch.randn(6, 2, 128, device="cuda", dtype=torch.bfloat16)
    stored = write_of(built.layer, k, k, built.batch.slots)
    torch.library.opcheck(torch.ops.pagedkv.write_kv.default, (*stored, backend))


def test_a_pool_of_more_than_2_31_elements_is_addressed_whole(backend: str) -> None:
    S, K, D = 16, 8, 128
    F = 2**31 // (S * K * D) + 2
    pool = torch.empty(F, S, K, D, dtype=torch.bfloat16, device="cuda")
    layer, kv, q = KVLayer(pool, pool), *(torch.randn(5, K, D, device="cuda").bfloat16() for _ in range(2))

    def batch(frame: int) -> PagedBatch:
        ints = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[frame]], [5], [0, 1]))
        slots = torch.arange(5, device="cuda") + frame * S
        return PagedBatch(*ints, slots=slots, positions=torch.arange(5, device="cuda"), max_seqlen_q=1, max_seqlen_k=5)

    for frame in (0, F - 1):
        write_kv(kv, kv, layer, batch(frame), backend=backend)
    first, last = (paged_attention(q[:1], layer, batch(frame), backend=backend) for frame in (0, F - 1))
    assert torch.equal(first, last)
    assert torch.equal(pool[F - 1, :5], kv)
