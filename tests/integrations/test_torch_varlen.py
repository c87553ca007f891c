"""torch's own `varlen_attn` and `varlen_attn_out` over pages on a CPU, against plain torch and SDPA with a gather.

Memory that must not be read is NaN, and entries past the last page name no page.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.errors import InvalidRequest
from pagedkv.integrations import torch_varlen
from tests.integrations.plain import Pool, attention, close

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
    pytest.skip("varlen_attn of this torch knows no pages", allow_module_level=True)
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl  # noqa: E402

H, K, D = 4, 2, 16
COUNTS, LENGTHS = [1, 4, 3], [19, 4, 40]
WINDOWS = [(-1, -1), (-1, 0), (5, 0), (5, 2), (-1, 2), (4, -1), (0, 0)]
AUX = varlen.AuxRequest(lse=True)


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    torch_varlen.activate()
    yield
    restore_flash_attention_impl(_raise_warn=False)


def starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def pages(pool: Pool, counts: list[int], **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments after the queries."""
    tables = {"block_table": pool.table, "seqused_k": pool.lengths, "enable_gqa": True}
    return (pool.k, pool.v, starts(counts), None, max(counts), int(pool.lengths.max())), {**tables, **options}


def wanted(q: Tensor, pool: Pool, counts: list[int], window: tuple[int, int], scale: float | None = None) -> Any:
    each = zip(q.split(counts), pool.keys, pool.values, strict=True)
    results = [attention(q, k, v, window=window, scale=scale) for q, k, v in each]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("size", [1, 16, 24])
def test_chunks_and_single_queries_over_pages(window: tuple[int, int], size: int) -> None:
    """The last query of a sequence is its last token: causality is bottom-right aligned."""
    torch.manual_seed(0)
    pool, q = Pool(LENGTHS, spare=1, size=size), torch.randn(sum(COUNTS), H, D)
    args, options = pages(pool, COUNTS, window_size=window, scale=0.3, return_aux=AUX)
    out, lse = varlen.varlen_attn(q, *args, **options)
    want, want_lse = wanted(q, pool, COUNTS, window, scale=0.3)
    close(out, want)
    close(lse, want_lse.T)
    filled = torch.full_like(q, torch.nan)
    result, again = varlen.varlen_attn_out(filled, q, *args, **options)
    assert result is filled
    assert torch.equal(filled, out)
    assert torch.equal(again, lse)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
def test_wide_heads_in_pages_of_24_tokens(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    pool, q = Pool([50, 24], spare=0, dtype=dtype, size=24, heads=(2, 256)), torch.randn(2, 6, 256).to(dtype)
    args, options = pages(pool, [1, 1])
    out = varlen.varlen_attn(q, *args, **options)
    assert out.dtype == dtype
    close(out, wanted(q, pool, [1, 1], (-1, -1))[0], tolerance)


def test_the_result_is_that_of_sdpa_with_a_gather() -> None:
    torch.manual_seed(2)
    pool, q = Pool([40, 40], spare=0), torch.randn(2, H, D)
    args, options = pages(pool, [1, 1])
    out = varlen.varlen_attn(q, *args, **options)
    k, v = (x[pool.table[:, :5].long()].flatten(1, 2).transpose(1, 2) for x in (pool.k, pool.v))
    torch.testing.assert_close(out, scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0])


def test_keys_without_pages_and_unused_keys() -> None:
    torch.manual_seed(3)
    stored, used = [6, 9, 3], [4, 9, 0]
    q, k, v = torch.randn(4, H, D), torch.randn(18, K, D), torch.randn(18, K, D)
    args = (starts([1, 2, 1]), starts(stored), 2, 9)
    whole = varlen.varlen_attn(q, k, v, *args, enable_gqa=True)
    for b, (mine, keys, values) in enumerate(zip(q.split([1, 2, 1]), k.split(stored), v.split(stored), strict=True)):
        close(whole.split([1, 2, 1])[b], attention(mine, keys, values)[0])
        keys[used[b] :] = values[used[b] :] = torch.nan
    out = varlen.varlen_attn(q, k, v, *args, enable_gqa=True, seqused_k=torch.tensor(used, dtype=torch.int32))
    close(out[0], attention(q[:1], k[:4], v[:4])[0][0])
    close(out[1:3], whole[1:3].double())
    assert not out[3].any()
    one = varlen.varlen_attn(q[:1], k, v, starts([1]), starts([6]), 1, 6, enable_gqa=True, seqused_k=starts([4])[1:])
    close(one, out[:1].double())


@pytest.mark.parametrize("neighbour", [(1, 700), (3, 1)], ids=["one query", "more queries than keys"])
@pytest.mark.parametrize("is_paged", [True, False], ids=["pages", "ragged"])
def test_one_split_gives_bits_that_do_not_depend_on_the_batch(neighbour: tuple[int, int], is_paged: bool) -> None:
    torch.manual_seed(4)
    counts, lengths, options = [70, neighbour[0]], [1300, neighbour[1]], {"enable_gqa": True, "num_splits": 1}
    pool = Pool(lengths, spare=0, dtype=torch.bfloat16, size=24)
    q, k, v = torch.randn(sum(counts), H, D).bfloat16(), torch.cat(pool.keys), torch.cat(pool.values)

    def attend(of: slice) -> Tensor:
        keys, rows, queries = starts(lengths)[of.start : of.stop + 1], starts(counts), counts[of]
        mine = q[int(rows[of.start]) : int(rows[of.stop])]
        if is_paged:
            tables = {"block_table": pool.table[of], "seqused_k": pool.lengths[of]}
            return varlen.varlen_attn(mine, pool.k, pool.v, starts(queries), None, 70, 1300, **tables, **options)
        held = [x[int(keys[0]) : int(keys[-1])] for x in (k, v)]
        return varlen.varlen_attn(mine, *held, starts(queries), keys - keys[0], 70, 1300, **options)

    assert torch.equal(torch.cat([attend(slice(0, 1)), attend(slice(1, 2))]), attend(slice(0, 2)))


def test_strided_queries_and_outputs() -> None:
    torch.manual_seed(5)
    pool, q = Pool(LENGTHS, spare=0), torch.randn(H, D, sum(COUNTS)).permute(2, 0, 1)
    args, options = pages(pool, COUNTS)
    out = varlen.varlen_attn(q, *args, **options)
    close(out, wanted(q, pool, COUNTS, (-1, -1))[0])
    assert out.stride() == q.stride()  # as torch.compile assumes
    filled = torch.zeros(sum(COUNTS), H, 2 * D)[..., ::2]
    varlen.varlen_attn_out(filled, q, *args, **options)
    assert torch.equal(filled, out)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("seqused_k is missing; block_table needs", {"seqused_k": None}),
        ("page 1 of sequence 0 is 2147480000; the cache has", {"seqused_k": torch.tensor([65, 4, 40]).int()}),
        (r"seqused_k is torch.float32; it must be int32", {"seqused_k": torch.tensor([19.0, 4.0, 40.0])}),
        ("seqused_k has 4294967301, which int32 cannot hold", {"seqused_k": torch.tensor([2**32 + 5, 4, 40])}),
        (r"seqused_k is \[\]; it must be \[1\]", {"seqused_k": torch.tensor(4).int()}),
        (r"cu_seq_q is \[4\]; it must be \[3\]", {"seqused_k": torch.tensor([19, 4]).int()}),
        (r"block_table is \[3\]; it must be \[3, 3\]", {"block_table": torch.zeros(3).int()}),
        ("cu_seq_k is missing; give it", {"block_table": None, "seqused_k": None}),
    ],
)
def test_wrong_arguments_are_refused(message: str, changed: dict[str, Any]) -> None:
    pool, q = Pool(LENGTHS, spare=0, size=64), torch.randn(sum(COUNTS), H, D)
    args, options = pages(pool, COUNTS)
    if changed.get("block_table", 1) is None:
        args = (pool.keys[0], pool.values[0], *args[2:])
    with pytest.raises(InvalidRequest, match=message):
        varlen.varlen_attn(q, *args, **{**options, **changed})


def test_values_of_another_head_size_are_refused() -> None:
    pool, q = Pool(LENGTHS, spare=0, size=64), torch.randn(sum(COUNTS), H, D)
    args, options = pages(pool, COUNTS)
    with pytest.raises(InvalidRequest, match="their heads must have one size"):
        varlen.varlen_attn(q, args[0], args[1][..., : D // 2], *args[2:], **options)


def test_more_keys_used_than_stored_are_refused() -> None:
    q, k = torch.randn(2, H, D), torch.randn(9, H, D)
    with pytest.raises(InvalidRequest, match="sequence 1 uses 8 keys, and has 4 by cu_seq_k"):
        varlen.varlen_attn(q, k, k, starts([1, 1]), starts([5, 4]), 1, 8, seqused_k=torch.tensor([5, 8]).int())


def test_the_operators_refuse_what_varlen_attn_never_asks() -> None:
    q, cu = torch.randn(2, H, D), starts([1, 1])
    forward = torch.ops.aten._flash_attention_forward
    with pytest.raises(InvalidRequest, match="dropout_p of torch is not served here"):
        forward(q, q, q, cu, cu, 1, 1, 0.5, False, False)
    with pytest.raises(InvalidRequest, match="cu_seq_q is missing"):
        forward(q[None], q[None], q[None], None, None, 1, 1, 0.0, False, False)
    with pytest.raises(InvalidRequest, match="give .tokens, heads, dims."):
        forward(q[None], q[None], q[None], cu, cu, 1, 1, 0.0, False, False)


def test_gradients_are_refused() -> None:
    """torch refuses them over pages; without pages, the backward pass does."""
    pool, q = Pool([5], spare=0), torch.randn(1, H, D, requires_grad=True)
    args, options = pages(pool, [1])
    with pytest.raises(RuntimeError, match="inference-only"):
        varlen.varlen_attn(q, *args, **options)
    with torch.no_grad():
        varlen.varlen_attn(q, *args, **options)
    out = varlen.varlen_attn(q, pool.keys[0], pool.values[0], starts([1]), starts([5]), 1, 5, enable_gqa=True)
    with pytest.raises(InvalidRequest, match="gradients of varlen_attn on a CPU are not served"):
        out.sum().backward()


def test_a_compiled_function_gives_the_same() -> None:
    torch.manual_seed(6)
    pool, q = Pool(LENGTHS, spare=0), torch.randn(sum(COUNTS), H, D)
    args, options = pages(pool, COUNTS)

    def call(q: Tensor) -> Tensor:
        out = torch.empty_like(q)
        varlen.varlen_attn_out(out, q, *args, **options)
        return out + varlen.varlen_attn(2.0 * q, *args, **options)

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(q), call(q))


def test_torch_finds_no_fault_in_its_operators() -> None:
    pool, q = Pool(LENGTHS, spare=0), torch.randn(sum(COUNTS), H, D)
    args, _ = pages(pool, COUNTS)
    tables = (pool.lengths, pool.table)
    torch.library.opcheck(
        torch.ops.torch_attn._varlen_attn, (q, *args, False, None, [-1, -1], True, *tables, None),
        test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"],
    )  # fmt: skip


def test_activation_can_be_taken_back() -> None:
    pool, q = Pool([5], spare=0), torch.randn(1, H, D)
    args, options = pages(pool, [1])
    for _ in range(2):
        torch_varlen.activate()
        assert current_flash_attention_impl() == "pagedkv"
        assert varlen.varlen_attn(q, *args, **options).shape == q.shape
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None
    with pytest.raises(NotImplementedError, match="aten::_flash_attention_forward"):
        varlen.varlen_attn(q, *args, **options)


def test_on_a_gpu_calls_without_pages_are_torchs() -> None:
    def own(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return "torch", keyset, args, kwargs

    serve = torch_varlen._on_gpu
    assert serve(own, None, "keys", 1, scale=2.0) == ("torch", "keys", (1,), {"scale": 2.0})
    assert serve(own, None, "keys", 1, block_table=None)[0] == "torch"
    assert serve(own, lambda *args, **kwargs: "ours", "keys", 1, block_table="table") == "ours"


@pytest.mark.gpu
def test_pages_on_a_gpu() -> None:
    torch.manual_seed(7)
    pool, q = Pool(LENGTHS, spare=0, dtype=torch.bfloat16, size=24, heads=(2, 256)), torch.randn(8, H, 256).bfloat16()
    args, options = pages(pool, COUNTS, window_size=(-1, 0), return_aux=AUX)
    out, lse = varlen.varlen_attn(q, *args, **options)
    there = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
    found = varlen.varlen_attn(q.cuda(), *(x.cuda() if isinstance(x, Tensor) else x for x in args), **there)
    torch.testing.assert_close(found[0].cpu(), out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1].cpu(), lse, atol=2e-2, rtol=2e-2)
    x = torch.randn(6, H, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    cu = starts([6]).cuda()
    varlen.varlen_attn(x, x, x, cu, cu, 6, 6).sum().backward()  # torch's own kernels
    assert x.grad is not None


@pytest.mark.parametrize(("name", "ours"), [("_FORWARD", "_forward"), ("_INTO", "_attend")])
def test_the_parameters_are_those_of_torchs_operators(name: str, ours: str) -> None:
    operator = getattr(torch.ops.aten, getattr(torch_varlen, name)).default
    asked = [(arg.name, arg.kwarg_only) for arg in operator._schema.arguments]
    found = inspect.signature(torch_varlen._attend).parameters.values()
    mine = [(parameter.name, parameter.kind is parameter.KEYWORD_ONLY) for parameter in found]
    assert mine[ours == "_forward" :] == asked


def test_a_torch_without_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_varlen, "_INTO", "no_such_operator")
    with pytest.raises(InvalidRequest, match="knows no pages; install torch 2.12 or newer"):
        torch_varlen.activate()
