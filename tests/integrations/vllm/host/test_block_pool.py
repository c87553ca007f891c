"""Our blocks in KVCacheManager of vLLM, beside vLLM's own: a random life of both, and the cost of a step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from statistics import median
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from pagedkv.integrations.vllm.scheduler import paged_blocks

BLOCK = 16
SIZES: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def manager_of(num_blocks: int, is_ours: bool, window: int | None = None) -> KVCacheManager:
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**SIZES))]
    if window:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**SIZES, sliding_window=window)))
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    with paged_blocks() if is_ours else nullcontext():
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


# blocks of the pool, and our largest share of vLLM's time for a prompt. 64 requests have 64 blocks each
POOLS: dict[str, tuple[int, float]] = {
    "no block is evicted": (200_000, 1.0),
    "each block is evicted": (64 * 64 + 600, 1.05),
}


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "most"), POOLS.values(), ids=POOLS)
def test_a_step_costs_no_more_than_that_of_vllm(num_blocks: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of 64 requests, and a prompt of 8,000 tokens: the median of our time by that of vLLM in each turn.

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
            if num_blocks > 100_000:  # a full pool has no blocks for 360 steps
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
        if not plain:
            continue
        ratio = median(mine / theirs for theirs, mine in zip(plain, ours, strict=True))
        print(f"{name}: vLLM {1e6 * median(plain):.2f} us, pagedkv {1e6 * median(ours):.2f} us, ratio {ratio:.3f}")
        assert ratio <= (most if name == "prompt" else 1.1), name
