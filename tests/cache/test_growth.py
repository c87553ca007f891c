"""A pool without a given size: memory follows the frames in use, and a pool that may grow does so when a plan asks."""

from __future__ import annotations

import logging

import pytest
import torch

from pagedkv import KVSpec, PagedKVCache, paged_attention
from pagedkv.cache import sizes
from pagedkv.cache.mirror import DeviceMirror
from pagedkv.errors import InvalidRequest, OutOfFrames
from tests.cache.test_resize import SPEC, read, store
from tests.core.cost.memory import IS_THERE, resident

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
