"""The choice between FlashAttention 3, cuDNN and FlashAttention 2 in the backend "library", and the calls of cuDNN.

The code for a GPU runs on the CPU with stand-ins for cuDNN and FlashAttention 3, and with fake tensors of a GPU:
shapes, dtypes and launches are checked, and a read of a tensor by the host fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedkv import paged_attention
from pagedkv.kernels import case as cases
from pagedkv.kernels import reference, registry
from pagedkv.kernels.args import AttentionCall
from pagedkv.kernels.library import backend, products
from tests.cases import Case, call_of, moved
from tests.kernels.library.test_library import LIBRARY, NEEDS_A_GPU, ON_A_GPU, PREFILL
from tests.kernels.test_on_gpu import captured
from tests.kernels.triton.compiled import typical_call

FLASH, FLASH_3 = backend._flash, backend._flash_attention_3


@pytest.fixture(autouse=True)
def without_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide vLLM's FlashAttention 3, which another test may have loaded."""
    monkeypatch.setattr(backend, "_flash_attention_3", lambda: None)


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


def test_cudnn_serves_where_its_switch_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM turns the switch off, which torch's own check obeys and the operator does not."""
    served = []
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    for gpu, version, dim in (((9, 0), 91900, 128), ((8, 9), 91900, 128), ((9, 0), 91500, 128), ((9, 0), 91900, 136)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, gpu=gpu: gpu)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        q = torch.zeros(2, 8, 128, dim, dtype=torch.bfloat16)
        served.append(products._cudnn_serves(q, q[:, :2], q[:, :2], True))
    assert served == [True, False, False, False]


# --- FlashAttention 3 of vLLM -----------------------------------------------------------------------------------------

FA3 = (
    "Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
)
"""The arguments of torch.ops._vllm_fa3_C.fwd in vLLM 0.33."""
READS = backend._reads_pages


@pytest.fixture
def by_fa3(by_cudnn: list[Shape], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Let an operator of vLLM's name and schema compute by the reference; return the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def forward(*given: Any) -> list[Any]:
        x = dict(zip((part.split()[-1] for part in FA3.split(", ")), given, strict=True))
        calls.append({name: value for name, value in x.items() if value is not None})
        q, left, sinks = x["q"], x["window_size_left"], x["s_aux"]
        assert len(x["page_table"]) == len(x["seqused_k"]) == len(x["cu_seqlens_q"]) - 1
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
        reference.paged_attention(
            AttentionCall(
                x["k"], x["v"], None, None, None, x["softmax_scale"], x["is_causal"], None if left < 0 else left + 1,
                None, x["softcap"], None if sinks is None else sinks.float(), None, None, q, x["page_table"], None,
                x["seqused_k"], x["cu_seqlens_q"], x["max_seqlen_q"], x["max_seqlen_k"], None, None, out, lse,
            )
        )  # fmt: skip
        return [out, lse.t().contiguous(), q.new_empty(0), q.new_empty(0)]

    registry._resolve.cache_clear()
    # a hole among new tokens leaves fewer keys than queries; such a sequence is computed again
    monkeypatch.setattr(reference.checks, "table_values", lambda call: None)
    with torch.library._scoped_library("_vllm_fa3_C", "DEF") as library:
        library.define(f"fwd({FA3}) -> Tensor[]")
        library.impl("fwd", forward, "CPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(backend, "_flash_attention_3", FLASH_3)
        monkeypatch.setattr(backend, "_reads_pages", lambda case: READS(case._replace(device="cuda")))
        yield calls
    registry._resolve.cache_clear()


@pytest.mark.parametrize(
    ("case", "num_calls"),
    [
        (PREFILL, 1),
        (CHUNK, 1),
        (SQUARE, 0),  # cuDNN
        (replace(SQUARE, softcap=5.0), 1),
        (replace(PREFILL, window=30, punched=True, rows=True, padding=3), 1),
        (replace(PREFILL, window=30, softcap=5.0, sinks=True, dtype="float16", layout="mixed"), 1),
        (replace(PREFILL, q_lens=(33, 5), kv_lens=(150, 0), sinks=True, heads=(6, 3), block_size=24), 1),
        (replace(PREFILL, window=2**40, dims=(80, 80), block_size=1), 1),
        (replace(PREFILL, kv="fp8_e4m3/tensor"), 0),
    ],
    ids=str,
)
def test_flash_attention_3_keeps_the_contract(case: Case, num_calls: int, by_fa3: list[Any]) -> None:
    built = case.build()
    if case.sinks and case.dtype == "bfloat16":  # no number of the others is one of bfloat16
        built.options["sinks"] = built.options["sinks"].bfloat16().float()
    LIBRARY.check(case, built)
    assert len(by_fa3) == num_calls


def test_flash_attention_3_gets_these_arguments(by_fa3: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(PREFILL, window=30, softcap=5.0, sinks=True)
    (built := case.build()).options["sinks"] = torch.arange(8.0)
    monkeypatch.setattr(backend, "_other", None)  # a second computation would fail
    LIBRARY.check(case, built)
    tensors = {name: value for name, value in by_fa3[0].items() if isinstance(value, torch.Tensor)}
    assert {name: value for name, value in by_fa3[0].items() if name not in tensors} == {
        "max_seqlen_q": 33, "max_seqlen_k": 150, "softmax_scale": 0.125, "is_causal": True, "window_size_left": 29,
        "window_size_right": 0, "softcap": 5.0, "is_rotary_interleaved": False, "num_splits": 0, "sm_margin": 0,
        "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    assert set(tensors) == {"q", "k", "v", "cu_seqlens_q", "seqused_k", "page_table", "s_aux"}
    assert tensors["k"].data_ptr() == built.layer.k.data_ptr()


@pytest.mark.parametrize("window", [None, 30])
def test_a_pool_that_is_not_aligned_is_not_read_by_flash_attention_3(
    window: int | None, by_fa3: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, other = [], registry.other_than
    monkeypatch.setattr(registry, "other_than", lambda name, of: asked.append(of) or other(name, of))
    monkeypatch.setattr(cases, "prefill_of", lambda *_: "prefill")  # as on a GPU
    case = replace(PREFILL, window=window)
    built = case.build()
    k = torch.full((built.layer.k.numel() + 4,), torch.nan, dtype=built.layer.k.dtype)[4:]
    k = k.as_strided(built.layer.k.shape, built.layer.k.contiguous().stride(), 4).copy_(built.layer.k)
    LIBRARY.check(case, built._replace(layer=replace(built.layer, k=k)))
    assert not by_fa3
    assert window is None or "prefill" in asked[0].features


@pytest.mark.usefixtures("by_fa3")
def test_all_prefills_go_to_flash_attention_3_where_it_reads_the_pages() -> None:
    case = cases.Case(dtype="bfloat16", kv_dtype="bfloat16", features=frozenset({"prefill", "window"}))
    others: list[dict[str, Any]] = [{"kv_dtype": "fp8_e4m3"}, {"features": frozenset({"prefill", "alibi_slopes"})}]
    firsts = [registry.in_order(case._replace(**other))[0].name == "library" for other in [{}, *others]]
    assert firsts == [True, False, False]


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
@pytest.mark.parametrize(
    "options", [{}, {"window": 300}, {"softcap": 5.0}, {"sinks": True}, {"punched": True}], ids=str
)
def test_on_a_gpu_flash_attention_3_keeps_the_contract(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file for folder in sys.path if (file := Path(folder, "_vllm_fa3_C.abi3.so")).is_file()]
    if not files:
        pytest.skip("vLLM's FlashAttention 3 is not on Python's path: `make gpu-kit` brings it")
    torch.ops.load_library(files[0])
    calls, real = [], backend._flash_in_pages
    monkeypatch.setattr(backend, "_flash_attention_3", FLASH_3)
    monkeypatch.setattr(backend, "_flash_in_pages", lambda *given: (calls.append(given), real(*given))[1])
    for case in (LARGE[4], replace(LARGE[0], q_lens=(200, 1, 90), kv_lens=(1300, 700, 90), padding=3, rows=True)):
        (built := replace(case, **options).build()).options["sinks"] = torch.arange(4.0) if "sinks" in options else None
        ON_A_GPU.check(replace(case, **options), built)
    assert len(calls) == 2


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
