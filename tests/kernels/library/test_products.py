"""The choice between FlashAttention 3, cuDNN and FlashAttention 2 in the backend "library", and the calls of cuDNN.

The code for a GPU runs on the CPU with a stand-in for cuDNN, and with fake tensors of a GPU: shapes, dtypes and
launches are checked, and a read of a tensor by the host fails.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedkv import paged_attention
from pagedkv.kernels import case as cases
from pagedkv.kernels import registry
from pagedkv.kernels.library import backend, products
from tests.cases import Case, call_of, moved
from tests.kernels.library.test_library import LIBRARY, NEEDS_A_GPU, ON_A_GPU, PREFILL
from tests.kernels.test_on_gpu import captured
from tests.kernels.triton.compiled import typical_call

FLASH = backend._flash


class Launches:
    """Stand-ins for Triton's kernels on a GPU: they record what they are given."""

    def __init__(self) -> None:
        self.gathered: list[Any] = []
        self.again: list[Any] = []
        self.stored: list[Any] = []
        self.prefixes: list[int | None] = []

    def load(self) -> Launches:
        return self

    def present(self, call: Any, prefix: int | None) -> tuple[Any, Any]:
        B, pages = len(call.seq_lens), -(-call.max_seqlen_k // call.k.shape[1])
        self.prefixes.append(prefix)
        return call.seq_lens.new_empty(B, pages), call.seq_lens.new_empty(3, B)

    def starts_of(self, lens: Any) -> tuple[Any, Any]:
        return lens.new_empty(len(lens) + 1, dtype=torch.int64), lens.new_empty(len(lens) + 1)

    def gather_kv(self, call: Any) -> None:
        self.gathered.append(call)

    def store_states(self, call: Any, states: Any, lens: Any, doubtful: Any) -> None:
        self.stored.append([(out.shape, lse.shape) for out, lse in states])

    def attend_only(self, call: Any, only: Any) -> None:
        self.again.append((call, only))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Stand-ins for all kernels of a GPU."""
    found = Launches()
    monkeypatch.setattr(registry, "other_than", lambda name, case: found)
    monkeypatch.setattr(backend, "_triton", lambda name: found)
    return found


def test_on_a_gpu_the_host_reads_no_tensor(launches: Launches) -> None:
    with FakeTensorMode(), torch.device("cuda:0"):
        call = typical_call(B=2, q_len=2048, n=6000)._replace(rows=torch.zeros(2, dtype=torch.int32))
        backend.paged_attention(call)
        ((gather,), ((again, only),)) = launches.gathered, launches.again
        assert gather.k_out.shape == gather.v_out.shape == (2 * 6000, 8, 128)
        assert gather.source.block_table.shape == (2, 375)
        assert (gather.starts.shape, gather.starts.dtype) == ((3,), torch.int64)
        assert launches.stored == [[((1, 4096, 32, 128), (1, 4096, 32))]]
        assert launches.prefixes == [None]
        assert again is call
        assert (only.shape, only.dtype, only.device) == ((2,), torch.int32, call.q.device)


@pytest.mark.parametrize(
    ("B", "new", "keys", "prefix", "gathered", "shapes"),
    [
        (1, 8192, 8192, 0, 8192, [(8192, 8192, True)]),
        (3, 1100, 1100, 0, 1152, [(1152, 1152, True)]),
        (1, 2048, 32768, 30720, 32768, [(2048, 2048, True), (2048, 30720, False)]),
        (1, 2000, 32768, 30768, 32768, [(2048, 2048, True), (2048, 30720, False)]),
        (1, 2048, 32800, 30752, 32896, [(2176, 2176, True), (2048, 30720, False)]),
        (1, 2048, 3071, 1023, 3072, [(3072, 3072, True)]),
        (1, 2048, 3072, 1024, 3072, [(2048, 2048, True), (2048, 1024, False)]),
    ],
)
def test_cudnn_is_asked_for_squares_and_for_whole_prefixes(
    B: int, new: int, keys: int, prefix: int, gathered: int, shapes: Any, launches: Launches, monkeypatch: Any
) -> None:
    asked: list[Any] = []
    copied: list[Any] = []
    monkeypatch.setattr(products, "_cudnn_serves", lambda *operands: True)
    # a torch without CUDA cannot copy a fake tensor
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, x: copied.append((to.shape, x.shape)))

    def cudnn(q: Any, k: Any, v: Any, *options: Any, scale: float) -> tuple[Any, ...]:
        asked.append((q.shape[2], k.shape[2], options[3]))
        assert k.shape == v.shape
        return torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32), None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    with FakeTensorMode(), torch.device("cuda:0"):
        backend.paged_attention(typical_call(B=B, q_len=new, n=keys))
    assert asked == shapes
    assert copied == [((B, new, 32, 128),) * 2] * (shapes[0][0] != new)
    assert launches.prefixes == [prefix]
    ((gather,), (states,)) = launches.gathered, launches.stored
    assert gather.starts is None
    assert gather.k_out.shape == gather.v_out.shape == (B, gathered, 8, 128)
    assert states == [((B, new, 32, 128), (B, new, 32))] * len(shapes)


def test_queries_that_are_not_aligned_are_copied(by_cudnn: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """CuDNN reads 16 bytes at a time, and ends the process' work on the GPU if their address is no multiple of 16."""
    call = call_of(replace(SQUARE, q_lens=(48,), kv_lens=(48,)).build())
    wide = torch.zeros(48, 9, call.q.shape[2] + 4, dtype=call.q.dtype)
    for q, is_same in (
        (call.q, True),
        (wide[:, :8, : call.q.shape[2]], False),
        (wide.flatten().as_strided(call.q.shape, call.q.stride(), 4), False),
    ):
        found = products.products_of(call._replace(q=q))
        assert found is not None
        assert (found.queries.data_ptr() == q.data_ptr()) is is_same
        assert found.queries[0].equal(q)


# --- the code for a GPU on the CPU ------------------------------------------------------------------------------------


def math(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """Return out and lse [B, H, M, 1] of attention. The mask begins at the first key, as cuDNN's does.

    Weights are rounded to the queries' dtype before the second product, and results at the end.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights.to(q.dtype).float() @ v.float() / total).to(q.dtype), top + total.log()


Shape = tuple[int, ...]


@pytest.fixture
def by_cudnn(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Let the code for a GPU run on the CPU, with a stand-in for cuDNN; return (B, H, queries, keys, causal) of its
    calls. Prefixes from 100 keys on have another product."""
    shapes: list[Shape] = []

    def cudnn(q: Any, k: Any, v: Any, *options: Any, scale: float) -> tuple[Any, ...]:
        bias, with_lse, dropout, causal, with_mask = options
        assert (bias, with_lse, dropout, with_mask) == (None, True, 0.0, False)
        shapes.append((*q.shape[:3], k.shape[2], causal))
        return *math(q, k, v, causal, scale), None

    def empty(self: Any, *size: Any, **about: Any) -> Any:
        """Return a buffer full of NaN."""
        found = new_empty(self, *size, **about)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", empty)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    monkeypatch.setattr(products, "_cudnn_serves", lambda *operands: True)
    monkeypatch.setattr(products, "LEAST_PREFIX", 100)
    monkeypatch.setattr(products, "_step", lambda n: 16)
    on_cpu = backend._on_cpu
    monkeypatch.setattr(backend, "_on_cpu", backend._on_gpu)
    monkeypatch.setattr(backend, "_flash", lambda call, *about: on_cpu(call)[1][0])
    return shapes


SQUARE = Case(q_lens=(40, 40), kv_lens=(40, 40), heads=(8, 2), dtype="bfloat16", layout="HND")
CHUNK = Case(q_lens=(33,), kv_lens=(150,), heads=(8, 2), dtype="bfloat16", layout="HND")


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        (SQUARE, [(2, 8, 48, 48, True)]),
        (replace(SQUARE, q_lens=(48,), kv_lens=(48,)), [(1, 8, 48, 48, True)]),
        (replace(SQUARE, kv="fp8_e4m3/tensor"), [(2, 8, 48, 48, True)]),
        (CHUNK, [(1, 8, 48, 48, True), (1, 8, 48, 112, False)]),
        (replace(CHUNK, kv_lens=(145,)), [(1, 8, 48, 48, True), (1, 8, 48, 112, False)]),
        (replace(CHUNK, dtype="float16", kv_lens=(400,)), [(1, 8, 48, 48, True), (1, 8, 48, 352, False)]),
        (replace(CHUNK, q_lens=(48,), kv_lens=(160,)), [(1, 8, 48, 48, True), (1, 8, 48, 112, False)]),
        (replace(CHUNK, q_lens=(1,)), [(1, 8, 16, 16, True), (1, 8, 16, 144, False)]),
        (replace(CHUNK, kv_lens=(132,)), [(1, 8, 144, 144, True)]),
        (replace(CHUNK, kv="int8/token_head", rows=True), [(1, 8, 48, 48, True), (1, 8, 48, 112, False)]),
    ],
    ids=str,
)
def test_squares_and_chunks_of_one_sequence_go_to_cudnn(
    case: Case, calls: list[Shape], by_cudnn: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = SimpleNamespace(of_gather=cases.Case.of_gather)  # a second computation would fail
    monkeypatch.setattr(backend, "Case", alone)
    LIBRARY.check(case)
    assert by_cudnn == calls


@pytest.mark.parametrize(
    ("case", "punched"),
    [
        (replace(SQUARE, q_lens=(40, 37), kv_lens=(40, 37), padding=3), None),
        (replace(SQUARE, q_lens=(37, 40), kv_lens=(37, 40), padding=3), None),
        (SQUARE, (0, 0)),
        (SQUARE, (1, 2)),
        (CHUNK, (0, 2)),
        (CHUNK, (0, 9)),
        (replace(CHUNK, q_lens=(30,), padding=3), None),
    ],
    ids=str,
)
def test_a_sequence_whose_length_is_not_its_bound_is_computed_again(
    case: Case, punched: tuple[int, int] | None, by_cudnn: list[Shape]
) -> None:
    built = case.build()
    if punched:
        built.batch.block_table[punched] = -1
    if case.padding and len(case.q_lens) == 1:
        built = built._replace(batch=replace(built.batch, max_seqlen_q=33))
    LIBRARY.check(case, built)
    assert by_cudnn


@pytest.mark.parametrize("position", [3, 140])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_value_of_a_chunk_that_is_not_finite_reaches_only_queries_that_see_it(
    number: float, position: int, by_cudnn: list[Shape]
) -> None:
    built = CHUNK.build()
    right, _ = LIBRARY.attend(built)
    frame = built.batch.block_table[0, position // CHUNK.block_size]
    built.layer.v[frame, position % CHUNK.block_size, 1, 5] = number
    out, _ = LIBRARY.attend(built)
    first = max(0, position - (150 - 33))
    assert torch.allclose(out[:first].float(), right[:first].float(), atol=2**-6)
    assert not out[first:, 4:, 5].isfinite().any()
    assert len(by_cudnn) == 4


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("heavy", ["prefix", "new"])
def test_a_value_that_is_not_finite_is_seen_even_where_its_weight_is_0(
    heavy: str, number: float, by_cudnn: list[Shape]
) -> None:
    """All keys of one state have weights below float32's range, compared with those of the other."""
    built = CHUNK.build()
    pages = built.batch.block_table[0, :10].long()
    built.q.fill_(1)
    built.layer.k[pages] = 0
    built.layer.k[pages[:7] if heavy == "new" else pages[7:]] = -40
    position = 3 if heavy == "new" else 149
    built.layer.v[pages[position // CHUNK.block_size], position % CHUNK.block_size, 1, 5] = number
    out, _ = LIBRARY.attend(built)
    first = max(0, position - (150 - 33))
    assert not out[first:, 4:, 5].isfinite().any()
    assert out[:, :4].isfinite().all()
    assert len(by_cudnn) == 2


@pytest.mark.parametrize(
    "case", [PREFILL, replace(SQUARE, kv_lens=(41, 41)), replace(SQUARE, padding=1)], ids=["mixed", "chunks", "padded"]
)
def test_chunks_of_several_sequences_never_go_to_cudnn(case: Case, by_cudnn: list[Shape]) -> None:
    """The host's bound for keys is that of the longest sequence."""
    LIBRARY.check(case)
    assert by_cudnn == []


@pytest.mark.parametrize("case", [SQUARE, CHUNK], ids=["whole", "chunk"])
def test_without_cudnn_they_go_to_flash_attention(
    case: Case, by_cudnn: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_cudnn_serves", lambda q, k, v, causal: causal and case is CHUNK)
    LIBRARY.check(case)
    assert by_cudnn == []


@pytest.mark.parametrize(
    "case",
    [
        replace(PREFILL, q_lens=(1, 1, 1), padding=3),
        replace(PREFILL, q_lens=(1, 0, 1), padding=1),
        replace(PREFILL, q_lens=(1, 0, 1)),
        replace(PREFILL, q_lens=(1,), kv_lens=(40,), padding=3),
    ],
    ids=str,
)
def test_flash_attention_2_serves_decode_with_padding_and_sequences_without_queries(
    case: Case, by_cudnn: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound of 1 query and fewer kv heads than heads, it takes row b of q for the query of sequence b."""

    def forward(q: Any, k: Any, v: Any, starts: Any, ends: Any, bound: int, *others: Any, scale: float) -> Any:
        B = len(starts) - 1
        if bound == 1 and k.shape[1] < q.shape[1]:
            q, starts = q.view(B, *q.shape[1:]), torch.arange(B + 1)
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
        for b in range(B):
            rows, keys = slice(*starts[b : b + 2]), slice(*ends[b : b + 2])
            qkv = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys]))
            if rows.stop > rows.start:
                one, log = math(*qkv, False, scale)
                out[rows], lse[:, rows] = one[0].transpose(0, 1), log[0, :, :, 0]
        return out, lse

    monkeypatch.setattr(products, "_cudnn_serves", lambda *operands: False)
    monkeypatch.setattr(backend, "_flash", FLASH)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    LIBRARY.check(case)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

LARGE = tuple(
    Case(q_lens=(new,) * B, kv_lens=(keys,) * B, heads=(4, 1), dims=(128, 128), dtype=dtype, layout="HND")
    for B, new, keys, dtype in (
        (1, 256, 256, "bfloat16"),  # no copy of the queries
        (2, 200, 200, "float16"),  # padded squares
        (1, 256, 256 + 1024, "bfloat16"),  # two products, no copy
        (1, 200, 200 + 1100, "bfloat16"),  # two products, padded on both sides
        (1, 200, 200 + 1100, "float16"),
        (1, 130, 130 + 500, "bfloat16"),  # the square takes in the prefix
    )
)


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_on_a_gpu_cudnn_serves_squares_and_chunks_of_one_sequence(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.ops.aten._scaled_dot_product_cudnn_attention, []
    # a dispatch mode would see pagedkv's operator, and nothing within
    monkeypatch.setattr(
        torch.ops.aten,
        "_scaled_dot_product_cudnn_attention",
        lambda *operands, **options: (calls.append(operands), real(*operands, **options))[1],
    )
    ON_A_GPU.check(case)
    q = torch.zeros(1, 4, 256, 128, dtype=torch.bfloat16, device="cuda")
    serves = products._cudnn_serves(q, q[:, :1], q[:, :1], True)
    assert len(calls) == (1 + (case.kv_lens[0] >= 1280) if serves else 0)


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.usefixtures("unbound")  # checks of values read them back, which a capture forbids
@pytest.mark.parametrize("case", [LARGE[1], LARGE[3], replace(LARGE[3], q_lens=(200, 90), kv_lens=(1300, 90))], ids=str)
def test_on_a_gpu_a_graph_replays_what_a_call_computes(case: Case) -> None:
    built = case.build()
    q, layer, batch = (moved(x, "cuda") for x in built[:3])
    into = torch.empty_like(q)
    for _ in range(3):
        right = paged_attention(q, layer, batch, backend="library")
    torch.cuda.synchronize()
    graph, _ = captured(lambda: paged_attention(q, layer, batch, out=into, backend="library"))
    for _ in range(3):
        into.fill_(torch.nan)
        graph.replay()
        assert torch.equal(into, right)
