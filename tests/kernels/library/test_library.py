"""The backend "library": the geometry of the whole grid without options, what it does not see, and when "auto" asks it.

On the CPU torch's flash attention for the CPU stands in for that of GPUs. The rest of the code is the same there, and
is run for a GPU too, with fake tensors: shapes, dtypes and launches are checked, and a read of a tensor by the host
fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedkv import KernelUnavailable, bind_attention, explain, paged_attention
from pagedkv.kernels import case as cases
from pagedkv.kernels import registry
from pagedkv.kernels.library import backend
from pagedkv.kernels.registry import Kernel
from tests.cases import GRID, SMALL, Case, call_of
from tests.kernels.conftest import Runner
from tests.kernels.hostile.test_values import check_hidden_values
from tests.kernels.oracle import allowed_error, oracle, same_precision
from tests.kernels.triton.compiled import typical_call

LIBRARY, ON_A_GPU = Runner("library", "cpu"), Runner("library", "cuda")
NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def plain(case: Case) -> Case:
    """Return `case` as the library can serve it: its lengths, heads, pool and tables, without options."""
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    dims = (min(256, case.dims[1]),) * 2
    kv_lens = tuple(max(n, q) if n else 0 for q, n in zip(case.q_lens, case.kv_lens, strict=True))
    geometry = ("q_lens", "heads", "block_size", "layout", "kv", "rows", "punched", "padding")
    return Case(dtype=dtype, dims=dims, kv_lens=kv_lens, **{name: getattr(case, name) for name in geometry})


CASES = tuple(dict.fromkeys(plain(case) for case in (*SMALL, *GRID)))


PREFILL = Case(q_lens=(33, 1, 20), kv_lens=(150, 40, 20), heads=(8, 2), dtype="bfloat16", layout="HND")


def quick(case: Case) -> bool:
    """Return whether the oracle takes little time."""
    return case.heads[0] * sum(m * n for m, n in zip(case.q_lens, case.kv_lens, strict=True)) < 10_000


@pytest.mark.parametrize(
    "case", [case if quick(case) else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=str
)
def test_the_grid_without_options_keeps_the_contract(case: Case) -> None:
    keeps_the_contract(case, LIBRARY)


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_grid_without_options_keeps_the_contract_on_a_gpu(case: Case) -> None:
    keeps_the_contract(case, ON_A_GPU)


def keeps_the_contract(case: Case, runner: Runner) -> None:
    built = case.build()
    out, lse = (x.double().numpy()[: sum(case.q_lens)] for x in runner.attend(built))
    exact, yardstick = ((x[: len(out)] for x in state) for state in (oracle(built), same_precision(built)))
    (right, right_lse), (low, low_lse) = exact, yardstick
    seen = ~np.isneginf(right_lse)
    assert (np.isneginf(lse) == ~seen).all()
    assert (out[~seen] == 0).all()
    assert np.abs(out - right).max(initial=0.0) <= allowed_error(case, right, low)
    error = np.abs(lse[seen] - right_lse[seen]).max(initial=0.0)
    assert error <= allowed_error(case, right_lse[seen], low_lse[seen])


def test_the_grid_has_punched_pages_of_old_tokens_and_of_new_ones() -> None:
    doubtful = [backend._present(call_of(case.build()))[2].any() for case in CASES if case.punched]
    assert any(doubtful)
    assert not all(doubtful)


@pytest.mark.parametrize("punched", [False, True])
def test_flash_attention_computes_what_another_kernel_need_not_compute_again(
    punched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = PREFILL.build()
    if punched:
        built.batch.block_table[0, [2, 5]] = -1
    monkeypatch.setattr(backend, "attention_case", None)  # a second computation would fail
    out, lse = LIBRARY.attend(built)
    exact, low = oracle(built), same_precision(built)
    assert np.abs(out.double().numpy() - exact.out).max() <= allowed_error(PREFILL, exact.out, low.out)
    assert np.abs(lse.double().numpy() - exact.lse).max() <= allowed_error(PREFILL, exact.lse, low.lse)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("kv", ["", "fp8_e4m3/tensor", "int8/token_head"])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(kv: str, number: float) -> None:
    check_hidden_values(replace(PREFILL, kv=kv), LIBRARY, number)


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("kv", ["", "fp8_e4m3/tensor", "int8/token_head"])
def test_on_a_gpu_a_value_that_is_not_finite_reaches_only_queries_that_see_it(kv: str) -> None:
    check_hidden_values(replace(PREFILL, kv=kv), ON_A_GPU, whole_rows=True)


def test_a_long_sequence_alone_is_computed_again_where_its_result_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    built, served = PREFILL.build(), []
    built.layer.v[built.batch.block_table[0, 9], 3, 1, 5] = torch.nan
    real = registry.other_than

    def other_than(name: str, case: cases.Case) -> Kernel:
        served.append((name, case.op))
        return real(name, case)

    monkeypatch.setattr(registry, "other_than", other_than)
    LIBRARY.attend(built)
    assert served == [("library", "gather_kv"), ("library", "paged_attention")]


class Launches:
    """Stand-ins for Triton's kernels on a GPU: they record what they are given."""

    def __init__(self) -> None:
        self.gathered: list[Any] = []
        self.again: list[Any] = []

    def load(self) -> Launches:
        return self

    def gather_kv(self, call: Any) -> None:
        self.gathered.append(call)

    def attend_only(self, call: Any, only: Any) -> None:
        self.again.append((call, only))


@pytest.mark.parametrize("rows", [False, True])
def test_on_a_gpu_the_host_reads_no_tensor(rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(registry, "other_than", lambda name, case: launches)
    monkeypatch.setattr(backend, "_triton", lambda name: launches)
    with FakeTensorMode(), torch.device("cuda:0"):
        call = typical_call(B=2, q_len=2048, n=6000)
        if rows:
            call = call._replace(rows=torch.zeros(2, dtype=torch.int32))
        backend.paged_attention(call)
        ((gather,), ((again, only),)) = launches.gathered, launches.again
        assert gather.k_out.shape == gather.v_out.shape == (2 * 6000, 8, 128)
        assert gather.source.block_table.shape == (2, 375)
        assert (gather.starts.shape, gather.starts.dtype) == ((3,), torch.int64)
        assert again is call
        assert (only.shape, only.dtype, only.device) == ((2,), torch.int32, call.q.device)


# --- the choice between FlashAttention 3, cuDNN and FlashAttention 2 --------------------------------------------------


def math(q: Any, k: Any, v: Any, *, scale: float) -> tuple[Any, Any]:
    """Return out and lse [B, H, M, 1] of attention whose mask begins at the first key, as cuDNN's does."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).float() for x in (k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    scores = (q.float() @ k.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).to(q.dtype), scores.logsumexp(-1, keepdim=True)


@pytest.fixture
def by_cudnn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let the code for a GPU run on the CPU, with a stand-in for cuDNN; return the shapes of its queries."""
    shapes: list[tuple[int, ...]] = []

    def cudnn(q: Any, k: Any, v: Any, *options: Any, scale: float) -> tuple[Any, ...]:
        assert options == (None, True, 0.0, True, False)
        shapes.append(tuple(q.shape))
        return *math(q, k, v, scale=scale), None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    monkeypatch.setattr(backend, "_cudnn_serves", lambda q, k, v: True)
    on_cpu, gathered = backend._on_cpu, backend._gathered

    def gathered_on_gpu(call: Any, *about: Any) -> tuple[Any, ...]:
        """Return buffers as large as the bounds allow, with NaN after the last key."""
        k, v, starts = gathered(call, *about)
        rows = len(call.seq_lens) * call.max_seqlen_k - len(k)
        return *(torch.cat([x, x.new_full((rows, *x.shape[1:]), torch.nan)]) for x in (k, v)), starts

    monkeypatch.setattr(backend, "_on_cpu", backend._on_gpu)
    monkeypatch.setattr(backend, "_gathered", gathered_on_gpu)
    monkeypatch.setattr(backend, "_flash", lambda call, *about: on_cpu(call, *backend._present(call)[:2])[:2])
    return shapes


SQUARE = Case(q_lens=(40, 40), kv_lens=(40, 40), heads=(8, 2), dtype="bfloat16", layout="HND")


def test_whole_prompts_of_one_length_go_to_cudnn(
    by_cudnn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "attention_case", None)  # a second computation would fail
    keeps_the_contract(SQUARE, LIBRARY)
    assert by_cudnn == [(2, 8, 40, SQUARE.dims[0])]


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lens": (40, 37), "kv_lens": (40, 37), "padding": 3},
        {"q_lens": (37, 40), "kv_lens": (37, 40), "padding": 3},
        {"kv_lens": (40, 40), "punched": True},
    ],
    ids=["a short last one", "a short first one", "a punched page"],
)
def test_prompts_that_the_host_takes_for_whole_ones_are_computed_again(
    changes: dict[str, Any], by_cudnn: list[tuple[int, ...]]
) -> None:
    case = replace(SQUARE, **{name: value for name, value in changes.items() if name != "punched"})
    built = case.build()
    if "punched" in changes:
        built.batch.block_table[0, 0] = -1
    out, lse = LIBRARY.attend(built)
    assert len(by_cudnn) == 1
    rows, exact, low = sum(case.q_lens), oracle(built), same_precision(built)
    error = np.abs(out.double().numpy()[:rows] - exact.out[:rows]).max()
    assert error <= allowed_error(case, exact.out[:rows], low.out[:rows])
    seen = ~np.isneginf(exact.lse[:rows])
    error = np.abs(lse.double().numpy()[:rows][seen] - exact.lse[:rows][seen]).max()
    assert error <= allowed_error(case, exact.lse[:rows][seen], low.lse[:rows][seen])


@pytest.mark.parametrize("case", [PREFILL, replace(SQUARE, kv_lens=(41, 41))], ids=["mixed", "chunks"])
def test_chunks_never_go_to_cudnn(case: Case, by_cudnn: list[tuple[int, ...]]) -> None:
    keeps_the_contract(case, LIBRARY)
    assert by_cudnn == []


def test_without_cudnn_whole_prompts_go_to_flash_attention(
    by_cudnn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    if not torch.cuda.is_available() and torch.version.cuda is None:  # a build for CUDA asks the driver
        q = torch.zeros(1, 4, 8, 64, dtype=torch.bfloat16)
        assert backend._cudnn_serves(q, q[:, :2], q[:, :2]) is False, "torch's own check decides"
    keeps_the_contract(SQUARE, LIBRARY)
    assert by_cudnn == []


@pytest.mark.parametrize(
    ("active", "kv", "gathers"), [("FA3", "", 0), ("FA3", "fp8_e4m3/tensor", 1), ("FA4", "", 1), (None, "", 1)]
)
def test_flash_attention_3_reads_a_pool_of_the_queries_dtype_in_its_pages(
    active: str | None, kv: str, gathers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, given = Launches(), []
    monkeypatch.setattr(registry, "other_than", lambda name, case: launches)
    monkeypatch.setattr(backend, "_triton", lambda name: launches)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active, raising=False)
    monkeypatch.setattr(backend, "_takes_pages", lambda: True)

    def forward(q: Any, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        given.append((arguments, named))
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    with FakeTensorMode(), torch.device("cuda:0"):
        call = typical_call(B=2, q_len=2048, n=6000, kv=kv)
        backend.paged_attention(call)
    assert len(launches.gathered) == gathers
    (((k, v, starts, ends, *numbers), named),) = given
    assert numbers == [2048, 6000, 0.0, True, False]
    if gathers:
        assert (k.shape, ends.dtype, set(named)) == ((2 * 6000, 8, 128), torch.int32, {"scale"})
    else:
        assert (k is call.k, v is call.v, starts is call.cu_seqlens_q, ends) == (True, True, True, None)
        assert (named["block_table"].shape, named["block_table"].dtype) == ((2, 375), torch.int32)
        assert (named["seqused_k"].shape, named["seqused_k"].dtype) == ((2,), torch.int32)


def test_torchs_operator_takes_pages_where_its_schema_says_so() -> None:
    takes = "block_table" in str(torch.ops.aten._flash_attention_forward.default._schema)
    assert backend._takes_pages() is takes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "q is float32; it takes bfloat16 and float16"),
        ({"head_dim": 192, "head_dim_v": 128}, "head_dim is 192 and head_dim_v 128; it takes equal ones"),
        ({"head_dim": 288, "head_dim_v": 288}, "head_dim is 288; it takes multiples of 8 up to 256"),
        ({"head_dim": 100, "head_dim_v": 100}, "head_dim is 100; it takes multiples of 8 up to 256"),
        (
            {"features": frozenset({"softcap", "sinks"})},
            "causal attention without options; the call has sinks, softcap",
        ),
        *(
            ({"features": frozenset({name})}, f"the call has {name}")
            for name in ("window", "alibi_slopes", "tree_mask", "non_causal", "split_tokens")
        ),
        ({"device": "cuda"}, "torch finds no GPU on this machine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the text of a set differs from process to process
)
def test_the_library_says_what_it_does_not_do(changes: dict[str, Any], reason: str) -> None:
    served = cases.Case(dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, head_dim_v=128, block_size=16)
    assert not backend.objections(served)
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("here is a GPU")
    found = backend.objections(served._replace(**changes))
    assert any(reason in why for why in found), found


def test_each_option_is_refused_by_name() -> None:
    built = replace(PREFILL, softcap=20.0).build()
    with pytest.raises(KernelUnavailable, match="the call has softcap"):
        paged_attention(built.q, built.layer, built.batch, backend="library", **built.options)


# --- when "auto" asks it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named(Kernel):
    """A kernel whose bound calls append its name to `out`."""

    def load(self) -> Any:
        return SimpleNamespace(bind_attention=lambda layer, options: lambda *call: call[-2].append(self.name))


LONG = cases.Case(device="cuda", dtype="bfloat16", features=frozenset({"long_prefill"}))
WHOLE = LONG._replace(features=frozenset({"long_prefill", "whole_prompts"}))
NAMES = ("triton", "cuda", "library", "reference")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kernels of a machine with a GPU; those in the set object."""
    objecting: set[str] = set()
    monkeypatch.delenv("PAGEDKV_KERNELS", raising=False)

    def kernel(name: str) -> Kernel:
        return Named(name, ("cuda",), "", lambda case: ["no"] if name in objecting else [])

    monkeypatch.setattr(registry, "KERNELS", tuple(map(kernel, NAMES)))
    return objecting


@pytest.mark.parametrize(
    ("case", "order"),
    [(LONG, ("triton", "library", "cuda", "reference")), (WHOLE, ("library", "triton", "cuda", "reference"))],
    ids=["chunk", "whole"],
)
def test_a_long_prefill_goes_to_cuda_only_where_neither_the_library_nor_triton_can(
    case: cases.Case, order: tuple[str, ...], on_a_gpu: set[str]
) -> None:
    """A whole prompt goes to the library, which has cuDNN for it; a chunk to Triton."""
    for name in order:
        registry._resolve.cache_clear()
        assert registry.resolve(case).name == explain(case).chosen == name
        on_a_gpu.add(name)


def test_decode_never_goes_to_the_library(on_a_gpu: set[str]) -> None:
    on_a_gpu.update(("triton", "cuda"))
    other = LONG._replace(features=frozenset())
    assert registry.resolve(other).name == explain(other).chosen == "reference"
    assert registry.resolve(other, "library").name == "library"


def test_on_a_cpu_auto_never_asks_the_library() -> None:
    built = Case(q_lens=(2048,), kv_lens=(2048,), dtype="bfloat16").build()
    call = call_of(built)
    case = cases.attention_case(call, call, call.q, batch=(call.seq_lens, call.max_seqlen_k))
    assert "library" not in [kernel.name for kernel in registry.in_order(case)]


@pytest.mark.parametrize(
    ("lens", "B", "longest", "features"),
    [
        ((1024,), 1, 1024, {"long_prefill", "whole_prompts"}),
        ((2048, 2048), 2, 2048, {"long_prefill", "whole_prompts"}),
        ((2048, 1500), 2, 2048, {"long_prefill"}),
        ((1023,), 1, 1023, {}),
        ((8192,), 1, 32768, {"long_prefill"}),
        ((1, 1), 2, 131072, {}),
        ((2048, *(1,) * 63), 64, 4096, {}),  # a chunk beside many sequences that decode
        ((3000, 1), 2, 4096, {"long_prefill"}),
        ((2048,) * 4, 4, 131072, {}),  # the copy would take 2 GiB
    ],
)
def test_a_prefill_is_long_if_its_queries_are_worth_a_copy_of_the_keys(
    lens: tuple[int, ...], B: int, longest: int, features: set[str]
) -> None:
    with FakeTensorMode(), torch.device("cuda:0"):
        call = typical_call(B=B, n=longest)._replace(q=torch.empty(sum(lens), 32, 128, dtype=torch.bfloat16))
        case = cases.attention_case(call, call, call.q, batch=(call.seq_lens, call.max_seqlen_k))
    assert case.features == {*features}


@pytest.mark.parametrize(
    ("queries", "B", "keys", "objecting", "kernel"),
    [
        (1, 1, 8192, "", "triton"),
        (1024, 1, 1024, "", "library"),
        (1024, 1, 1025, "", "triton"),
        (1024, 1, 1025, "triton", "library"),
        (2000, 2, 1000, "triton", "cuda"),
        (4096, 1, 4096, "", "library"),
    ],
)
def test_a_bound_call_sends_each_call_to_the_kernel_that_is_first_for_it(
    queries: int, B: int, keys: int, objecting: str, kernel: str, request: pytest.FixtureRequest
) -> None:
    """The layer is on the CPU; the kernels, and the device that the queries name, are those of a GPU."""
    attend = bind_attention(PREFILL.build().layer)
    request.getfixturevalue("on_a_gpu").add(objecting)
    registry._resolve.cache_clear()
    case = LONG._replace(features=frozenset())
    serve = attend._server(case, registry.resolve(case, None))
    q = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=(queries, 8, 64))
    lens, served = SimpleNamespace(shape=(B,)), []
    serve(q, None, None, lens, None, queries, keys, None, None, served, None)
    assert served == [kernel]
