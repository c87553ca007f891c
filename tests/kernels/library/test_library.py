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
    doubtful = [backend._present(call_of(case.build())).doubtful.any() for case in CASES if case.punched]
    assert any(doubtful)
    assert not all(doubtful)


@pytest.mark.parametrize("punched", [False, True])
def test_flash_attention_computes_what_another_kernel_need_not_compute_again(
    punched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = PREFILL.build()
    if punched:
        built.batch.block_table[0, [2, 5]] = -1
    alone = SimpleNamespace(of_gather=cases.Case.of_gather)  # a second computation would fail
    monkeypatch.setattr(backend, "Case", alone)
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
    check_hidden_values(replace(PREFILL, kv=kv), ON_A_GPU)


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
NAMES = ("cuda", "triton", "library", "reference")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kernels of a machine with a GPU; those in the set object."""
    objecting: set[str] = set()
    monkeypatch.delenv("PAGEDKV_KERNELS", raising=False)

    def kernel(name: str) -> Kernel:
        return Named(name, ("cuda",), "", lambda case: ["no"] if name in objecting else [])

    monkeypatch.setattr(registry, "KERNELS", tuple(map(kernel, NAMES)))
    return objecting


def test_a_long_prefill_goes_to_the_library_then_to_triton_then_to_cuda(on_a_gpu: set[str]) -> None:
    for name in ("library", "triton", "cuda", "reference"):
        registry._resolve.cache_clear()
        assert registry.resolve(LONG).name == explain(LONG).chosen == name
        on_a_gpu.add(name)


@pytest.mark.parametrize(
    ("features", "order"),
    [(frozenset(), ("cuda", "triton", "reference")), (frozenset({"prefill"}), ("triton", "cuda", "reference"))],
)
def test_no_other_call_goes_to_the_library(
    features: frozenset[str], order: tuple[str, ...], on_a_gpu: set[str]
) -> None:
    """A decode goes to "cuda" first, a prefill of fewer tokens to "triton"."""
    case = LONG._replace(features=features)
    assert registry.resolve(case, "library").name == "library"
    for name in order:
        registry._resolve.cache_clear()
        assert registry.resolve(case).name == explain(case).chosen == name
        on_a_gpu.add(name)


def test_a_gather_on_a_gpu_asks_triton_before_cuda() -> None:
    """They take 82 and 188 us on an H200 for 32,768 tokens. All other moves ask cuda first."""
    names = [kernel.name for kernel in registry.in_order(cases.Case("gather_kv", "cuda", "bfloat16"))]
    assert names.index("triton") < names.index("cuda") < names.index("reference")
    others = [kernel.name for kernel in registry.in_order(cases.Case("write_kv", "cuda", "bfloat16"))]
    assert others.index("cuda") < others.index("triton")


def test_on_a_cpu_auto_never_asks_the_library() -> None:
    built = Case(q_lens=(2048,), kv_lens=(2048,), dtype="bfloat16").build()
    call = call_of(built)
    case = cases.Case.of_attention(call, call, call.q, batch=(call.seq_lens, call.max_seqlen_k))
    assert "library" not in [kernel.name for kernel in registry.in_order(case)]


@pytest.mark.parametrize(
    ("lens", "B", "longest", "features"),
    [
        ((512,), 1, 512, {"long_prefill"}),
        ((1024, 1024), 2, 2048, {"long_prefill"}),
        ((600, 424), 2, 2048, {"long_prefill"}),
        ((511,), 1, 511, {"prefill"}),
        ((8,), 1, 8192, {}),
        ((9,), 1, 8192, {"prefill"}),
        ((16,) * 7, 7, 8192, {"prefill"}),
        ((16,) * 8, 8, 8192, {}),  # drafts of a batch
        ((17,) * 8, 8, 8192, {"prefill"}),
        ((8192,), 1, 32768, {"long_prefill"}),
        ((1, 1), 2, 131072, {}),
        ((512, *(1,) * 63), 64, 4096, {}),  # a chunk beside many sequences that decode
        ((2048, *(1,) * 63), 64, 4096, {"prefill"}),
        ((3000, 1), 2, 4096, {"long_prefill"}),
        ((2048,) * 4, 4, 131072, {"prefill"}),  # the copy would take 2 GiB
    ],
)
def test_a_prefill_is_long_if_its_queries_are_worth_a_copy_of_the_keys(
    lens: tuple[int, ...], B: int, longest: int, features: set[str]
) -> None:
    with FakeTensorMode(), torch.device("cuda:0"):
        call = typical_call(B=B, n=longest)._replace(q=torch.empty(sum(lens), 32, 128, dtype=torch.bfloat16))
        case = cases.Case.of_attention(call, call, call.q, batch=(call.seq_lens, call.max_seqlen_k))
    assert case.features == {*features}


@pytest.mark.parametrize(
    ("queries", "B", "keys", "objecting", "kernel"),
    [
        (1, 1, 8192, "", "cuda"),
        (8, 8, 8192, "cuda", "triton"),
        (9, 1, 8192, "", "triton"),
        (128, 8, 8192, "", "cuda"),
        (136, 8, 8192, "", "triton"),
        (512, 1, 512, "", "library"),
        (511, 1, 511, "", "triton"),
        (512, 1, 32768, "", "library"),
        (512, 1, 513, "library", "triton"),
        (1000, 2, 1000, "triton", "cuda"),
        (1024, 2, 1000, "triton", "library"),
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
