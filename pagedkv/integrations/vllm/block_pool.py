"""BlockPool of vLLM whose free blocks are frames of a FramePool: which block is taken next, and which is evicted.

hashes, lookups, events, references of blocks       those of vLLM's BlockPool
order of free blocks, eviction, its policy          FramePool
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from pagedkv.core import FramePool
from pagedkv.integrations.vllm.frame_queue import FrameQueue


class PagedBlockPool(BlockPool):
    """BlockPool over a FramePool. Arguments as in BlockPool."""

    policy: str = "lru"
    """The eviction policy of pools that are made from now on, see FramePool. Set by PagedScheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks[0].is_null = False  # the null block of the list that is replaced here
        for block in self.blocks:
            block.prev_free_block = block.next_free_block = None
        self.frames = FramePool(self.num_gpu_blocks, key_bytes=4, policy=self.policy)
        self.free_block_queue: Any = FrameQueue(self.blocks, self.frames)
        self.null_block: KVCacheBlock = self.free_block_queue.popleft()
        self.null_block.is_null = True

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add a reference to each of `blocks`, which a request has found. Free ones leave the list."""
        free = {block.block_id: block for block in blocks if block.ref_cnt == 0 and not block.is_null}
        if free:
            self.free_block_queue.remove_n(list(free.values()))
        for block in blocks:
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def check(self) -> None:
        """Raise InvariantViolation for frames, AssertionError for blocks that are both free and used. O(blocks)."""
        self.frames.check()
        free = {block.block_id for block in self.free_block_queue.get_all_free_blocks()}
        used = {block.block_id for block in self.blocks if block.ref_cnt or block.is_null}
        if free & used or len(free) + len(used) != len(self.blocks):
            raise AssertionError(f"blocks {sorted(free & used)[:8]} are free and used")
