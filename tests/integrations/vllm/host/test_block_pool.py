"""Our blocks in KVCacheManager of vLLM, beside vLLM's own: a random life of both, and the cost of a step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from pagedkv.errors import InvalidRequest
from pagedkv.integrations import vllm as plugin
from pagedkv.integrations.vllm import scheduler
from pagedkv.integrations.vllm.block_pool import PagedBlockPool
from pagedkv.integrations.vllm.offload import PagedOffloadingSpec
from pagedkv.integrations.vllm.scheduler import _PagedAsyncScheduler, _PagedSyncScheduler

BLOCK = 16
SIZES: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def manager_of(num_blocks: int, is_ours: bool, window: int | None = None) -> KVCacheManager:
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**SIZES))]
    if window:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**SIZES, sliding_window=window)))
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    with scheduler._paged_blocks() if is_ours else nullcontext():
        return KVCacheManager(config, max_model_len=8192, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


def request_of(number: int, ids: list[int]) -> Request:
    return Request(
        request_id=str(number), prompt_token_ids=ids, pooling_params=None,
        sampling_params=SamplingParams(max_tokens=99), block_hasher=get_request_block_hasher(BLOCK, sha256),
    )  # fmt: skip


def life(manager: KVCacheManager, seed: int, steps: int = 400) -> Iterator[tuple[str, int]]:
    """Open, grow, end and preempt requests at random. Yield each refusal and each hit."""
    dice, running = random.Random(seed), []
    stems = [[dice.randrange(50) for _ in range(300)] for _ in range(4)]
    for number in range(steps):
        deed, choice = dice.random(), dice.random()
        stem, length = stems[dice.randrange(4)], dice.randrange(300)
        tail = [dice.randrange(50) for _ in range(dice.randrange(1, 60))]
        if deed < 0.4:
            request = request_of(number, stem[:length] + tail)
            blocks, hits, *_ = manager.get_computed_blocks(request)
            yield "hit", hits
            if manager.allocate_slots(request, request.num_tokens - hits, hits, blocks) is None:
                yield "refused", number
                manager.free(request)
            else:
                request.num_computed_tokens = request.num_tokens
                running.append(request)
        elif deed < 0.85 and running:
            request = running[int(choice * len(running))]
            request.append_output_token_ids(length % 50)
            if manager.allocate_slots(request, 1) is None:
                yield "preempted", number
                running.remove(request)
                manager.free(request)
            else:
                request.num_computed_tokens += 1
        elif running:
            manager.free(running.pop(int(choice * len(running))))
        if number % 20 == 0 and hasattr(manager.block_pool, "check"):
            manager.block_pool.check()
    for request in running:
        manager.free(request)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("num_blocks", [30, 80])
def test_a_random_life_has_the_same_refusals_and_no_fewer_hits(num_blocks: int, window: int | None) -> None:
    """The pools evict in the same order, but for blocks without hashes, which ours takes first."""
    init_none_hash(sha256)
    hits, refusals = [0, 0], [0, 0]
    for seed in range(25):
        for which, is_ours in enumerate((False, True)):
            manager = manager_of(num_blocks, is_ours, window)
            for event, value in life(manager, seed):
                hits[which] += value if event == "hit" else 0
                refusals[which] += event != "hit"
            assert manager.block_pool.get_num_free_blocks() == num_blocks - 1
    assert refusals[0] > 0
    assert hits[0] > 0
    assert refusals[1] <= refusals[0]
    assert hits[1] >= hits[0]


def pools(enable_caching: bool = True) -> list[BlockPool]:
    """Return the pool of vLLM and ours, of 8 blocks each, with events."""
    return [kind(8, enable_caching, BLOCK, enable_kv_cache_events=True) for kind in (BlockPool, PagedBlockPool)]


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("num_hashes", [0, 1, 2])
@pytest.mark.parametrize("has_twin", [False, True])
@pytest.mark.parametrize("num_taken", [6, 7])
def test_a_block_is_evicted_as_vllm_evicts_it(
    enable_caching: bool, num_hashes: int, has_twin: bool, num_taken: int
) -> None:
    """A block may have several hashes, and two blocks may have the same ones. With 6 blocks taken, one twin stays."""
    seen = []
    for pool in pools(enable_caching):
        blocks = pool.get_new_blocks(3)
        for block in blocks[: 1 + has_twin]:
            for number in range(num_hashes):
                pool._insert_block_hash(make_block_hash_with_group_id(bytes([number]) * 32, 0), block, BLOCK)
        pool.free_blocks(blocks)
        pool.take_events()
        taken = pool.get_new_blocks(num_taken)
        left = {
            key: [*found] if isinstance(found, dict) else [found.block_id]
            for key, found in pool.cached_block_hash_to_block._cache.items()
        }
        others = {key: set(found) for key, found in pool.cached_block_hashes_by_block.items()}
        hashes = [(block.block_hash, block.block_hash_num_tokens, block.ref_cnt) for block in pool.blocks]
        seen.append((left, others, pool.take_events(), hashes))
        pool.free_blocks(taken)
        assert pool.reset_prefix_cache()
    assert seen[0] == seen[1]
    stays = num_taken == 6 and num_hashes > 0 and enable_caching
    assert bool(seen[1][0]) is stays or not enable_caching
    evicted = max(0, 1 + has_twin - stays) if enable_caching and num_hashes else 0
    assert len(seen[1][2]) == num_hashes * evicted


def test_a_block_whose_next_use_is_watched_is_reported() -> None:
    for pool in pools():
        blocks, watched = pool.get_new_blocks(7), []
        pool.unpin_blocks(blocks[:2], watched.append)
        pool.get_new_blocks(1)
        assert watched == [blocks[0]]


def test_metrics_count_the_blocks_that_are_taken() -> None:
    for pool in pools():
        pool.metrics_collector = MagicMock()
        pool.get_new_blocks(5)
        assert pool.metrics_collector.on_block_allocated.call_count == 5


def test_references_of_the_null_block_are_those_of_vllm() -> None:
    """vLLM 0.32 counts them when it touches and frees the block, 0.33 counts none, and so do their metrics."""
    seen = []
    for pool in pools():
        blocks, counts = [pool.null_block, *pool.get_new_blocks(2), pool.null_block], []
        pool.metrics_collector = MagicMock()
        for act in (pool.touch, pool.touch, pool.free_blocks, pool.free_blocks, pool.free_blocks):
            act(blocks)
            counts.append((pool.get_num_free_blocks(), [block.ref_cnt for block in blocks]))
        seen.append((counts, pool.metrics_collector.on_block_accessed.call_count))
    assert seen[0] == seen[1]
    assert seen[1][0][-1][0] == 7


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: ("0.40.0", True))
    for make in (_PagedSyncScheduler, _PagedAsyncScheduler, PagedOffloadingSpec):
        with pytest.raises(InvalidRequest, match="vLLM 0.40.0 is installed"):
            make(None)


def test_a_block_that_is_freed_twice_is_not_handed_out() -> None:
    for pool in pools():
        [block] = pool.get_new_blocks(1)
        pool.free_blocks([block])
        pool.free_blocks([block])
        with pytest.raises(AssertionError):
            pool.get_new_blocks(1)


# 64 requests have 63 blocks each, and get 360 tokens more
POOLS: dict[str, int] = {
    "no block is evicted": 200_000,
    "each block is evicted": 64 * 64 + 64 * 360 // BLOCK + 600,
}


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", POOLS.values(), ids=POOLS)
def test_a_step_costs_no_more_than_that_of_vllm(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 requests get a token each, and one of 8,000 tokens its blocks: our median time by that of vLLM, in turn.

    A turn takes 2 ms, so both of its halves bear the same load of other processes.
    """
    monkeypatch.setenv("PAGEDKV_DEBUG", "0")
    init_none_hash(sha256)
    managers = [manager_of(num_blocks, is_ours) for is_ours in (False, True)]
    batches: list[list[Request]] = [[], []]
    for manager, batch in zip(managers, batches, strict=True):
        for number in range(64):
            request = request_of(number, [number] * 1000)
            assert manager.allocate_slots(request, 1000) is not None
            request.num_computed_tokens = 1000
            batch.append(request)
    seconds: dict[str, list[list[float]]] = {"decode": [[], []], "prompt": [[], []]}
    for turn in range(360):
        for which in (0, 1) if turn % 2 else (1, 0):
            manager, batch = managers[which], batches[which]
            start = time.perf_counter()
            for request in batch:
                manager.allocate_slots(request, 1)
            seconds["decode"][which].append((time.perf_counter() - start) / len(batch))
            for request in batch:
                request.num_computed_tokens += 1
            long = request_of(1000 + turn, [turn] * 8000)
            start = time.perf_counter()
            assert manager.allocate_slots(long, 8000) is not None
            manager.free(long)
            seconds["prompt"][which].append(time.perf_counter() - start)
    for name, (plain, ours) in seconds.items():
        ratio = median(mine / theirs for theirs, mine in zip(plain, ours, strict=True))
        print(f"{name}: vLLM {1e6 * median(plain):.2f} us, pagedkv {1e6 * median(ours):.2f} us, ratio {ratio:.3f}")
        assert ratio <= (1.0 if name == "prompt" else 1.1), name


def test_pins_are_limited_and_end() -> None:
    pool = PagedBlockPool(101, True, BLOCK)
    blocks = pool.get_new_blocks(40)
    for number, block in enumerate(blocks):
        pool._insert_block_hash(make_block_hash_with_group_id(number.to_bytes(32), 0), block, BLOCK * (number + 1))
    assert pool.pin(blocks[:6], until=10) == "accepted"
    for second in range(1000):  # the same blocks again: one pin
        assert pool.pin(blocks[:6], until=10 + second % 7) == "accepted"
    assert len(pool._pins) == 1
    assert pool.pin(blocks, until=20) == "clipped"
    assert pool.pin(blocks[30:], until=99) == "rejected"
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 100 - 10
    pool.expire(20)
    assert pool.get_num_free_blocks() == 100
    pool.check()
    again = pool.get_new_blocks(100)
    assert len(again) == 100
    pool.free_blocks(again)
    assert pool.pin([], until=1) == "accepted"
    assert pool.reset_prefix_cache()
