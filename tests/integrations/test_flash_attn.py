"""flash_attn's functions by our kernels, against their documented semantics in plain torch.

Memory that must not be read is NaN, and entries past the last page name no page.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv.errors import InvalidRequest
from pagedkv.integrations import flash_attn, stand_in
from pagedkv.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.integrations.plain import Pool, attention, close

H, K, D, S = 4, 2, 16, 8
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (5, 0)},
    {"causal": True, "window_size": (5, 3)},  # the right side of a causal window is 0
    {"window_size": (5, 2)},
    {"window_size": (-1, 2)},
    {"window_size": (4, -1)},
    {"causal": True, "softcap": 3.0, "softmax_scale": 0.7},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.9, 0.0])},
]


def plain(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return attention(
        q, k, v, scale=options.get("softmax_scale"), causal=options.get("causal", False),
        window=options.get("window_size", (-1, -1)), softcap=options.get("softcap", 0.0),
        slopes=options.get("alibi_slopes"),
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("new", "L"), [(0, 1), (3, 3)])
def test_with_kvcache_over_pages(options: dict[str, Any], new: int, L: int) -> None:
    torch.manual_seed(0)
    pool = Pool([19, 3, 40], spare=new)
    q = torch.randn(3, L, H, D)
    k, v = (torch.randn(3, new, K, D) if new else None for _ in range(2))
    out, lse = flash_attn_with_kvcache(
        q, pool.k, pool.v, k, v, cache_seqlens=pool.lengths, block_table=pool.table, return_softmax_lse=True, **options
    )
    assert out.shape == (3, L, H, D)
    assert lse.shape == (3, H, L)
    for b in range(3):
        keys, values = pool.keys[b], pool.values[b]
        if k is not None and v is not None:
            keys, values = torch.cat([keys, k[b]]), torch.cat([values, v[b]])
        want, want_lse = plain(q[b], keys, values, options)
        close(out[b], want)
        close(lse[b], want_lse.T)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1), (torch.float16, 5), (torch.bfloat16, 16), (torch.float32, 256)]
)
def test_with_kvcache_of_every_dtype_and_page_size(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(1)
    pool = Pool([33, 1], spare=1, dtype=dtype, size=size)
    q, k, v = torch.randn(2, 1, H, D).to(dtype), torch.randn(2, 1, K, D).to(dtype), torch.randn(2, 1, K, D).to(dtype)
    out = flash_attn_with_kvcache(
        q, pool.k, pool.v, k, v, cache_seqlens=pool.lengths, block_table=pool.table, causal=True
    )
    assert out.dtype == dtype
    for b in range(2):
        want, _ = attention(q[b], torch.cat([pool.keys[b], k[b]]), torch.cat([pool.values[b], v[b]]))
        close(out[b], want, TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [None, [4, 0]])
@pytest.mark.parametrize("lengths", [9, [9, 30]])
def test_with_kvcache_without_pages(rows: list[int] | None, lengths: Any) -> None:
    """A row of the cache is a page."""
    torch.manual_seed(2)
    cache, new = torch.full((2, 5, 40, K, D), torch.nan), torch.randn(2, 2, 2, K, D)
    at = [0, 1] if rows is None else rows
    ends = [lengths, lengths] if isinstance(lengths, int) else lengths
    for b in range(2):
        cache[:, at[b], : ends[b]] = torch.randn(2, ends[b], K, D)
    before, q = cache.clone(), torch.randn(2, 2, H, D)
    out = flash_attn_with_kvcache(
        q, cache[0], cache[1], new[0], new[1], causal=True,
        cache_seqlens=lengths if isinstance(lengths, int) else torch.tensor(lengths, dtype=torch.int32),
        cache_batch_idx=None if rows is None else torch.tensor(rows, dtype=torch.int32),
    )  # fmt: skip
    for b in range(2):
        k, v = (torch.cat([before[i, at[b], : ends[b]], new[i, b]]) for i in range(2))
        close(out[b], attention(q[b], k, v, causal=True)[0])
        before[:, at[b], ends[b] : ends[b] + 2] = new[:, b]
    torch.testing.assert_close(cache, before, equal_nan=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("paged", "counts"), [(False, (19, 3, 40)), (True, (5, 1, 33))])
def test_varlen(options: dict[str, Any], paged: bool, counts: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    pool = Pool([19, 3, 40], spare=0)
    q = torch.randn(sum(counts), H, D)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    starts_k = torch.tensor([0, 19, 22, 62], dtype=torch.int32)
    k, v = (pool.k, pool.v) if paged else (torch.cat(pool.keys), torch.cat(pool.values))
    table = {"block_table": pool.table} if paged else {}
    out, lse, probabilities = flash_attn_varlen_func(
        q, k, v, starts, starts_k, max(counts), 40, return_attn_probs=True, **table, **options
    )
    assert lse.shape == (H, len(q))
    assert probabilities.numel() == 0
    for b in range(3):
        mine = slice(int(starts[b]), int(starts[b + 1]))
        want, want_lse = plain(q[mine], pool.keys[b], pool.values[b], options)
        close(out[mine], want)
        close(lse[:, mine], want_lse.T)


@pytest.mark.parametrize("causal", [False, True])
def test_more_queries_than_keys(causal: bool) -> None:
    """The example of the documentation: 5 queries and 2 keys. Rows that see nothing are 0."""
    torch.manual_seed(5)
    q, k, v = torch.randn(9, H, D), torch.randn(9, K, D), torch.randn(9, K, D)
    starts_q, starts_k = torch.tensor([0, 5, 9], dtype=torch.int32), torch.tensor([0, 2, 9], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 5, 7, causal=causal)
    for mine, keys in ((slice(0, 5), slice(0, 2)), (slice(5, 9), slice(2, 9))):
        close(out[mine], attention(q[mine], k[keys], v[keys], causal=causal)[0])
    assert out[:3].abs().sum() == 0 or not causal
    with pytest.raises(InvalidRequest, match="more queries than keys"):
        flash_attn_varlen_func(q, k, v, starts_q, starts_k, 5, 7, window_size=(1, 1))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "leftpad": ({"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, "cache_leftpad of flash_attn is not served"),
    "rotary": ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}, "rotary_cos and rotary_sin of flash"),
    "rows": ({"cache_batch_idx": torch.zeros(2, dtype=torch.int32)}, "cache_batch_idx is given with block_table"),
    "where": ({"cache_seqlens": None}, "with cache_seqlens"),
    "no v": ({"v": None}, "k and v must be given together"),
    "too long": ({"cache_seqlens": torch.tensor([47, 3], dtype=torch.int32)}, "6 pages of 8 tokens hold 0 to 48"),
    "alibi": ({"alibi_slopes": torch.ones(H)}, "use causal=True"),
    "slopes": ({"alibi_slopes": torch.ones(2, H), "causal": True}, r"alibi_slopes is .*\[2, 4\]"),
    "dtype of q": ({"q": torch.randn(2, 2, H, D).half()}, "q is float16 but layer.k is float32"),
    "heads": ({"q": torch.randn(2, 2, 3, D)}, "H must be a multiple of K"),
    "gradients": ({"q": torch.randn(2, 2, H, D, requires_grad=True)}, "inference only"),
    "dims": ({"q": torch.randn(2, H, D)}, r"it must be \[sequences, tokens, heads, dims\]"),
    "softcap": ({"softcap": float("nan")}, "softcap"),
    "scale": ({"softmax_scale": float("nan")}, "scale"),
    "window": ({"window_size": (1,)}, "left, right"),
    "more queries": ({"q": torch.randn(2, 9, H, D), "window_size": (1, 1)}, "more queries than keys"),
    "page": ({"block_table": torch.tensor([[0, 1, 2, 3, -1], [4, 5, 0, 0, 0]], dtype=torch.int32)}, "page 4 of seq"),
    "rows of a table": ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, r"it must be \[2, 5\]"),
    "lengths": ({"cache_seqlens": torch.tensor([33, 3, 1], dtype=torch.int32)}, "cache_seqlens is"),
    "negative": ({"cache_seqlens": torch.tensor([3, -3], dtype=torch.int32)}, "sequence 1 has -3 tokens in the cache"),
    "fractions": ({"cache_seqlens": torch.tensor([3.7, 3.0])}, "it must be int32"),
    "k": ({"k": torch.randn(2, 2, K + 1, D)}, "k is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str) -> None:
    changed, message = REFUSED[name]
    pool = Pool([33, 3], spare=2)
    before = torch.stack([pool.k, pool.v])
    arguments: dict[str, Any] = {
        "q": torch.randn(2, 2, H, D), "k": torch.randn(2, 2, K, D), "v": torch.randn(2, 2, K, D),
        "cache_seqlens": pool.lengths, "block_table": pool.table,
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match=message):
        flash_attn_with_kvcache(k_cache=pool.k, v_cache=pool.v, **{**arguments, **changed})
    torch.testing.assert_close(torch.stack([pool.k, pool.v]), before, equal_nan=True, rtol=0, atol=0)


def test_ragged_keys_begin_and_end_where_cu_seqlens_k_says() -> None:
    torch.manual_seed(7)
    q, k, v = torch.randn(4, H, D), torch.randn(9, K, D), torch.randn(9, K, D)
    for counts, starts in (([4], [5, 9]), ([2, 2], [3, 5, 8])):
        starts_q = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        out = flash_attn_varlen_func(q, k, v, starts_q, torch.tensor(starts, dtype=torch.int32), 4, 9)
        for b in range(len(counts)):
            mine, keys = slice(int(starts_q[b]), int(starts_q[b + 1])), slice(starts[b], starts[b + 1])
            close(out[mine], attention(q[mine], k[keys], v[keys])[0])
        starts[-1] = 20
        with pytest.raises(InvalidRequest, match="they must rise from 0 to at most 9, the keys"):
            flash_attn_varlen_func(q, k, v, starts_q, torch.tensor(starts, dtype=torch.int32), 4, 20)


def test_the_layer_of_a_tensor_follows_its_memory_and_does_not_keep_it() -> None:
    torch.manual_seed(8)
    q, table = torch.randn(1, 1, H, D), torch.tensor([[1, 2]], dtype=torch.int32)
    k, v = (torch.randn(4, S, K, D) for _ in range(2))

    def check(k: Tensor, v: Tensor) -> None:
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=11, block_table=table)
        keys, values = (x[1:3].flatten(0, 1)[:11] for x in (k, v))
        close(out[0], attention(q[0], keys, values)[0])

    check(k, v)
    layer = stand_in.layer_of(k, v)
    k.copy_(torch.randn_like(k))  # other values in the same memory: the layer is found again
    check(k, v)
    assert stand_in.layer_of(k, v) is layer
    k.set_(torch.randn_like(k))  # other memory of the same tensor is another layer
    check(k, v)
    assert stand_in.layer_of(k, v) is not layer
    storage, kept = weakref.ref(v.untyped_storage()), weakref.ref(k)
    k.untyped_storage().resize_(0)
    with pytest.raises(InvalidRequest, match="freed or shrunk"):
        check(k, v)
    assert k.untyped_storage().nbytes() == 0
    del k, v, layer
    gc.collect()
    assert kept() is None
    assert storage() is None


def test_a_compiled_function_gives_the_same() -> None:
    torch.manual_seed(9)
    pool, q = Pool([19, 3], spare=1), torch.randn(2, 1, H, D)

    def call(q: Tensor, k: Tensor) -> Tensor:
        pages = {"cache_seqlens": pool.lengths, "block_table": pool.table}
        out: Tensor = flash_attn_with_kvcache(q * 2.0, pool.k, pool.v, k, k, **pages, causal=True)
        return out + 1.0

    k = torch.randn(2, 1, K, D)
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(q, k), call(q, k))


def test_install_takes_the_name_and_not_that_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)  # restored after the test
        del sys.modules[name]
    for _ in range(2):
        flash_attn.install()
        module = importlib.import_module("flash_attn")
        assert module.flash_attn_with_kvcache is flash_attn_with_kvcache
        assert importlib.import_module("flash_attn.flash_attn_interface") is module.flash_attn_interface
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.bert_padding")
    for spec in (importlib.machinery.ModuleSpec("flash_attn", None), None):
        other = types.ModuleType("flash_attn")
        other.__spec__ = spec
        monkeypatch.setitem(sys.modules, "flash_attn", other)
        with pytest.raises(InvalidRequest, match="flash_attn is installed here"):
            flash_attn.install()
        assert sys.modules["flash_attn"] is other
    flash_attn.install(replace=True)
    assert sys.modules["flash_attn"].flash_attn_func is flash_attn_func
