"""The backend "library": the geometry of the whole grid without options, what it does not see, and when "auto" asks it.

On the CPU torch's flash attention for the CPU stands in for that of GPUs. The rest of the code is the same there, and
is run for a GPU too, with fake tensors: shapes, dtypes and launches are checked, and a read of a tensor by the host
fails.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedkv import explain
from pagedkv.kernels import case as cases
from pagedkv.kernels import registry
from pagedkv.kernels.library import backend
from pagedkv.kernels.registry import Kernel
from tests.cases import GRID, SMALL, Case
from tests.kernels.conftest import Runner
from tests.kernels.hostile.test_values import check_hidden_values
from tests.kernels.triton.compiled import typical_call

LIBRARY, ON_A_GPU = Runner("library"), Runner("library", "cuda")
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


def is_quick(case: Case) -> bool:
    """Return whether the oracle takes little time."""
    return case.heads[0] * sum(m * n for m, n in zip(case.q_lens, case.kv_lens, strict=True)) < 10_000


QUICK = [case for case in CASES if is_quick(case)][::3]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES], ids=str
)
def test_the_grid_without_options_keeps_the_contract(case: Case) -> None:
    LIBRARY.check(case)


@pytest.mark.gpu
@NEEDS_A_GPU
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_grid_without_options_keeps_the_contract_on_a_gpu(case: Case) -> None:
    ON_A_GPU.check(case)


@pytest.mark.parametrize("punched", [False, True])
def test_flash_attention_computes_what_another_kernel_need_not_compute_again(
    punched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = PREFILL.build()
    if punched:
        built.batch.block_table[0, [2, 5]] = -1
    alone = SimpleNamespace(of_gather=cases.Case.of_gather)  # a second computation would fail
    monkeypatch.setattr(backend, "Case", alone)
    LIBRARY.check(PREFILL, built)


@pytest.mark.parametrize("kv", ["", "fp8_e4m3/tensor", "int8/token_head"])
@pytest.mark.parametrize(
    "on", [LIBRARY, pytest.param(ON_A_GPU, marks=[pytest.mark.gpu, NEEDS_A_GPU])], ids=["cpu", "cuda"]
)
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(on: Runner, kv: str) -> None:
    for number in (torch.nan, torch.inf):
        check_hidden_values(replace(PREFILL, kv=kv), on, number)


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


# --- when "auto" asks it ----------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kernels of a machine with a GPU; those in the set object, and all to a feature in it."""
    objecting: set[str] = {"in_pages"}
    monkeypatch.delenv("PAGEDKV_KERNELS", raising=False)

    def kernel(name: str) -> Kernel:
        return Kernel(name, ("cuda",), "", lambda case: ["no"] * bool(objecting & {name, *case.features}))

    monkeypatch.setattr(registry, "KERNELS", tuple(map(kernel, ("cuda", "triton", "library", "reference"))))
    return objecting


@pytest.mark.parametrize(
    ("op", "features", "order"),
    [
        ("paged_attention", (), ("cuda", "triton", "reference")),
        ("paged_attention", ("prefill",), ("triton", "cuda", "reference")),
        ("paged_attention", ("long_prefill",), ("library", "triton", "cuda", "reference")),
        ("gather_kv", (), ("triton", "cuda", "reference")),
        ("write_kv", (), ("cuda", "triton", "reference")),
    ],
)
def test_each_kind_of_call_has_its_order_of_kernels(
    op: str, features: tuple[str, ...], order: tuple[str, ...], on_a_gpu: set[str]
) -> None:
    case = cases.Case(op, "cuda", "bfloat16", features=frozenset(features))
    assert registry.resolve(case, "library").name == "library"
    for name in order:
        registry._resolve.cache_clear()
        assert registry.resolve(case).name == explain(case).chosen == name
        on_a_gpu.add(name)


def test_latents_of_more_than_32_heads_go_to_triton(on_a_gpu: set[str]) -> None:
    case = cases.Case("paged_attention", "cuda", "bfloat16", head_dim=576, head_dim_v=512, num_kv_heads=1)
    assert [registry.resolve(case._replace(num_heads=H)).name for H in (32, 33)] == ["cuda", "triton"]
    assert registry.resolve(case._replace(num_heads=64, head_dim=128, head_dim_v=128)).name == "cuda"


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
        ((512, *(1,) * 63), 64, 4096, {}),  # a chunk with many sequences that decode
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
        fixed = cases.Case.of_attention(call, call._replace(split_tokens=64), call.q, batch=(call.seq_lens, longest))
    assert case.features == {*features}
    assert fixed.features == {"split_tokens"}  # one kernel, whatever else is in the batch
