"""A decode is one node of its CUDA graph: the driver counts the nodes during the capture, on a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention, write_kv
from pagedkv.kernels import registry
from pagedkv.kernels.cuda import streams
from tests.kernels.test_on_gpu import STEP, on_gpu

KERNEL_NODE, ACTIVE = 0, 1  # CU_GRAPH_NODE_TYPE_KERNEL, CU_STREAM_CAPTURE_STATUS_ACTIVE


def nodes(stream: int, library: ctypes.CDLL) -> list[int]:
    """Return the kinds of the nodes that the capture of this stream has made so far."""

    def ask(function: str, *arguments: object) -> None:
        status = getattr(library, function)(*arguments)
        assert status == 0, f"{function} failed: {status}"

    status, name, graph, last, count = (
        ctypes.c_int(),
        ctypes.c_uint64(),
        ctypes.c_void_p(),
        ctypes.c_void_p(),
        ctypes.c_size_t(),
    )
    found = [ctypes.byref(x) for x in (status, name, graph, last, count)]
    ask("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
    assert status.value == ACTIVE, "the stream is not captured"
    ask("cuGraphGetNodes", graph, None, ctypes.byref(count))
    if not count.value:
        return []  # the driver refuses room for no node
    handles = (ctypes.c_void_p * count.value)()
    ask("cuGraphGetNodes", graph, handles, ctypes.byref(count))
    kinds = [ctypes.c_int(-1) for _ in handles]
    for handle, kind in zip(handles, kinds, strict=True):
        ask("cuGraphNodeGetType", ctypes.c_void_p(handle), ctypes.byref(kind))
    return [kind.value for kind in kinds]


@pytest.mark.gpu
@pytest.mark.parametrize("split_tokens", [None, 256])
@pytest.mark.parametrize(
    ("backend", "most_queries", "launches"),
    [("cuda", 1, 1), ("cuda", 4, 1), ("cuda", 8, 2), ("cuda", 65, 3)],
)
def test_a_captured_decode_is_one_kernel_and_nothing_else(
    backend: str, most_queries: int, launches: int, split_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node sets tickets to zero, copies or waits. Queries of more than 16 rows take one launch for each class of
    rows."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    try:
        registry.resolve(registry.Case(device="cuda", dtype="bfloat16"), backend)
    except KernelUnavailable as refused:
        pytest.skip(str(refused))
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")  # checks read values back, which a capture forbids
    case = replace(
        STEP, q_lens=(most_queries, 1, 1, 1, 1, 1), kv_lens=(700, 40, 700, 33, 512, 97), split_tokens=split_tokens
    )
    q, layer, batch, options = on_gpu(case)
    new = torch.zeros(len(batch.slots), 2, 128, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        write_kv(new, new, layer, batch, backend=backend)
        paged_attention(q, layer, batch, backend=backend, **options)

    step()
    torch.cuda.synchronize()
    graph, captured = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in (lambda: None, lambda: write_kv(new, new, layer, batch, backend=backend), step):
            call()
            captured.append(nodes(torch.cuda.current_stream().cuda_stream, streams._library()))
    before, written, both = captured
    assert written == [*before, KERNEL_NODE]
    assert both == [*written, *[KERNEL_NODE] * (1 + launches)]
