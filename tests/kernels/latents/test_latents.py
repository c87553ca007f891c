"""Latents (MLA with absorbed attention): each value is the first part of its key, and is stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pagedkv import KVLayer, KVSpec, PagedBatch, PagedKVCache, bind_write, gather_kv, paged_attention, write_kv
from pagedkv.errors import InvalidRequest
from pagedkv.kernels.layout import is_v_in_k
from pagedkv.tiers import HostTier, Tier
from tests.cases import Case, as_bytes, empty_layer, moved

if TYPE_CHECKING:
    from torch import Tensor

    from tests.kernels.conftest import Runner

SPEC: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 80, "head_dim_v": 64, "block_size": 4, "value_in_key": True}
KINDS = [None, "fp8_e4m3", "fp8_e5m2", "int8"]


def cache_of(
    num_layers: int = 1, kv_dtype: str | None = None, backend: str = "auto", tiers: Sequence[Tier] = ()
) -> PagedKVCache:
    spec = KVSpec(num_layers, **SPEC, dtype="float32", kv_dtype=kv_dtype)
    return PagedKVCache(spec, num_frames=16, kernels=backend, tiers=tiers)


def stored(cache: PagedKVCache, latents: Tensor, layer: int = 0) -> PagedBatch:
    """The batch of one sequence. Its latents [n, 80] are in the cache."""
    batch = cache.plan(np.array([cache.open().detach()]), [len(latents)])
    write_kv(latents[:, None], None, cache[layer], batch[layer], backend=cache.backend)
    cache.commit(batch, range(len(latents)))
    return batch


def test_a_token_takes_the_bytes_of_its_key() -> None:
    spec = KVSpec(61, 1, 576, 512, dtype="bfloat16", value_in_key=True)
    assert spec.bytes_per_token == 61 * 576 * 2
    assert spec.frame_bytes == 61 * 576 * 2 * 16
    assert spec.frames_in("1GiB") == 2**30 // spec.frame_bytes
    quantised = KVSpec(1, 1, 576, 512, kv_dtype="fp8_e4m3", value_in_key=True)
    assert quantised.bytes_per_token == 576 + 2
    with pytest.raises(InvalidRequest, match="a value in a key is no longer than the key"):
        KVSpec(1, 1, 512, 576, value_in_key=True)


def test_absorbed_attention_is_the_expanded_attention(runner: Runner) -> None:
    """Queries absorb the expansion of keys: q_h . (U_h c) = (q_h U_h) . c; the values' expansion follows the sum."""
    draw = torch.Generator().manual_seed(0)
    n, m, H, inner, rank, rotary = 23, 3, 4, 24, 64, 16
    c, k_rotary = (torch.randn(n, d, generator=draw) for d in (rank, rotary))
    q, q_rotary = (torch.randn(m, H, d, generator=draw) for d in (inner, rotary))
    to_keys, to_values = (torch.randn(H, inner, rank, generator=draw) / rank**0.5 for _ in range(2))
    cache, scale = cache_of(), (inner + rotary) ** -0.5
    batch = stored(cache, torch.cat([c, k_rotary], -1))
    latest = PagedBatch(
        batch.block_table, batch.seq_lens, torch.tensor([0, m], dtype=torch.int32), m, n, rows=batch.rows
    )
    absorbed = torch.cat([torch.einsum("mhi,hir->mhr", q, to_keys), q_rotary], -1)
    on_device = [moved(x, runner.device) for x in (absorbed, cache[0].k, latest)]
    layer = KVLayer(on_device[1], on_device[1][..., :rank])
    out = paged_attention(on_device[0], layer, on_device[2], scale=scale, backend=runner.backend).cpu()
    found = torch.einsum("mhr,hir->mhi", out.double(), to_values.double())

    keys = torch.cat([torch.einsum("nr,hir->nhi", c, to_keys), k_rotary[:, None].expand(-1, H, -1)], -1).double()
    values = torch.einsum("nr,hir->nhi", c.double(), to_values.double())
    scores = torch.einsum("mhd,nhd->hmn", torch.cat([q, q_rotary], -1).double(), keys) * scale
    scores = scores.masked_fill(torch.arange(n) > torch.arange(n - m, n)[:, None], -torch.inf)
    right = torch.einsum("hmn,nhi->mhi", scores.softmax(-1), values)
    assert (found - right).abs().max() <= 2e-5


@pytest.mark.parametrize("kv", KINDS)
def test_a_store_of_keys_alone_is_a_store_of_keys(kv: str | None, runner: Runner) -> None:
    """It changes no other byte: unwritten slots keep their poison."""
    new, slots = torch.randn(5, 1, 80), torch.tensor([7, -1, 0, 13, 2])
    case = Case(kv=f"{kv}/token_head" if kv else "", dims=(80, 64), heads=(1, 1), layout="mla", block_size=4)
    ours, apart = (moved(empty_layer(case, 4), runner.device) for _ in range(2))
    apart = KVLayer(apart.k, apart.v.clone(), apart.k_scale, None if apart.v_scale is None else apart.v_scale.clone())
    new, slots = new.to(runner.device), slots.to(runner.device)
    write_kv(new, None, ours, slots, backend=runner.backend)
    write_kv(new, new[..., :64], apart, slots, backend=runner.backend)
    assert is_v_in_k(ours.k, ours.v)
    assert torch.equal(as_bytes(ours.k).cpu().view(torch.uint8), as_bytes(apart.k).cpu().view(torch.uint8))
    if ours.k_scale is not None and apart.k_scale is not None:
        assert torch.equal(ours.k_scale.nan_to_num(9), apart.k_scale.nan_to_num(9))
        assert ours.v_scale.data_ptr() == ours.k_scale.data_ptr()


@pytest.mark.parametrize("kv", KINDS)
def test_a_bound_store_of_latents_stores_the_same(kv: str | None) -> None:
    new, slots = torch.randn(6, 1, 80), torch.tensor([7, -1, 0, 13, 2, 9])
    layers = [cache_of(kv_dtype=kv)[0] for _ in range(2)]
    write_kv(new, None, layers[0], slots)
    store = bind_write(layers[1])
    for _ in range(2):
        store(new, None, slots)
    assert torch.equal(as_bytes(layers[1].k), as_bytes(layers[0].k))


@pytest.mark.usefixtures("unbound")
def test_a_value_is_refused_where_it_would_replace_the_scale_of_its_key() -> None:
    new, slots = torch.randn(1, 1, 80), torch.tensor([3])
    quantised = cache_of(kv_dtype="int8")[0]
    for store in (lambda *x: write_kv(*x[:2], quantised, x[2]), bind_write(quantised)):
        with pytest.raises(InvalidRequest, match="have the same scales, as values lie in keys; give v=None"):
            store(new, new[..., :64], slots)
    assert not quantised.k.any()


@pytest.mark.parametrize("kv", KINDS)
def test_latents_survive_forks_resizes_and_tiers(kv: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that no token was written to are NaN; so a byte that is read and not restored shows."""
    monkeypatch.setenv("PAGEDKV_DEBUG", "2")
    cache, tokens = cache_of(2, kv, tiers=[HostTier("1MiB")]), list(range(100, 110))
    a = cache.open()
    batch, latents = cache.plan([a], [10]), torch.randn(10, 1, 80)
    for layer in (0, 1):
        write_kv(latents * (layer + 1), None, cache[layer], batch[layer])
    cache.commit(batch, tokens)
    right = [cache.gather(layer, batch) for layer in (0, 1)]
    assert all(torch.equal(k[..., :64], v) and k.isfinite().all() for k, v in right)
    b = a.fork()
    both = cache.plan([a, b], [1, 1])  # the shared last page is copied
    for layer in (0, 1):
        write_kv(latents[:2], None, cache[layer], both[layer])
    cache.commit(both, [1, 2])
    cache.resize(24)
    after = cache.plan([a, b], [0, 0])
    for layer in (0, 1):
        k, v = cache.gather(layer, after)
        assert torch.equal(k.view(2, 11, 1, 80)[:, :10], right[layer][0].expand(2, 10, 1, 80))
        assert torch.equal(k[..., :64], v)
    cache.abort(after)
    assert cache.tiers.flush(600)
    a.release()
    b.release()
    cache.evict(24)
    assert cache.fetch(tokens).wait(600)
    found = cache.open(tokens)
    assert len(found) == 8
    again = cache.plan([found], [0])
    for layer in (0, 1):
        assert torch.equal(cache.gather(layer, again)[0], right[layer][0][:8])
    cache.abort(again)
    found.release()
    cache.tiers.close()


@pytest.mark.parametrize("kv", [None, "int8"])
def test_a_compiled_step_sees_that_keys_hold_the_values(kv: str | None) -> None:
    # torch 2.13 loses the source of a stride that it makes symbolic, where one graph input is a view of another
    torch.compiler.reset()

    def step(latents: Tensor, q: Tensor, layer: KVLayer, batch: PagedBatch) -> Tensor:
        write_kv(latents, None, layer, batch)
        return paged_attention(q, layer, batch) + 1

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = cache_of(kv_dtype=kv)
        batch = cache.plan(np.array([cache.open().detach()]), [6])
        draw = torch.Generator().manual_seed(0)
        latents, q = torch.randn(6, 1, 80, generator=draw), torch.randn(6, 4, 80, generator=draw)
        results.append(run(latents, q, cache[0], batch))
        results.append(gather_kv(cache[0], batch, dtype=torch.float32)[1])
        cache.commit(batch, range(6))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert (results[1].abs().amax(-1) > 0).all()
