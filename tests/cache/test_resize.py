"""The law of a resized cache: every mapped or cached slot holds the bytes written there, also after a move.

Without a given size, memory follows the frames in use, and a pool that may grow does so when a plan asks.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedkv import KVSpec, PagedKVCache, paged_attention, write_kv
from pagedkv.cache import sizes
from pagedkv.cache.mirror import DeviceMirror
from pagedkv.core import AddressSpace
from pagedkv.errors import InvalidRequest, OutOfFrames
from tests.core.cost.memory import IS_THERE, resident
from tests.interrupts import Interrupter, count_instructions, interrupted

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


def frames_of(cache: PagedKVCache) -> tuple[int, int, int]:
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
        seen.add(frames_of(cache))
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
        interrupted(at, lambda mirror=mirror: mirror.update(host, rows, pages))
        table, _ = mirror.update(host, rows, pages)
        for row, count in zip(rows, pages, strict=True):
            assert table[row, :count].tolist() == host[row, :count].tolist(), f"instruction {at}"


MOST = 64


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> PagedKVCache:
    """Return a cache as on a GPU: it begins with an eighth of what it may grow to."""
    monkeypatch.setattr(sizes, "_memory_for_a_pool", lambda device: MOST * SPEC.frame_bytes)
    monkeypatch.setattr(sizes, "pool_sizes", lambda *args, old=sizes.pool_sizes: old(*args[:3], torch.device("meta")))
    cache = PagedKVCache(SPEC)
    assert (cache.num_frames, cache.limit) == (MOST // 8, MOST)
    return cache


def test_a_plan_that_lacks_frames_doubles_the_pool_and_keeps_its_contents(
    growing: PagedKVCache, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []
    growing.on_resize(lambda cache: sizes.append(cache.num_frames))
    spaces, bound = [growing.open() for _ in range(4)], growing.attention(0)
    with caplog.at_level(logging.INFO):
        for space in spaces:
            store(growing, space, list(range(space.asid, space.asid + 40)))  # 10 pages
    assert sizes == [16, 32, 64]
    assert "from 8 to 16 frames" in caplog.text
    for space in spaces:
        read(growing, space)
    batch = growing.plan([spaces[0]], [1])
    q = torch.randn(1, 2, 64)
    assert torch.equal(bound(q, batch), paged_attention(q, growing[0], batch)), "it reads the old pool"
    growing.abort(batch)
    assert growing.available == MOST - 40
    with pytest.raises(OutOfFrames) as full:
        growing.plan([growing.open()], [4 * (MOST - 40) + 1])
    assert full.value.shortfall == 1
    growing.check()


def test_a_plan_beyond_the_limit_grows_nothing(growing: PagedKVCache) -> None:
    with pytest.raises(OutOfFrames):
        growing.plan([growing.open()], [4 * MOST + 1])
    assert growing.num_frames == 8


def test_a_pool_does_not_grow_under_a_plan_that_is_outstanding(growing: PagedKVCache) -> None:
    """The caller may hold `cache[layer]` of that step, which would show the old pool."""
    space, other = growing.open(), growing.open()
    batch = growing.plan([space], [30])
    with pytest.raises(OutOfFrames):
        growing.plan([other], [30])
    growing.commit(batch, list(range(30)))
    growing.plan([other], [30])
    assert growing.num_frames == 16


def test_admission_counts_what_the_pool_may_grow_by(growing: PagedKVCache) -> None:
    assert growing.admits(MOST)
    assert not growing.admits(MOST + 1)
    growing.resize(2 * MOST)
    assert (growing.limit, growing.available) == (2 * MOST, 2 * MOST)


@pytest.mark.parametrize("given", [{"num_frames": 64}, {"memory": 64 * SPEC.frame_bytes}])
def test_a_pool_that_was_given_a_size_keeps_to_the_size_of_its_last_resize(given: dict[str, int]) -> None:
    cache = PagedKVCache(SPEC, **given)  # type: ignore[arg-type]
    cache.resize(16)
    assert (cache.limit, cache.available) == (16, 16)
    with pytest.raises(OutOfFrames):
        cache.plan([cache.open()], [17 * SPEC.block_size])
    assert cache.num_frames == 16
    cache.resize(32)
    assert (cache.limit, cache.available) == (32, 32)


def test_a_cache_without_a_size_holds_half_of_the_memory_that_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_available_memory", lambda: 100 * SPEC.frame_bytes)
    cache = PagedKVCache(SPEC)
    assert cache.num_frames == cache.limit == 50
    monkeypatch.setattr(sizes, "_available_memory", lambda: SPEC.frame_bytes)
    with pytest.raises(InvalidRequest, match="holds no frame"):
        PagedKVCache(SPEC)
    monkeypatch.undo()
    assert 2**27 < sizes._memory_for_a_pool(torch.device("cpu")) < 2**45


@pytest.mark.skipif(not IS_THERE, reason="reads /proc of Linux")
def test_a_pool_of_half_of_the_memory_takes_what_is_written() -> None:
    """The test counts pages of the pool's arrays alone, because other threads of the process take memory too."""
    spec = KVSpec(num_layers=8, num_kv_heads=8, head_dim=128)
    cache = PagedKVCache(spec)
    space = cache.open()
    store_bytes = 40 * spec.frame_bytes
    batch = cache.plan([space], [40 * spec.block_size])
    cache.storage.frames[torch.from_numpy(batch.plan.group_slots[0][:: spec.block_size] // spec.block_size)] = 1
    held = resident(cache.storage.frames.numpy()) + sum(map(resident, cache.state))
    assert store_bytes <= held < 3 * store_bytes + 2**25
    cache.abort(batch)


@pytest.mark.many_steps
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_fixed_batch_says_when_the_page_tables_have_moved(mirrored: bool) -> None:
    """A CUDA graph that was captured before reads the old ones."""
    cache = PagedKVCache(SPEC, num_frames=200)
    if mirrored:  # as on a GPU
        cache._mirror = DeviceMirror(torch.device("cpu"))
    fixed, space = cache.fixed_batch(1, 400), cache.open()
    place, moves = None, []
    for step in range(300):
        batch = cache.plan([space], [1], into=fixed)
        table = batch.block_table
        assert fixed.moved == (place != (table.data_ptr(), table.shape))
        if fixed.moved:
            moves.append(step)
        place = table.data_ptr(), table.shape
        cache.commit(batch, [step])
    assert moves[0] == 0
    assert 2 <= len(moves) <= 8
