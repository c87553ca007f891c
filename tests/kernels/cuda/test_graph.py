"""A decode is one node of its CUDA graph: the driver counts the nodes during the capture.

This test needs a GPU; the test of the counting runs anywhere.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from pagedkv import KernelUnavailable, paged_attention, write_kv
from pagedkv.kernels import registry
from pagedkv.kernels.cuda import streams
from tests.cases import Case
from tests.kernels.cuda.emulator import COMPILER, compiled
from tests.kernels.test_on_gpu import on_gpu

KERNEL_NODE, ACTIVE = 0, 1  # CU_GRAPH_NODE_TYPE_KERNEL, CU_STREAM_CAPTURE_STATUS_ACTIVE
STEP = Case(
    q_lens=(1,) * 6,
    kv_lens=(1, 40, 700, 33, 512, 97),
    heads=(8, 2),
    dims=(128, 128),
    dtype="bfloat16",
    layout="HND",
    sinks=True,
)


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


DRIVER = """
#include <cstddef>
#include <cstdint>
struct Graph { size_t count; uintptr_t nodes[3]; };
static Graph graph = {3, {0x7f0000000010, 0x7f0000000020, 0x7f0000000035}}, empty = {0, {}};
extern "C" int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* name, void** captured, const void** last,
                                         size_t* count) {
    bool is_empty = (uintptr_t)stream == 0x7fff00000000;
    if ((uintptr_t)stream != 0x7fff12345678 && !is_empty) return 400;
    *status = 1, *name = 7, *captured = is_empty ? &empty : &graph, *last = nullptr, *count = 1;
    return 0;
}
extern "C" int cuGraphGetNodes(void* asked, uintptr_t* nodes, size_t* count) {
    if (asked != &graph && asked != &empty) return 1;
    Graph& of = *(Graph*)asked;
    if (nodes && !*count) return 1;
    for (size_t i = 0; nodes && i < *count && i < of.count; ++i) nodes[i] = of.nodes[i];
    *count = of.count;
    return 0;
}
extern "C" int cuGraphNodeGetType(uintptr_t node, int* kind) { return *kind = node & 15, node >> 32 == 0x7f00 ? 0 : 2; }
"""
"""A stand-in for the driver, with signatures as in cuda.h. One stream has three captured nodes, of kinds 0, 0 and 5;
another one has none."""


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_nodes_of_a_capture_are_counted_by_their_kinds() -> None:
    library = ctypes.CDLL(str(compiled("graphs", {"graphs.cpp": DRIVER}, ("-O1", "-fPIC", "-shared"))))
    assert nodes(0x7FFF12345678, library) == [KERNEL_NODE, KERNEL_NODE, 5]
    assert nodes(0x7FFF00000000, library) == []
    with pytest.raises(AssertionError, match="cuStreamGetCaptureInfo_v2 failed: 400"):
        nodes(0x1000, library)


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
