"""flashinfer's wrappers and functions by our kernels, against their documented semantics in plain torch.

Memory that must not be read is NaN.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv.errors import InvalidRequest
from pagedkv.integrations.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
)
from tests.integrations.plain import attention, close

H, K, D, S, F = 4, 2, 16, 8, 14
LENGTHS = [19, 8, 40]
WORKSPACE = torch.zeros(16, dtype=torch.uint8)
FLOAT = {"q_data_type": torch.float32}
LAYOUTS = list(itertools.product(["NHD", "HND"], [True, False]))


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


class Pool:
    """Pages of three requests: NaN where no token is, pages in random order, in one tensor or in a tuple of two."""

    def __init__(self, layout: str, in_one: bool, dtype: torch.dtype = torch.float32, written: int = 40) -> None:
        self.keys, self.values = ([torch.randn(n, K, D).to(dtype) for n in LENGTHS] for _ in range(2))
        pages = [-(-n // S) for n in LENGTHS]
        self.indptr, self.indices = int32([0, *itertools.accumulate(pages)]), torch.randperm(F)[: sum(pages)].int()
        self.last = int32([n - (p - 1) * S for n, p in zip(LENGTHS, pages, strict=True)])
        data = torch.full((F, 2, S, K, D), torch.nan, dtype=dtype)
        for b, n in enumerate(LENGTHS):
            for t in range(min(n, written)):
                page = self.indices[self.indptr[b] + t // S]
                data[page, 0, t % S], data[page, 1, t % S] = self.keys[b][t], self.values[b][t]
        data = data.transpose(2, 3).contiguous() if layout == "HND" else data
        self.cache = data if in_one else (data[:, 0].contiguous(), data[:, 1].contiguous())
        self.tables = (self.indptr, self.indices, self.last)
        self.sizes = (H, K, D, S)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"window_left": 5}, {"window": (5, -1)}),
    ({"logits_soft_cap": 3.0, "sm_scale": 0.7}, {"softcap": 3.0, "scale": 0.7}),
    ({"fixed_split_size": 1}, {}),
    ({"logits_soft_cap": -1.0}, {}),  # "if greater than 0"
]


@pytest.mark.parametrize(("planned", "plain"), OPTIONS, ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_decode(planned: dict[str, Any], plain: dict[str, Any], queries: int) -> None:
    torch.manual_seed(0)
    layout = "NHD" if queries == 1 else "HND"
    pool = Pool(layout, True)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout, use_tensor_cores=True)
    wrapper.plan(*pool.tables, *pool.sizes, **FLOAT, q_len_per_req=queries, **planned)
    q, sinks = torch.randn(3 * queries, H, D), torch.randn(H)
    for given in ({}, {"sinks": sinks}):
        out, lse = wrapper.run(q, pool.cache, return_lse=True, **given)
        torch.testing.assert_close(wrapper.run(q, pool.cache, **given), out)
        for b in range(3):
            mine = slice(b * queries, (b + 1) * queries)
            want, want_lse = attention(q[mine], pool.keys[b], pool.values[b], causal=True, **plain, **given)
            close(out[mine], want)
            close(lse[mine], want_lse / math.log(2))


@pytest.mark.parametrize(("planned", "plain"), OPTIONS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(planned: dict[str, Any], plain: dict[str, Any], causal: bool) -> None:
    torch.manual_seed(1)
    layout = "NHD" if causal else "HND"
    pool, counts = Pool(layout, False), [19, 1, 11]
    starts = int32([0, *itertools.accumulate(counts)])
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(starts, *pool.tables, *pool.sizes, causal=causal, **FLOAT, **planned)
    q, out, lse = torch.randn(31, H, D), torch.full((31, H, D), torch.nan), torch.full((31, H), torch.nan)
    found = wrapper.run(q, pool.cache, out=out, lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    for b in range(3):
        mine = slice(int(starts[b]), int(starts[b + 1]))
        want, want_lse = attention(q[mine], pool.keys[b], pool.values[b], causal=causal, **plain)
        close(out[mine], want)
        close(lse[mine], want_lse / math.log(2))
    narrow = wrapper.run(q, pool.cache, window_left=2)  # a window of this call alone
    want, _ = attention(q[20:31], pool.keys[2], pool.values[2], causal=causal, **{**plain, "window": (2, -1)})
    close(narrow[20:31], want)


def test_custom_masks_among_new_tokens() -> None:
    torch.manual_seed(2)
    pool, counts = Pool("NHD", True), [5, 1, 11]
    starts = int32([0, *itertools.accumulate(counts)])
    masks = [torch.cat([torch.ones(c, n - c), torch.rand(c, c).round() + torch.eye(c)], 1) > 0
             for c, n in zip(counts, LENGTHS, strict=True)]  # fmt: skip
    given = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(starts, *pool.tables, *pool.sizes, **FLOAT, **given)
    q = torch.randn(17, H, D)
    out = wrapper.run(q, pool.cache)
    for b in range(3):
        mine = slice(int(starts[b]), int(starts[b + 1]))
        want, _ = attention(q[mine], pool.keys[b], pool.values[b], mask=masks[b])
        close(out[mine], want)
    masks[2][4, 3] = False
    with pytest.raises(
        InvalidRequest, match="custom_mask of request 2 hides some of its 29 tokens before its 11 queries"
    ):
        wrapper.plan(starts, *pool.tables, *pool.sizes, **FLOAT, custom_mask=torch.cat([m.flatten() for m in masks]))
    with pytest.raises(InvalidRequest, match="custom_mask has 3 elements; the requests have 543"):
        wrapper.plan(starts, *pool.tables, *pool.sizes, **FLOAT, custom_mask=torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(wrapper.run(q, pool.cache), out)  # a plan that fails changes nothing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_scales_and_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    pool = Pool("HND", True, dtype)
    q_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    q = torch.randn(3, H, D).to(q_dtype)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "HND")
    wrapper.plan(*pool.tables, *pool.sizes, q_data_type=str(q_dtype)[6:], kv_data_type=dtype, o_data_type=torch.float32)
    out = wrapper.run(q, pool.cache, q_scale=0.5, k_scale=3.0, v_scale=2.0)
    assert out.dtype == torch.float32
    for b in range(3):
        want, _ = attention(q[b : b + 1], pool.keys[b], pool.values[b], scale=1.5 * D**-0.5)
        close(out[b : b + 1], 2.0 * want, 3e-2)


def test_requests_without_tokens_and_with_more_queries_than_tokens() -> None:
    torch.manual_seed(5)
    pool = Pool("NHD", True)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    indptr, indices, last = int32([0, 0, 1]), pool.indices[3:4], int32([0, 2])  # the first page of request 1
    q = torch.randn(6, H, D)
    for causal in (False, True):
        wrapper.plan(int32([0, 1, 6]), indptr, indices, last, *pool.sizes, causal=causal, **FLOAT)
        out, lse = wrapper.run(q, pool.cache, return_lse=True)
        assert out[0].abs().sum() == 0
        assert (lse[0] == -torch.inf).all()
        want, want_lse = attention(q[1:], pool.keys[1][:2], pool.values[1][:2], causal=causal)
        close(out[1:], want)
        close(lse[1:], want_lse / math.log(2))


def test_a_plan_keeps_no_tensor_of_the_caller() -> None:
    torch.manual_seed(10)
    pool, q = Pool("NHD", True), torch.randn(6, H, D)
    tables = [int32([0, 1, 3, 6]), *(x.clone() for x in pool.tables)]
    lengths = int32(LENGTHS)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*tables, *pool.sizes, causal=True, seq_lens=lengths, **FLOAT)
    out = wrapper.run(q, pool.cache)
    for tensor in (*tables, lengths):
        tensor.fill_(1)
    assert torch.equal(wrapper.run(q, pool.cache), out)


@pytest.mark.parametrize(("layout", "in_one"), LAYOUTS)
def test_tokens_that_were_appended_are_attended_to(layout: str, in_one: bool) -> None:
    torch.manual_seed(7)
    pool = Pool(layout, in_one, written=5)  # the rest is appended
    new = [n - 5 for n in LENGTHS]
    starts = int32([0, *itertools.accumulate(new)])
    lengths = get_seq_lens(pool.indptr, pool.last, S)
    assert lengths.tolist() == LENGTHS
    request, position = get_batch_indices_positions(starts, lengths, int(starts[-1]) + 2)  # two are padding
    assert request.tolist() == [b for b, n in enumerate(new) for _ in range(n)] + [-1, -1]
    assert position.tolist() == [t for n in LENGTHS for t in range(5, n)] + [0, 0]
    padding = torch.full((2, K, D), torch.nan)
    k, v = (torch.cat([*(x[5:] for x in of), padding]) for of in (pool.keys, pool.values))
    append_paged_kv_cache(k, v, request, position, pool.cache, pool.indices, pool.indptr, pool.last, layout)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(*pool.tables, *pool.sizes, **FLOAT)
    q = torch.randn(3, H, D)
    out = wrapper.run(q, pool.cache)
    for b in range(3):
        close(out[b : b + 1], attention(q[b : b + 1], pool.keys[b], pool.values[b])[0])
    for request, position in ((0, 24), (3, 0), (0, -1)):
        with pytest.raises(InvalidRequest, match=f"token 0 has position {position} of request {request}, for which"):
            append_paged_kv_cache(
                k[:1], v[:1], int32([request]), int32([position]), pool.cache, *pool.tables[1::-1], pool.last, layout
            )
    nothing = (int32([]), int32([0]), int32([]))
    append_paged_kv_cache(k[:1], v[:1], int32([-1]), int32([0]), pool.cache, *nothing, layout)  # padding alone


def test_states_merge_to_the_attention_over_all_keys() -> None:
    torch.manual_seed(8)
    q, k, v = torch.randn(5, H, D), torch.randn(12, K, D), torch.randn(12, K, D)
    states = [
        (out.float(), (lse / math.log(2)).float())
        for out, lse in (attention(q, k[i : i + 4], v[i : i + 4]) for i in (0, 4, 8))
    ]
    want, want_lse = attention(q, k, v)
    out, lse = merge_state(*merge_state(*states[0], *states[1]), *states[2])
    close(out, want)
    close(lse, want_lse / math.log(2))


def plan(pool: Pool, **changed: Any) -> Any:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, changed.pop("kv_layout", "NHD"))
    names = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    wrapper.plan(**{**dict(zip(names, (*pool.tables, *pool.sizes), strict=True)), **FLOAT, **changed})
    return wrapper


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"kv_layout": "DHN"}, "it must be 'NHD' or 'HND'"),
    "heads": ({"num_qo_heads": 5}, "multiple of num_kv_heads=2"),
    "rope": ({"pos_encoding_mode": "ROPE_LLAMA"}, "turn keys before storing them"),
    "last": ({"last_page_len": int32([3, 0, 8])}, "last_page_len of request 1 is 0; it must be 1 to 8"),
    "falls": ({"indptr": int32([0, 3, 2, 9])}, "begin with 0 and never fall"),
    "short": ({"indptr": int32([0, 3, 4, 99])}, "indptr ends with 99 pages, and indices has 9"),
    "queries": ({"q_len_per_req": 0}, "it must be at least 1"),
    "more queries": ({"q_len_per_req": 9}, "request 1 has 8 tokens, fewer than 9 queries"),
    "lengths": ({"seq_lens": int32([25, 8, 40])}, r"seq_lens is \[25, 8, 40\]; the requests have \[3, 1, 5\] pages"),
    "pages": ({"indices": int32([0, 1, 2, -1, 4, 5, 6, 7, 8])}, "indices go down to -1"),
    "fp8": ({"q_data_type": torch.float8_e4m3fn}, "it must be float32, bfloat16 or float16"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_are_refused(name: str) -> None:
    changed, message = PLANS[name]
    with pytest.raises(InvalidRequest, match=message):
        plan(Pool("NHD", True), **changed)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"q": torch.zeros(3, H, D).bfloat16()}, "q is torch.bfloat16 and the cache torch.float32"),
    "queries": ({"q": torch.zeros(2, H, D)}, r"plan\(\) was told of 3 queries"),
    "lse": ({"lse": torch.ones(2, H), "return_lse": True}, r"lse is \[2, 4\]; it must be \[3, 4\]"),
    "scales": ({"k_scale": torch.ones(2)}, "kernels here take one number"),
    "count": ({"q_len_per_req": 7}, "not q_len_per_req=7 for each request"),
    "four dims": ({"paged_kv_cache": torch.ones(F, S, K, D)}, r"paged_kv_cache is \[14, 8, 2, 16\]"),
    "few pages": ({"paged_kv_cache": torch.ones(1, 2, S, K, D)}, "page 0 of sequence 0"),
    "bytes": ({"paged_kv_cache": torch.zeros(F, 2, S, K, D).byte()}, "give bytes of fp8 as views"),
    "option": ({"kv_cache_sf": torch.ones(2)}, "kv_cache_sf of flashinfer is not served"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_refused_change_nothing(name: str) -> None:
    changed, message = CALLS[name]
    pool, before = Pool("NHD", True), torch.full((3, H, D), 7.0)
    pool.indices[0] = F - 1
    call = {"q": torch.zeros(3, H, D), "paged_kv_cache": pool.cache, "out": before, **changed}
    with pytest.raises(InvalidRequest, match=message):
        plan(pool).run(**call)
    assert (before == 7.0).all()
