"""The law of a resized cache: every mapped or cached slot holds the bytes written there, also after a move."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedkv import KVSpec, PagedKVCache, paged_attention, write_kv
from pagedkv.cache.mirror import DeviceMirror
from pagedkv.core import AddressSpace
from pagedkv.errors import InvalidRequest
from tests.interrupts import Interrupter, count_instructions

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, block_size=4, dtype="float32")


def store(cache: PagedKVCache, space: AddressSpace, ids: list[int]) -> None:
    """Write keys and values that encode the token, its position and the layer."""
    batch = cache.plan([space], [len(ids)])
    for layer in range(len(cache)):
        code = torch.tensor(ids) * 1000.0 + batch.positions + layer / 2
        k = code[:, None, None].expand(len(ids), 2, 64).contiguous()
        write_kv(k, -k, cache[layer], batch[layer])
    cache.commit(batch, ids)


def read(cache: PagedKVCache, space: AddressSpace) -> None:
    pages, ids = torch.from_numpy(space.pages).long(), torch.from_numpy(space.token_ids)
    for layer in range(len(cache)):
        code = ids * 1000.0 + torch.arange(len(ids)) + layer / 2
        k, v = (view[pages].reshape(-1, 2, 64)[: len(ids)] for view in (cache[layer].k, cache[layer].v))
        assert (k == code[:, None, None]).all()
        assert (v == -code[:, None, None]).all()


@pytest.mark.parametrize("sizes", [(9, 30), (300,), (10, 9, 64, 12)])
def test_every_slot_holds_its_token_after_moves(sizes: tuple[int, ...]) -> None:
    cache = PagedKVCache(SPEC, num_frames=24)
    gone, kept, cached = cache.open(tenant=b"gone"), cache.open(), cache.open()
    store(cache, gone, list(range(30)))
    store(cache, cached, list(range(100, 109)))
    store(cache, kept, list(range(50, 73)))
    gone.release()
    cached.release()
    fork = kept.fork()
    for size in sizes:
        cache.resize(size)
        cache.check()
        assert cache.num_frames == cache.storage.num_frames == size
        read(cache, kept)
        read(cache, fork)
        found = cache.open(list(range(100, 109)))
        assert len(found) == 8
        read(cache, found)
        found.release()
    store(cache, fork, [1, 2, 3])
    read(cache, fork)
    read(cache, kept)


def test_the_bound_calls_of_a_cache_follow_its_pool() -> None:
    cache, space = PagedKVCache(SPEC, num_frames=24), None
    attend, write = cache.attention(1, window=9), cache.write(1)
    space = cache.open()
    store(cache, space, list(range(20)))
    cache.resize(30)
    cache.resize(6)
    batch = cache.plan([space], [1])
    q, k = torch.randn(1, 2, 64), torch.randn(1, 2, 64)
    write(k, -k, batch)
    frame, offset = divmod(int(batch.slots[0]), 4)
    assert torch.equal(cache[1].k[frame, offset], k[0])
    assert torch.equal(attend(q, batch), paged_attention(q, cache[1], batch, window=9))
    del attend, write
    gc.collect()
    assert not cache._bound


@pytest.mark.parametrize("layers", [1, 2])
def test_a_layer_that_the_model_does_not_have_is_refused(layers: int) -> None:
    specs = [SPEC, replace(SPEC, window=8)][:layers]
    cache = PagedKVCache(specs if layers > 1 else SPEC, num_frames=8)
    for call in (lambda: cache[9], lambda: cache.attention(9), lambda: cache.write(-9)):
        with pytest.raises(InvalidRequest, match=r"cache\[-?9\] of a model of \d layers; give 0 to \d"):
            call()
    assert len(list(cache)) == len(cache)
    batch = cache.plan([cache.open()], [1])
    for each in (batch, batch.padded(torch.ones(1, 1, dtype=torch.bool))):
        with pytest.raises(InvalidRequest, match=r"batch\[9\] of a model of \d layers; give 0 to \d"):
            each[9]
        assert each[len(cache) - 1] is each[-1]


def fragmented() -> tuple[PagedKVCache, AddressSpace]:
    """Return a cache in which a space, its bound call and cached pages lie above free frames."""
    cache = PagedKVCache(SPEC, num_frames=24)
    blocker, space, cached = cache.open(), cache.open(), cache.open()
    store(cache, blocker, list(range(20)))
    store(cache, space, list(range(50, 60)))
    store(cache, cached, list(range(100, 117)))
    blocker.release()
    cached.release()
    return cache, space


def sizes(cache: PagedKVCache) -> tuple[int, int, int]:
    return cache.num_frames, cache.storage.num_frames, len(cache.state.frames)


@pytest.mark.many_steps
@pytest.mark.parametrize("stride", [199, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupted_resize_is_whole_or_did_not_happen(stride: int) -> None:
    for _ in range(2):  # the first resize of a process runs twice as many
        cache, _ = fragmented()
        write, attend = cache.write(1), cache.attention(1)
        total = count_instructions(lambda cache=cache: cache.resize(4))
    seen = set()
    for at in [*range(1, total, stride), total]:
        cache, space = fragmented()
        write, attend = cache.write(1), cache.attention(1)
        with pytest.raises(KeyboardInterrupt):
            Interrupter(at).run(lambda cache=cache: cache.resize(4))
        cache.check()
        seen.add(sizes(cache))
        read(cache, space)
        batch, q = cache.plan([space], [1]), torch.ones(1, 2, 64)
        write(q, q, batch)
        assert torch.equal(attend(q, batch), paged_attention(q, cache[1], batch))
        cache.commit(batch, [7])
    assert seen == {(24, 24, 24), (4, 4, 4)}


def test_page_tables_that_did_not_reach_the_device_are_sent_again() -> None:
    host = np.arange(32, dtype=np.int32).reshape(4, 8)
    rows, pages = np.array([0, 2], np.int32), np.array([5, 3], np.int32)
    for at in range(1, count_instructions(lambda: DeviceMirror(torch.device("cpu")).update(host, rows, pages)) + 1):
        mirror = DeviceMirror(torch.device("cpu"))
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at).run(lambda mirror=mirror: mirror.update(host, rows, pages))
        table, _ = mirror.update(host, rows, pages)
        for row, count in zip(rows, pages, strict=True):
            assert table[row, :count].tolist() == host[row, :count].tolist(), f"instruction {at}"
